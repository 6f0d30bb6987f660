"""Measures what a cluster does: every collective that plans are made of, its links and its devices.

All ranks of a job call `calibrate`, and get the same `Calibration`. The functions that begin collectives
here are those that a training step calls.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.backends import collectives
from autopar.backends.exchange import in_rounds
from autopar.cost_models.compute import is_cpu
from autopar.ops.context import Context
from autopar.ops.subgroups import Subgroups, subgroup_of
from autopar.runtime.job.process_group import Group, Rendezvous, join
from autopar.runtime.job.same_call import job_cluster
from autopar.spec.calibration import Calibration, Collective, CollectiveTimes, DeviceRates, LinkTimes
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies.hierarchical_all_reduce import HierarchicalAllReduce, inner_subgroups

SIZES = tuple(4096 << 2 * i for i in range(8))
"""Bytes, from 4 KiB to 64 MiB."""
ALWAYS_BYTES = 1 << 20
"""Up to this size everything is measured, however long it takes."""
LEAST, MOST = 3, 15
"""Repeats of each size."""
BESIDE_BYTES = 4 << 20
LINK_BYTES = 8 << 20
CORE_WAIT_BYTES, CORE_WAIT_WIDTH = 256 << 10, 256
"""Bytes of a collective that is timed while ranks compute: few for a network, but enough to go as those of plans do.
Rows of the matrices that ranks multiply meanwhile: after each product, a millisecond's work, a rank looks whether the
collective has ended."""
ALONE_S, ALONE_RANKS = 0.3, 8
"""So long, many turns of the processes' scheduler, a rank computes while the others wait; and so many ranks do."""
COLLECTIVES_SHARE = 0.8
"""Of the time budget."""
KINDS: tuple[Collective, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "reduce",
    "broadcast",
    "all_to_all",
)
DTYPES = ("float32", "bfloat16")

T = TypeVar("T")
Issue = Callable[[], dist.Work]
Progress = Callable[[str], None]


def calibrate(
    cluster: ClusterSpec | None = None,
    *,
    time_budget_s: float = 180.0,
    timeout_s: float = 300.0,
    progress: Progress | None = None,
) -> Calibration:
    """Measures `cluster`, by default what `ClusterSpec.detect()` sees; every rank of the job calls it.

    `time_budget_s` decides how large the messages become: up to 64 MiB, and 1 MiB in any case. Raises
    `PlanMismatchError` where the job has another number of ranks than the cluster, `CollectiveError` where a rank does
    not come.
    """
    group = join(timeout_s)
    cluster = job_cluster(cluster, group)
    with group.guard("a calibration"):
        return _Bench(cluster, group, time_budget_s, progress or (lambda said: None)).run()


