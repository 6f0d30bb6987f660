"""What operations declare, held to what they do: traffic of collectives, and memory as torch's allocator sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.fx
from torch.utils._pytree import tree_map_only

from autopar.backends import collectives
from autopar.backends.exchange import Exchange
from autopar.cost_models.alike import alike_in
from autopar.ops.base import Call
from autopar.ops.collectives import collective_of, served_bytes, wire_bytes
from autopar.ops.links import Vector
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.ops.values import Bytes, Setting
from autopar.runtime.program import Program
from autopar.runtime.writer import CALL

OFF = 0.03
"""Of traffic, relative to what ranks send."""
MORE, MORE_BYTES = 0.05, 64 * 1024
"""Memory that may be taken beyond what is declared."""
WARM = 2
"""Steps before the one that is measured: the first makes the optimizer's state."""


class CountedLinks:
    """Links of a network in which each rank has one out and one in; hosts that serve are numbered behind the ranks."""

    chains = sums = False

    def __init__(self, world_size: int, servers: int) -> None:
        self.world_size = world_size
        self._ends = world_size + servers

    def ring(self, subgroups: Subgroups, sent: Vector) -> Vector:
        """Each rank sends so much on to the next one of its subgroup."""
        each = all_subgroups(subgroups, self.world_size)
        return self.along([(r, s[(i + 1) % len(s)], sent[r]) for s in each for i, r in enumerate(s)])

    def from_each(self, subgroups: Subgroups, sent: Vector) -> Vector:
        """Each rank sends so much to every other one of its subgroup."""
        each = all_subgroups(subgroups, self.world_size)
        return self.along([(a, b, sent[a]) for s in each for a in s for b in s])

    def to_each(self, subgroups: Subgroups, received: Vector) -> Vector:
        """Each rank receives so much from every other one of its subgroup."""
        each = all_subgroups(subgroups, self.world_size)
        return self.along([(a, b, received[b]) for s in each for a in s for b in s])

    def along(self, ways: Sequence[tuple[int, int, float]]) -> Vector:
        """What each end sends, and then what each receives."""
        found = np.zeros(2 * self._ends)
        for a, b, size in ways:
            if a != b:
                found[a] += size
                found[self._ends + b] += size
        return found


def traffic_differences(calls: Sequence[Call], world_size: int, servers: int) -> list[str]:
    """Where the phases of a collective put something else on the links than its ranks send and receive."""
    found, links = [], CountedLinks(world_size, servers)
    for call in calls:
        if not call.is_pending:
            continue
        phases = collective_of(call).phases(call, links)
        put = sum((traffic for _, traffic in phases), np.zeros(2 * (world_size + servers)))
        sent, received = wire_bytes(call, world_size)
        served = (served_bytes(call, world_size) + [0] * servers)[:servers]
        said = np.array([*sent, *served, *received, *served], float)
        off = np.abs(put - said)
        worst = int(off.argmax())
        if off[worst] > OFF * said[worst] + world_size:
            way, end = ("sends", "receives")[worst >= world_size + servers], worst % (world_size + servers)
            name = f"rank {end}" if end < world_size else f"server {end - world_size}"
            found.append(
                f"'{call.op.name}' of {call.bytes} bytes: {name} {way} {put[worst]:.0f} bytes by its phases, "
                f"{said[worst]:.0f} by its rank_bytes"
            )
    return list(dict.fromkeys(found))


def work_differences(calls: Sequence[Call], world_size: int) -> list[str]:
    """Where an operation does something else on a rank than on those that the cost model takes it to be like."""
    found, setting = [], Setting(world_size, moved_tensors=1)
    for call in calls:
        first, of_rank = alike_in(call, np.zeros(world_size, np.int64))
        work = [call.op.work(call, r, setting) for r in range(world_size)]
        for rank, other in enumerate(first[of_rank].tolist()):
            if work[rank] != work[other]:
                found.append(
                    f"'{call.op.name}': its work on rank {rank} is another than on rank {other}, which holds as much: "
                    "let `differs_on` name such ranks"
                )
    return list(dict.fromkeys(found))


class Allocating(torch.fx.Interpreter):
    """Runs a step, and remembers when each call ran. Collectives are completed as they are issued, so that what threads
    of their library allocate is seen as theirs."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: dict[int, Call] = {}
        self.spans: dict[int, tuple[int, int]] = {}
        """Of a call, by its index: from when to when, in nanoseconds."""

    def run_node(self, n: torch.fx.Node) -> Any:
        began_ns = time.time_ns()
        result = super().run_node(n)
        if CALL in n.meta:
            call, _ = n.meta[CALL]
            if call.is_pending:
                tree_map_only(torch.Tensor, collectives.wait, result)
            self.calls[call.index] = call
            self.spans[call.index] = self.spans.get(call.index, (began_ns, 0))[0], time.time_ns()
        return result


def memory_differences(program: Program, batch: Any, setting: Setting) -> list[str]:
    """Where an operation allocates more than it declares, or has more of it left behind it, on this rank. What
    communication libraries take of other memory than torch's is not seen. By all ranks together."""
    for _ in range(WARM):
        program.step(batch)
    compiled = program.compile_for(batch)
    graph = compiled.graphs["step"]
    allocating = Allocating(graph)
    compiled.graphs["step"] = allocating.run
    begin = Exchange.begin
    Exchange.begin = _at_once  # type: ignore[method-assign]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            program.step(batch)
            program.synchronize()
    finally:
        Exchange.begin = begin  # type: ignore[method-assign]
        compiled.graphs["step"] = graph
    inner: Any = profiler.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in inner.kineto_results.events() if e.name() == "[memory]")
    found, spare = [], dict[int, int]()
    for index, (first, last) in allocating.spans.items():
        call = allocating.calls[index]
        held = list(accumulate((size for at, size in events if first <= at <= last), initial=0))
        seen, kept = max(held), held[-1]
        own, passing = (
            _of_rank(b, program.rank) for b in (call.op.allocates(call, setting), call.op.passing_bytes(call, setting))
        )
        spare[index] = max(0, own - max(0, kept))
        # What is formed only as it is used was declared by whoever forms it.
        formed = sum(spare.get(i.index, 0) for i in call.inputs)
        declared = own + passing + formed
        if call.made.expected or any(i.made.expected for i in call.inputs):
            continue  # the batch decides how much it is
        if seen > (1 + MORE) * declared + MORE_BYTES:
            found.append(
                f"'{call.op.name}' takes {seen} bytes at a time, and declares {own} that it allocates and {passing} in "
                "passing"
            )
        elif kept > (1 + MORE) * (own + formed) + MORE_BYTES:
            found.append(f"'{call.op.name}' leaves {kept} bytes behind it, and declares {own} that it allocates")
    return list(dict.fromkeys(found))


def _of_rank(declared: Bytes | None, rank: int) -> int:
    if declared is None:
        return 0
    return declared if isinstance(declared, int) else int(declared[rank])


def _at_once(self: Exchange) -> Exchange:
    """Begins an exchange in the thread that issues it, whose memory is seen."""
    self._line_up()
    self._run()
    return self
