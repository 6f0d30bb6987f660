"""`python -m benchmarks.peers`: autopar beside DDP, FSDP2, ZeRO, LocalSGD and AutoDist's builders."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from autopar.lab import Lab, loopback, unavailable_reason
from autopar.spec.cluster import ClusterSpec
from benchmarks.harness import Report, options, publish
from benchmarks.peers import PEERS, peer_named
from benchmarks.peers.case import Case
from benchmarks.peers.cases import SUITES, Suite
from benchmarks.peers.measure import Contest
from benchmarks.peers.outcome import COMPARED_STEPS, CaseOutcome
from benchmarks.peers.ranks import Ranks
from benchmarks.peers.table import COLUMNS, fill
from benchmarks.suite import workload_named
from benchmarks.suite.clusters import case_named

METHOD = (
    "Ratios are medians (quartiles) over rounds in which all systems take a block of steps in turn, in the same "
    "processes, one thread each; below 1 is faster than the best peer. The best peer is the fastest of the same "
    "fidelity whose losses are right: of several alike, the luckiest, which favours the peers. Every system takes the "
    "optimizer's fused implementation where it can. Bytes are those that leave a host, headers included, shared "
    "evenly by its ranks. The loss difference is the greatest relative one to the reference over the first "
    f"{COMPARED_STEPS} steps."
)


@click.command(context_settings={"show_default": True})
@click.option("--suite", "suite_name", default="quick", type=click.Choice(list(SUITES)), help="quick: ten minutes.")
@click.option("--only", multiple=True, metavar="WORKLOAD/CLUSTER", help="This case alone; also WORKLOAD or /CLUSTER.")
@click.option("--peer", "chosen", multiple=True, metavar="NAME", help="Against this peer alone; may be repeated.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write every case here as soon as it is measured, and take from here what an earlier run has measured.",
)
@click.option("--loopback", "no_lab", is_flag=True, help="Do not use network namespaces even where they can be had.")
@options
def main(
    suite_name: str,
    only: tuple[str, ...],
    chosen: tuple[str, ...],
    keep: Path | None,
    no_lab: bool,
    check: bool,
    json_file: str | None,
    save: bool,
) -> None:
    """Compares autopar's plans with its peers, on the suite's workloads and clusters."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    suite = SUITES[suite_name]
    try:
        cases = suite.chosen(only)
        peers = tuple(peer_named(name).name for name in chosen) or suite.peers
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    if strangers := set(peers) - set(PEERS):
        raise click.UsageError(f"{', '.join(strangers)} always takes part; --peer names whom it is compared with")
    title = f"Step times of autopar and its peers: suite {suite.name}"
    report = Report(name=f"peers-{suite.name}", title=title, columns=COLUMNS)
    limit_s = None if only else suite.limit_s
    outcomes, left_out = _measure(suite, cases, peers, limit_s, keep, no_lab)
    begun = sorted(outcome.machine.split(";")[0] for outcome in outcomes)
    report.notes.append(f"{METHOD} Cases were begun between {begun[0]} and {begun[-1]}." if begun else METHOD)
    fill(report, outcomes)
    if left_out:
        report.notes.append(f"No time was left for {', '.join(left_out)}.")
    arguments = [f"--suite {suite.name}", *(f"--only {o}" for o in only), *(f"--peer {p}" for p in chosen)]
    command = " ".join(["python -m benchmarks.peers", *arguments, *(["--loopback"] if no_lab else [])])
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


def _measure(
    suite: Suite,
    cases: Sequence[tuple[str, tuple[str, ...]]],
    peers: tuple[str, ...],
    limit_s: float | None,
    keep: Path | None,
    no_lab: bool,
) -> tuple[list[CaseOutcome], list[str]]:
    start = time.monotonic()
    outcomes: list[CaseOutcome] = []
    left_out: list[str] = []
    took_s: list[float] = []
    for cluster_name, workloads in cases:
        kept = {w: keep / f"{w}-{cluster_name}.json" for w in workloads} if keep else {}
        try:
            outcomes += [CaseOutcome.load(path) for path in kept.values() if path.exists()]
        except ValueError as e:
            raise click.ClickException(
                f"{keep} holds a case that cannot be read; remove it or name another: {e}"
            ) from e
        missing = [w for w in workloads if w not in kept or not kept[w].exists()]
        if not missing:
            continue
        cluster = case_named(cluster_name).cluster
        with (
            _lab(cluster, no_lab) as lab,
            Ranks(lab.ranks, lab.servers) as ranks,
            TemporaryDirectory(prefix="autopar-") as folder,
        ):
            for name in missing:
                begun = time.monotonic()
                expected_s = statistics.median(took_s or [0.0])
                if limit_s is not None and begun - start + expected_s > limit_s:
                    left_out.append(f"{name}/{cluster_name}")
                    continue
                case = Case(workload_named(name), cluster_name, cluster, Path(folder), suite.effort.search_time_s)
                contest = Contest(case, ranks, suite.effort, _say(case.name, start))
                outcomes.append(contest.run(peers, f"{case_named(cluster_name).about}, {lab.note}", lab.emulated))
                took_s.append(time.monotonic() - begun)
                if keep:
                    keep.mkdir(parents=True, exist_ok=True)
                    outcomes[-1].save(kept[name])
    return outcomes, left_out


@contextmanager
def _lab(cluster: ClusterSpec, no_lab: bool) -> Iterator[Lab]:
    reason = "--loopback was given" if no_lab else unavailable_reason()
    if reason is not None:
        click.echo(f"loopback, since {reason}", err=True)
    with loopback(cluster) if reason else Lab.of(cluster) as lab:
        yield lab


def _say(case: str, start: float) -> Callable[[str], None]:
    return lambda what: click.echo(f"[{time.monotonic() - start:4.0f} s] {case}: {what}", err=True)


if __name__ == "__main__":
    main()