class _Bench:
    """One calibration, on one rank."""

    def __init__(self, cluster: ClusterSpec, group: Group, time_budget_s: float, progress: Progress) -> None:
        self.cluster, self.group = cluster, group
        self.rank, self.world_size = group.rank, group.world_size
        self.topology = Topology(cluster)
        on_gpu = torch.cuda.is_available() and not is_cpu(self.topology.ranks[self.rank].device)
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.width = 512 if self.device.type == "cpu" else 4096
        """Of the matrices that are multiplied."""
        self.on_processors = False
        """Whether all ranks compute on processors."""
        self.time_budget_s = time_budget_s
        self._say = progress if group.rank == 0 else lambda said: None

    def run(self) -> Calibration:
        start = time.monotonic()
        devices = self.devices()
        self.on_processors = set(self._told(self.device.type)) == {"cpu"}
        found: list[CollectiveTimes] = []
        links: tuple[LinkTimes, ...] = ()
        two_at_once = compute_beside = compute_at_once = None
        if self.world_size > 1:
            wanted = self.wanted()
            for kind, teams in wanted:
                self._say(f"{kind.replace('_', '-')}{_among(teams)}")
                found.append(self.collective(kind, teams, COLLECTIVES_SHARE * self.time_budget_s / len(wanted)))
            self._say("links")
            links = tuple(self.links())
            self._say("two all-reduces at once, compute beside one")
            two_at_once, compute_beside = self.at_once()
            if self.on_processors:
                self._say("compute of one rank, and of all at once")
                compute_at_once = self.compute_at_once()
        calibration = Calibration(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            hardware=f"{platform.system()} {platform.release()}, {self.topology.ranks[0].device.kind}",
            versions={"torch": torch.__version__, "python": platform.python_version()},
            cluster=self.cluster.fingerprint,
            backend="none" if self.group.pg is None else str(dist.get_backend_config(self.group.pg)),
            collectives=tuple(found),
            links=links,
            devices=devices,
            two_at_once=two_at_once,
            compute_beside=compute_beside,
            compute_at_once=compute_at_once,
            took_s=round(time.monotonic() - start, 1),
        )
        text = Rendezvous(self.group).from_rank_0("calibration", calibration.model_dump_json)
        return Calibration.loads(text, "rank 0's calibration")

    def wanted(self) -> list[tuple[Collective, Subgroups]]:
        """Every collective among all ranks, and what plans do within teams: between the ranks of a host, or others
        that follow one another, and across these teams."""
        found: dict[tuple[Collective, Subgroups], None] = dict.fromkeys((kind, ()) for kind in KINDS)
        context = Context(self.world_size).on(self.cluster)
        for options in HierarchicalAllReduce().options(context):
            inner = inner_subgroups(options.inner, context)
            if inner is not None:
                found["reduce_scatter", inner] = found["all_gather", inner] = None
                found["all_reduce", tuple(zip(*inner, strict=True))] = None
        return list(found)

    def collective(self, kind: Collective, teams: Subgroups, budget_s: float) -> CollectiveTimes:
        """One collective, at as many sizes as there is time for."""
        end = time.monotonic() + budget_s
        rows: list[tuple[int, float, float]] = []
        for size in SIZES:
            # Four times the bytes take four times as long, at most, and are sent LEAST times and once more.
            too_long = rows and time.monotonic() + 4 * rows[-1][1] * (LEAST + 1) > end
            if size > ALWAYS_BYTES and any(self._told(bool(too_long))):
                break
            issue, size_bytes = self._issue(kind, teams, size)
            if rows and size_bytes <= rows[-1][0]:
                continue  # of many ranks, no message is smaller than the first
            first_s, _ = self._repeated(issue, 1)
            seconds, processor_s = self._repeated(issue, max(LEAST, min(MOST, int(budget_s / 16 / first_s))))
            rows.append((size_bytes, seconds, processor_s))
        sizes, times, processor = zip(*rows, strict=True)
        return CollectiveTimes(
            kind=kind,
            teams=teams,
            size_bytes=sizes,
            seconds=times,
            processor_s=processor,
            core_wait_s=self.core_wait_s(kind, teams, budget_s) if self.on_processors else 0.0,
        )

    def core_wait_s(self, kind: Collective, teams: Subgroups, budget_s: float) -> float:
        """Seconds that a collective takes longer while all ranks compute."""
        issue, _ = self._issue(kind, teams, CORE_WAIT_BYTES)
        product = self._product(torch.float32, CORE_WAIT_WIDTH)

        def beside() -> float:
            self._meet()
            start, work = time.perf_counter(), issue()
            while not work.is_completed():
                product()
            seconds = time.perf_counter() - start
            _wait(work)
            return seconds

        first_s = max(self._told(beside()))
        count = max(2 * LEAST, min(MOST, int(budget_s / 16 / first_s)))  # they vary much
        alone = self._told([self._once(issue)[0] for _ in range(count)])
        computing = self._told([beside() for _ in range(count)])
        return max(0.0, fmean(_last(computing)) - median(_last(alone)))

    def _issue(self, kind: Collective, teams: Subgroups, size_bytes: int) -> tuple[Issue, int]:
        """What begins a collective of zeros, and how many bytes it has."""
        team = subgroup_of(self.rank, teams, self.world_size)
        n, place = len(team), team.index(self.rank)
        name = self.group.channel(teams, 0)
        assert name is not None
        part = part_elements(size_bytes, n)
        whole, mine = (torch.zeros(elements, device=self.device) for elements in (n * part, part))
        by, pg = collectives.library(whole, name)
        each, of_each = [part] * n, [part // n] * n
        begin: dict[str, Callable[[], tuple[torch.Tensor, dist.Work | None]]] = {
            "all_reduce": lambda: (whole, dist.all_reduce(whole, group=pg, async_op=True)),
            "reduce": lambda: by.reduce(whole, 0, pg),
            "broadcast": lambda: by.broadcast(whole, 0, pg),
            "reduce_scatter": lambda: by.reduce_scatter(whole, each, place, pg),
            "all_gather": lambda: by.all_gather(mine, each, place, pg),
            "all_to_all": lambda: by.all_to_all(mine, of_each, of_each, pg, in_rounds(mine, of_each)),
        }

        @collectives.may_fail()
        def issue() -> dist.Work:
            _, work = begin[kind]()
            assert work is not None, "an asynchronous collective returns its work"
            return work

        return issue, 4 * n * part

    def _repeated(self, issue: Issue, count: int) -> tuple[float, float]:
        """Seconds until the last rank had its result, the median; processor seconds of a rank, on average."""
        ranks = self._told([self._once(issue) for _ in range(count)])
        seconds = _last([[seconds for seconds, _ in rank] for rank in ranks])
        return median(seconds), fmean(processor_s for rank in ranks for _, processor_s in rank)

    def _once(self, issue: Issue) -> tuple[float, float]:
        self._meet()
        processor_s, start = time.process_time(), time.perf_counter()
        _wait(issue())
        self._synchronize()
        return time.perf_counter() - start, time.process_time() - processor_s

    def links(self) -> Iterator[LinkTimes]:
        """Between rank 0 and the first rank of every other host, there and back; on one host, between two ranks."""
        first: dict[str, int] = {}
        for rank, place in enumerate(self.topology.ranks):
            first.setdefault(place.host.name, rank)
        for other in list(first.values())[1:] or [1]:
            for sender, receiver in ((0, other), (other, 0)):
                small_s, large_s = (self._sent(sender, receiver, size) for size in (4, LINK_BYTES))
                rate = LINK_BYTES / max(large_s - small_s, 1e-9)
                yield LinkTimes(sender=sender, receiver=receiver, bytes_per_s=rate, latency_s=small_s / 2)

    def _sent(self, sender: int, receiver: int, size_bytes: int) -> float:
        """Seconds until the sender hears that the message has arrived; the median."""
        x, word = (torch.zeros(n // 4, device=self.device) for n in (size_bytes, 4))
        times = []
        for _ in range(LEAST + 1):
            self._meet()
            start = time.perf_counter()
            with collectives.may_fail():
                if self.rank == sender:
                    dist.send(x, group=self.group.pg, group_dst=receiver)
                    dist.recv(word, group=self.group.pg, group_src=receiver)
                    self._synchronize()
                    times.append(time.perf_counter() - start)
                elif self.rank == receiver:
                    dist.recv(x, group=self.group.pg, group_src=sender)
                    dist.send(word, group=self.group.pg, group_dst=sender)
        return median(self._told(times)[sender][1:])

    def at_once(self) -> tuple[float, float]:
        """Two all-reduces in multiples of one, and compute beside one in multiples of its time alone."""
        issue, other = (self._issue("all_reduce", (), BESIDE_BYTES)[0] for _ in range(2))

        def both() -> dist.Work:
            first, second = issue(), other()
            _wait(first)
            return second

        one_s, two_s = (self._repeated(what, LEAST + 2)[0] for what in (issue, both))
        product = self._product(torch.float32)
        product_s = self._timed(product)
        count = max(1, int(0.5 * one_s / product_s))

        def compute(beside: bool) -> float:
            self._meet()
            sent = issue() if beside else None
            start = time.perf_counter()
            for _ in range(count):
                product()
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # and not the collective's
            seconds = time.perf_counter() - start
            if sent is not None:
                _wait(sent)
            return seconds

        pairs = [(compute(True), compute(False)) for _ in range(LEAST + 2)]
        beside = median(median(with_s / alone_s for with_s, alone_s in rank) for rank in self._told(pairs))
        return two_s / one_s, beside

    def compute_at_once(self) -> float:
        """A rank's compute while all compute, in multiples of its time while the others wait, over several ranks."""
        product = self._product(torch.float32)

        def product_s(computes: bool) -> float:
            self._meet()
            start, count = time.perf_counter(), 0
            while computes and time.perf_counter() < start + ALONE_S:
                product()
                count += 1
            return (time.perf_counter() - start) / max(1, count)

        ranks = range(0, self.world_size, max(1, self.world_size // ALONE_RANKS))[:ALONE_RANKS]
        alone_s = {r: product_s(self.rank == r) for r in ranks}
        speeds = self._told(alone_s.get(self.rank, 0.0) / product_s(True))
        return 1 / fmean(speeds[r] for r in ranks)

    def devices(self) -> tuple[DeviceRates, ...]:
        """Of each kind of device: what a rank reaches while all others do the same, the median over ranks."""
        self._say("devices")
        large = 32 << 20 if self.device.type == "cpu" else 512 << 20
        flops = {dtype: 2 * self.width**3 / self._timed(self._product(getattr(torch, dtype))) for dtype in DTYPES}
        source, target = (torch.zeros(large // 4, device=self.device) for _ in range(2))
        copied_s = self._timed(lambda: target.copy_(source))
        parameter = torch.nn.Parameter(torch.zeros(large // 8, device=self.device))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        updated_s = self._timed(optimizer.step)
        small = torch.zeros(16, device=self.device)

        def many() -> None:
            for _ in range(100):
                small.add_(1.0)

        mine = DeviceRates(
            kind=self.topology.ranks[self.rank].device.kind,
            flops_per_s=flops,
            bytes_per_s=2 * large / copied_s,
            # Parameter, gradient and two moments are read, all but the gradient written.
            update_bytes_per_s=7 * large / 2 / updated_s,
            start_s=self._timed(many) / 100,
        )
        found = [DeviceRates.model_validate_json(text) for text in self._told(mine.model_dump_json())]
        return tuple(_middle([f for f in found if f.kind == kind]) for kind in dict.fromkeys(f.kind for f in found))

    def _product(self, dtype: torch.dtype, width: int | None = None) -> Callable[[], torch.Tensor]:
        """What computes a product of two square matrices."""
        n = width or self.width
        a, b = (torch.ones(n, n, dtype=dtype, device=self.device) for _ in range(2))
        return lambda: a @ b

    def _timed(self, work: Callable[[], object]) -> float:
        """Seconds, the median; the ranks do it at the same time."""
        times = []
        for _ in range(LEAST + 3):
            self._meet()
            start = time.perf_counter()
            work()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return median(times[1:])

    def _meet(self) -> None:
        """Waits for all ranks."""
        if self.group.name is not None:
            collectives.wait(collectives.all_reduce(torch.zeros(1, device=self.device), self.group.name))
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _told(self, mine: T) -> list[T]:
        """Every rank's, by rank."""
        return Rendezvous(self.group).exchange_as("measurement", json.dumps(mine), json.loads)


@collectives.may_fail()
def _wait(work: dist.Work) -> None:
    """Blocks until a collective is complete."""
    work.wait()


def _among(teams: Subgroups) -> str:
    return f" among {len(teams)} x {len(teams[0])} ranks" if teams else ""


def _last(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's seconds of each repeat."""
    return [max(repeat) for repeat in zip(*ranks, strict=True)]


def part_elements(size_bytes: int, ranks: int) -> int:
    """Numbers of 32 bits in a rank's part of a message: as many as can be shared evenly once more, a number for each
    pair of ranks at least."""
    return max(1, size_bytes // 4 // (ranks * ranks)) * ranks


def _middle(rates: list[DeviceRates]) -> DeviceRates:
    return DeviceRates(
        kind=rates[0].kind,
        flops_per_s={dtype: median(r.flops_per_s[dtype] for r in rates) for dtype in rates[0].flops_per_s},
        bytes_per_s=median(r.bytes_per_s for r in rates),
        update_bytes_per_s=median(r.update_bytes_per_s for r in rates),
        start_s=median(r.start_s for r in rates),
    )
