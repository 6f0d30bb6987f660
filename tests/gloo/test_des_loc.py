"""DES-LOC on real ranks is DES-LOC as it is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.ops.context import Context
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import cycle, fullest, moments_of
from tests.gloo import des_loc
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes
from tests.unit.synthetic import MLP, training_graph

NAMES = tuple(ParameterSlice(name=name) for name, _ in MLP)


def _group(every: int, **options: int) -> SyncGroup:
    return SyncGroup(strategy="des_loc", members=NAMES, every=every, options=dict(options))


def test_programs_do_what_the_definition_says(tmp_path: Path) -> None:
    for n, of_ranks in run_worlds(des_loc.everything, dict.fromkeys(sizes(2, also=(1, 3)), (str(tmp_path),))).items():
        for found in of_ranks:
            assert max(found.values()) < 1e-10, (n, found)
            assert found.get("goes on", 0.0) == 0.0


def test_moments_have_periods_of_their_own() -> None:
    group = _group(2)
    slots = [moments_of([group], step)[0] for step in range(12)]
    assert [(m.doing, m.slot) for m in slots[1::2]] == [("average", s) for s in (0, 0, 1, 0, 0, 3)]
    assert {(m.doing, m.slot) for m in slots[::2]} == {("alone", 0)}
    shares = {(m.doing, m.slot): share for (m,), share in cycle([group])}
    assert shares == pytest.approx(
        {("alone", 0): 1 / 2, ("average", 0): 4 / 12, ("average", 1): 1 / 12, ("average", 3): 1 / 12}
    )
    assert fullest([group])[0].slot == 3


def test_it_needs_moments() -> None:
    with pytest.raises(PlanError, match="the optimizer must be one of torch's Adam"):
        lower_plan([_group(2)], training_graph(MLP), Context(4, keeps_moments=False))
    with pytest.raises(PlanError, match="has no option 'first'"):
        cycle([_group(2, first=1)])
        lower_plan([_group(2, first=1)], training_graph(MLP), Context(4))
