"""Groups that synchronize every k steps, d steps late, or from a step on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.nn.functional as F

import autopar
from autopar.errors import PlanError
from autopar.ops.context import Context
from autopar.ops.moments import Moment
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies.lowering import fidelity_of, lower_plan
from autopar.strategies.timing import KINDS, cycle, fullest, moments_of
from tests.gloo import timing
from tests.gloo.ranks import run_ranks, run_worlds
from tests.gloo.training import adamw, batch, net
from tests.unit.synthetic import MLP, training_graph

GRAPH = training_graph(MLP)
NAMES = tuple(ParameterSlice(name=name) for name, _ in MLP)


def _group(strategy: str = "all_reduce", **fields: object) -> SyncGroup:
    return SyncGroup.model_validate({"strategy": strategy, "members": NAMES, **fields})


def test_programs_do_what_the_algorithm_says() -> None:
    for n, of_ranks in run_worlds(timing.everything, {2: (), 3: ()}).items():
        for rank, found in enumerate(of_ranks):
            assert max(found.values()) < 1e-12, (n, rank, found)


def test_the_first_step_shows_wrong_gradients_of_groups_that_are_not_exact() -> None:
    for said in run_ranks(2, timing.wrong):
        assert len(said) == 2 and all("the gradient of" in text for text in said), said


def test_what_is_saved_between_averages_goes_on(tmp_path: Path) -> None:
    for found in run_ranks(2, timing.on_disk, str(tmp_path)):
        assert all(found), found
    for of_rank in run_ranks(3, timing.from_disk, str(tmp_path)):
        assert max(of_rank) < 1e-12, of_rank


def test_a_delay_begins_anew_behind_a_checkpoint_without_held_gradients(tmp_path: Path) -> None:
    for found in run_ranks(2, timing.other_delay, str(tmp_path)):
        assert max(found) < 1e-12, found


def test_one_process_is_late_as_well() -> None:
    assert timing.held_alone() < 1e-12


def test_what_comes_next() -> None:
    groups = [_group(every=3, from_step=2), _group(delay=2), _group()]
    doing = [[m.doing for m in moments_of(groups, step)] for step in range(6)]
    assert [d[0] for d in doing] == ["plain", "plain", "average", "alone", "alone", "average"]
    assert [d[1] for d in doing] == ["hold", "hold", "delayed", "delayed", "delayed", "delayed"]
    assert {d[2] for d in doing} == {"synchronize"}
    assert moments_of(groups, 1)[1] == Moment("hold", 1)


def test_a_cycle_has_each_kind_of_step_once() -> None:
    """Periods of 2 and 3: in six steps, one has both, two the first alone, one the second alone, two neither."""
    shares = {tuple(m.doing for m in moments): share for moments, share in cycle([_group(every=2), _group(every=3)])}
    assert shares == pytest.approx(
        {
            ("average", "average"): 1 / 6,
            ("average", "alone"): 2 / 6,
            ("alone", "average"): 1 / 6,
            ("alone", "alone"): 2 / 6,
        }
    )
    assert cycle([_group(delay=1), _group()]) == [((Moment("delayed", 1), Moment()), 1.0)]


def test_groups_spread_over_a_period() -> None:
    """Of four steps, two groups synchronize in the second and two in the last, and never all."""
    groups = [_group(every=4, offset=offset) for offset in (0, 2, 0, 2)]
    doing = [[m.doing for m in moments_of(groups, step)] for step in range(4)]
    assert [d[0] for d in doing] == ["alone", "alone", "alone", "average"]
    assert [d[1] for d in doing] == ["alone", "average", "alone", "alone"]
    shares = {tuple(m.doing for m in moments): share for moments, share in cycle(groups)}
    assert shares == {tuple(doing[3]): 0.25, tuple(doing[1]): 0.25, tuple(doing[0]): 0.5}
    assert {m.doing for m in fullest(groups)} == {"average"}
    meet = cycle([_group(every=4, offset=1), _group(every=6, offset=5)])  # in step 5
    assert any(all(m.doing == "average" for m in moments) for moments, _ in meet)


def test_a_period_has_no_step_beyond_it() -> None:
    with pytest.raises(ValueError, match="a period has no such step"):
        _group(every=2, offset=2)


def test_the_first_step_of_replicas_that_train_apart_begins() -> None:
    group = _group("diloco", every=3, from_step=2)
    moments = [moments_of([group], step)[0] for step in range(6)]
    assert [m.doing for m in moments] == ["plain", "plain", "average", "alone", "alone", "average"]
    assert [m.begins for m in moments] == [False, False, True, False, False, False]
    assert moments_of([group], 4, [4])[0].begins
    assert fullest([group]) == (Moment("average"),)
    assert moments_of([_group("diloco")], 3) == (Moment("average"),)  # in each step
    with pytest.raises(PlanError, match="no gradients that could be late"):
        lower_plan([_group("diloco", delay=1)], GRAPH, Context(4))


@pytest.mark.parametrize(
    "periods", [range(1, 302), range(1000, 1301), [1, *range(2, 60), *[10**9 + i for i in range(60)]]]
)
def test_very_many_periods_are_priced_by_few_kinds_of_steps(periods: Sequence[int]) -> None:
    """Each group comes nearly as often as it does, all together exactly; those of each step come in each; and a step
    with all of them is there, for its memory."""
    found = cycle([_group(every=p) for p in periods])
    assert len(found) <= KINDS + 1 and sum(share for _, share in found) == pytest.approx(1)
    often = [sum(share for moments, share in found if moments[i].doing != "alone") for i in range(len(periods))]
    assert sum(often) == pytest.approx(sum(1 / p for p in periods), rel=1e-9)
    assert max(abs(f - 1 / p) for f, p in zip(often, periods, strict=True)) < 0.003
    assert any(all(m.doing != "alone" for m in moments) for moments, _ in found)
    each = [[m.doing for m, p in zip(moments, periods, strict=True) if p == 1] for moments, _ in found]
    assert all(set(doing) <= {"synchronize"} for doing in each)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (_group("parameter_server", every=2), "sharded or owned"),
        (_group("partitioned_parameter_server", every=2), "sharded or owned"),
        (_group("sharded_parameters", from_step=2), "sharded or owned"),
        (_group("sharded_parameters", delay=1), "something else than packed gradients"),
        (_group(every=2, options={"wire": "bfloat16"}), "parameters are averaged as they are"),
    ],
)
def test_what_cannot_be_timed_says_why(group: SyncGroup, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        lower_plan([group], GRAPH, Context(4))


def test_ranks_would_clip_apart() -> None:
    graph = training_graph([*MLP, ("other", (3, 3))])
    other = SyncGroup(strategy="all_reduce", members=(ParameterSlice(name="other"),))
    with pytest.raises(PlanError, match="each rank would clip by a norm of its own"):
        lower_plan([_group(every=2), other], graph, Context(4, clips=True))


def test_slices_of_one_parameter_go_together() -> None:
    whole, (name, shape) = NAMES[1:], MLP[0]
    halves = [ParameterSlice(name=name, dim=0, start=a, stop=b) for a, b in ((0, 1), (1, shape[0]))]
    groups = [
        SyncGroup(strategy="all_reduce", members=(halves[0], *whole), delay=1),
        SyncGroup(strategy="all_reduce", members=(halves[1],)),
    ]
    with pytest.raises(PlanError, match="Give all slices of a parameter the same timing"):
        lower_plan(groups, GRAPH, Context(4))


def test_both_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="no gradients to delay"):
        _group(every=2, delay=1)


@pytest.mark.parametrize(
    "fields", [{"every": True}, {"every": "4"}, {"delay": 1.5}, {"from_step": True}, {"offset": "1"}]
)
def test_numbers_of_steps_are_whole_numbers(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="valid integer"):
        _group("all_reduce", **fields)


def test_what_a_group_promises() -> None:
    promises = [fidelity_of([g], Context(4)) for g in (_group(), _group(delay=1), _group(every=2), _group(from_step=9))]
    assert promises == ["exact", "stale", "local", "exact"]
    assert fidelity_of([_group("diloco")], Context(4)) == "local"


def test_a_plan_that_promises_more_than_it_keeps_is_refused() -> None:
    model, cluster = net(), ClusterSpec.local(1)
    plan = autopar.plan(model, cluster, example_inputs=batch(0, 0), loss_fn=F.cross_entropy, strategy="ddp")
    late = tuple(g.model_copy(update={"delay": 1}) for g in plan.groups)
    with pytest.raises(PlanError, match="says that it is 'exact', but its groups are 'stale'"):
        autopar.optimize(
            model,
            example_inputs=batch(0, 0),
            loss_fn=F.cross_entropy,
            optimizer=adamw(model),
            plan=plan.model_copy(update={"groups": late}),
        )


def test_a_plan_says_when() -> None:
    plain = _group()
    assert "every" not in plain.model_dump_json() and "delay" not in plain.model_dump_json()
    timed = _group(every=4)
    assert SyncGroup.model_validate_json(timed.model_dump_json()) == timed
