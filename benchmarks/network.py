"""The lab's links: how long collectives take, against the bytes that they send over the rate of a link.

    python -m benchmarks.network [--check] [--save]

In the lab, 4 hosts on one switch, one rank each; collectives of float32 values, as the rewritten step runs them. Each
is measured one after the other, and again after pauses, as between the steps of a training, when links were idle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from autopar import ClusterSpec
from autopar.lab import Job, Lab, unavailable_reason
from autopar.lab.host import Host, shell
from autopar.ops.collectives import wire_bytes
from autopar.ops.measured import collective_named
from benchmarks.harness import Report, Spread, Target, options, publish

HOSTS = 4
RATES = ("1 Gbit/s", "200 Mbit/s")
SIZES_MB = (1, 4, 16)
LIMIT = 0.07
"""How far an all-reduce may be from its bytes over the bandwidth."""
PAUSE_S = 0.1
WARMUP, REPEATS = 2, 9
ROUNDS = 3
"""All cases are measured so often in turn, that no bad moment of the machine decides about one of them."""
GOODPUT = 1448 / 1514
"""Payload in a full Ethernet frame of TCP: 1500 bytes less 40 of headers and 12 of a timestamp, in 1514."""
KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


@dataclass(frozen=True)
class Case:
    """One measurement."""

    what: str
    size_mb: int
    pause_s: float

    @property
    def elements(self) -> int:
        return self.size_mb * 1_000_000 // 4

    def link_bytes(self) -> int:
        """What passes the busiest direction of the busiest link, as the cost model has it."""
        sent, received = wire_bytes(collective_named(KINDS[self.what], self.elements, HOSTS), HOSTS)
        return max(*sent, *received)


CASES = [
    *(Case("all-reduce", size, pause) for pause in (0.0, PAUSE_S) for size in SIZES_MB),
    *(Case(what, size, 0.0) for what in KINDS if what != "all-reduce" for size in SIZES_MB),
]


def seconds_of(job: Job, case: Case) -> list[float]:
    """How long each repeat of a round took: from when the last rank began to when the last one ended."""
    request = {"what": case.what, "elements": case.elements, "repeats": WARMUP + REPEATS, "pause_s": case.pause_s}
    by_rank = [answer["seconds"] for answer in job.ask(request, timeout_s=300)]
    repeats = zip(*by_rank, strict=True)
    return [max(end for _, end in ranks) - max(begin for begin, _ in ranks) for ranks in repeats][WARMUP:]


def shaped_bytes(host: Host) -> int:
    """What the token bucket of a host has let out, headers of every packet counted."""
    return int(json.loads(shell(f"tc -n {host.namespace} -s -json qdisc show dev {host.interface}"))[0]["bytes"])


def examine(report: Report, rate: str) -> None:
    """Measures at one rate, and adds rows, targets and figures."""
    cluster = ClusterSpec.loads(
        f"hosts: [{{name: host, count: {HOSTS}, devices: 1 x cpu}}]\nnetwork: {{bandwidth: {rate}}}"
    )
    worker = [sys.executable, "-m", "benchmarks.network_worker"]
    with Lab.of(cluster) as lab, Job(lab.ranks, worker) as job:
        rate_bps = lab.rates_bps[0]
        assert rate_bps is not None
        seconds: dict[Case, list[float]] = {case: [] for case in CASES}
        shaped = dict.fromkeys(CASES, 0)
        for i in range(ROUNDS):
            for case in CASES:
                pause = " after a pause" if case.pause_s else ""
                click.echo(f"{rate}, round {i + 1}: {case.what} of {case.size_mb} MB{pause}", err=True)
                before = shaped_bytes(lab.hosts[0])
                seconds[case] += seconds_of(job, case)
                shaped[case] += shaped_bytes(lab.hosts[0]) - before
    for case in CASES:
        _add(report, rate, rate_bps, case, seconds[case], shaped[case] / (ROUNDS * (WARMUP + REPEATS)))


def _overhead(report: Report) -> str:
    """Seen at each rate with the largest size."""
    key = "{rate}, all-reduce, {size} MB, in a row"
    found = {rate: report.data[key.format(rate=rate, size=max(SIZES_MB))] for rate in RATES}
    return ", ".join(f"{seen['shaped_bytes'] / seen['link_bytes']:.3f} at {rate}" for rate, seen in found.items())


def _add(report: Report, rate: str, rate_bps: float, case: Case, seconds: Sequence[float], shaped: float) -> None:
    ideal_s = 8 * case.link_bytes() / rate_bps
    ratio = Spread.of(s / ideal_s for s in seconds)
    taken = "after pauses" if case.pause_s else "in a row"
    goodput_bps = 8 * case.link_bytes() / Spread.of(seconds).median
    report.rows.append(
        (
            rate,
            f"{case.what}, {taken}",
            f"{case.size_mb}",
            f"{case.link_bytes() / 1e6:.2f}",
            f"{1e3 * ideal_s:.1f}",
            f"{1e3 * Spread.of(seconds).median:.1f}",
            f"{ratio:.3f}",
            f"{goodput_bps / rate_bps:.3f}",
        )
    )
    key = f"{rate}, {case.what}, {case.size_mb} MB, {taken}"
    report.data[key] = {"seconds": list(seconds), "link_bytes": case.link_bytes(), "shaped_bytes": shaped}
    if case.what == "all-reduce":
        report.targets.append(Target(f"{key}: distance from bytes over bandwidth", abs(ratio.median - 1), LIMIT))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options
def main(check: bool, json_file: str | None, save: bool) -> None:
    """Times collectives in the lab."""
    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no lab: {reason}")
    report = Report(
        name="network",
        title=f"Collectives of {HOSTS} hosts in the lab, against bytes over bandwidth",
        columns=("link", "collective", "MB", "MB a link", "ideal ms", "ms", "times the ideal", "of the line rate"),
    )
    report.notes = [
        f"Medians (quartiles) of {ROUNDS} rounds of {REPEATS} each, after {WARMUP} more; a collective lasts from when "
        "the last rank began to when the last one ended. 'MB a link' is what passes the busiest direction of the "
        "busiest link, as the cost model declares it, and 'ideal' is that over the rate of the link.",
        f"The links count headers: a full frame holds {GOODPUT:.3f} of payload, so a collective that never waits takes "
        f"{1 / GOODPUT:.3f} times the ideal, and reaches {GOODPUT:.3f} of the line rate. What goes below that after a "
        "pause is the token bucket, which is full then and lets the first 2 ms (at least 72 KiB) through at once.",
        "Only the all-reduce has a target. Reduce-scatter and all-gather are rings of autopar's, broadcast and reduce "
        "are gloo's: a binomial tree that passes a value on when it is there as a whole, and a ring with a last hop.",
    ]
    for rate in RATES:
        examine(report, rate)
    report.notes.append(f"Bytes that left a link for each byte of an all-reduce's payload: {_overhead(report)}.")
    sys.exit(publish(report, command="python -m benchmarks.network", check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
