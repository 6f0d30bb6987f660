"""The strategy that CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from autopar.errors import PlanError
from autopar.ir.training_graph import ComputeNode, Parameter, TrainingGraph
from autopar.ops.collectives import wire_bytes
from autopar.ops.context import Context
from autopar.spec.plan import ModelFingerprint, ParameterSlice, ParameterSpec, SyncGroup
from autopar.strategies import STRATEGIES
from autopar.strategies.lowering import StepProgram, lower_plan

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


@pytest.fixture(autouse=True)
def _two_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert block is not None
    module = ModuleType("two_phase")
    exec(compile(block[1], str(GUIDE), "exec"), module.__dict__)
    monkeypatch.setitem(STRATEGIES, "two_phase", module.TwoPhase())


def _graph(shape: tuple[int, ...] = (5, 2)) -> TrainingGraph:
    spec = ParameterSpec(name="w", shape=shape, dtype="float32")
    nodes = tuple(ComputeNode(n, "mm.default", 1, 1, 1) for n in ("forward", "gradient"))
    parameter = Parameter(spec=spec, gradient="gradient", ready=1, first_use=0, last_use=0)
    return TrainingGraph(
        model=ModelFingerprint(name="m", parameters=(spec,)),
        parameters=(parameter,),
        compute=nodes,
        backward_start=1,
        batch_size=1,
        buffer_bytes=0,
        input_bytes=0,
    )


def _lower(strategy: str, world_size: int, graph: TrainingGraph | None = None, **options: int) -> StepProgram:
    group = SyncGroup(strategy=strategy, members=(ParameterSlice(name="w"),), options=dict(options))
    return lower_plan([group], graph or _graph(), Context(world_size))


def _sent(program: StepProgram, world_size: int) -> list[int]:
    each = [wire_bytes(c, world_size)[0] for c in program.calls if c.group is not None and c.is_pending]
    return [sum(rank) for rank in zip(*each, strict=True)]


def test_it_emits_what_it_says() -> None:
    program = _lower("two_phase", 4)
    kinds = [c.op.name for c in program.calls if c.group is not None]
    assert kinds == ["pack", "reduce_scatter", "wait", "all_gather", "wait", "update"]
    assert program.calls[1].sizes == (3, 3, 2, 2)


def test_its_option_moves_the_remainder() -> None:
    assert _lower("two_phase", 4, first_rank=3).calls[1].sizes == (3, 2, 2, 3)


def test_it_sends_in_all_what_an_all_reduce_sends() -> None:
    assert sum(_sent(_lower("two_phase", 4), 4)) == sum(_sent(_lower("all_reduce", 4), 4)) == 4 * 60


def test_with_one_rank_nothing_is_sent() -> None:
    kinds = [c.op.name for c in _lower("two_phase", 1).calls]
    assert kinds == ["pack", "update"]


def test_it_says_where_it_does_not_apply() -> None:
    with pytest.raises(PlanError, match="3 elements cannot be divided among 4 ranks"):
        _lower("two_phase", 4, _graph((3,)))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(PlanError, match="did you mean 'first_rank'"):
        _lower("two_phase", 4, first_rnak=1)
