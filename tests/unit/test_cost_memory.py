"""Peak memory of each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models import ADAMW, optimizer_cost
from autopar.cost_models.memory import MemoryModel
from autopar.ir.training_graph import Parts
from autopar.ops.values import Setting
from autopar.ops.waits import Wait
from autopar.spec.plan import OptionValue, ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import training_graph

WEIGHT = 1024 * 1024 * 4
LAYERS = tuple((f"w{i}", (1024, 1024)) for i in range(4))


def peaks(
    strategy: str,
    n: int = 4,
    optimizer: str = "AdamW",
    live_bytes: int = 0,
    rounds: bool = False,
    sums: bool = False,
    **options: OptionValue,
) -> tuple[int, ...]:
    """Of a model of four equal weights, each in a group of its own."""
    graph = training_graph(LAYERS, live_bytes=live_bytes)
    groups = [
        SyncGroup(strategy=strategy, members=(ParameterSlice(name=name),), options=options)
        for name, _ in reversed(LAYERS)
    ]
    program = lower_plan(groups, graph, Context(n, late_parameters=True))
    return MemoryModel(graph, rounds, sums).peaks(program, optimizer_cost(optimizer))


def test_without_groups_there_is_what_the_graph_holds() -> None:
    graph = training_graph(LAYERS, live_bytes=1000)
    for n in (1, 2):
        assert MemoryModel(graph).peaks(lower_plan((), graph, Context(n)), ADAMW) == (4 * WEIGHT + 1000,) * n


def test_replicas_hold_parameters_state_and_gradients() -> None:
    # 4 parameters, 8 moments, 4 packed gradients, all alive at the end of the backward pass.
    assert peaks("all_reduce") == (16 * WEIGHT,) * 4
    assert peaks("all_reduce", optimizer="SGD") == (8 * WEIGHT,) * 4


def test_one_rank_holds_a_gradient_only_until_its_update() -> None:
    """Each update follows its gradient at once, so that no two gradients live together."""
    (peak,) = peaks("all_reduce", n=1)
    assert 12 * WEIGHT <= peak <= 13 * WEIGHT


def test_shards_spread_the_state() -> None:
    replicated, sharded = peaks("all_reduce"), peaks("partitioned_parameter_server")
    # Of 8 weights of state a rank keeps a quarter; the parts of all ranks lie beside what is still being sent.
    assert replicated[0] - sharded[0] == pytest.approx((6 - 4) * WEIGHT, rel=0.01)


def test_sums_that_grow_on_their_way_take_one_part_less() -> None:
    """Of two ranks the sum alone; of numbers that would be rounded on their way, a part of each."""
    strategy = "partitioned_parameter_server"
    at_once, around = (peaks(strategy, n=2, rounds=r)[0] for r in (False, True))
    assert 2 * WEIGHT <= at_once - around <= 3 * WEIGHT
    at_once, around = (peaks(strategy, n=2, rounds=r, wire="bfloat16")[0] for r in (False, True))
    assert at_once == around


def test_a_backend_that_sums_leaves_a_rank_its_own_part() -> None:
    """Of four ranks' parts of each of four weights that are sent at once; not of numbers that would be rounded."""
    strategy = "partitioned_parameter_server"
    theirs, own = (peaks(strategy, sums=s)[0] for s in (False, True))
    assert theirs - own == pytest.approx((4 - 1) * WEIGHT, rel=0.01)
    theirs, own = (peaks(strategy, sums=s, wire="bfloat16")[0] for s in (False, True))
    assert theirs == own


def test_what_gloo_receives_into_is_there_until_a_gather_is_complete() -> None:
    """Equal parts that do not go in rounds are copied from there; those of several groups are on their way at once."""
    gathered = 1024 * 1024 // 512 * (512 // 8 + 4)  # a sign an element, a scale a block
    elsewhere, gloo = (peaks("scaled_sign", optimizer="SGD", rounds=r)[0] for r in (False, True))
    assert gloo - elsewhere == 3 * gathered


def test_a_sum_in_the_parameters_dtype_is_as_large_as_they() -> None:
    """However narrow the parts are that it is the sum of; these are widened, too."""
    group = SyncGroup(
        strategy="partitioned_parameter_server", members=(ParameterSlice(name="w0"),), options={"wire": "bfloat16"}
    )
    program = lower_plan([group], training_graph(LAYERS[:1]), Context(2))
    wait = next(c for c in program.calls if isinstance(c.op, Wait))
    assert list(wait.op.allocates(wait, Setting(2))) == [WEIGHT / 2] * 2  # type: ignore[arg-type]
    assert list(wait.op.passing_bytes(wait, Setting(2))) == [WEIGHT] * 2  # type: ignore[arg-type]


def test_the_owner_holds_the_state() -> None:
    owner, *others = peaks("parameter_server", owner=0)
    assert owner - max(others) == pytest.approx(8 * WEIGHT, rel=0.5)
    assert len(set(others)) == 1


def test_activations_count_at_their_fullest() -> None:
    """While the last node runs, all gradients are there but the one that it completes."""
    assert max(peaks("all_reduce", live_bytes=10**9)) == max(peaks("all_reduce")) - WEIGHT + 10**9


def test_adamw_is_assumed_to_keep_two_tensors() -> None:
    assert ADAMW.state_tensors == 2


def test_factors_are_held_twice_only_while_their_product_is_formed() -> None:
    """The second product, of more rows: what the first one took on its way is free, once."""
    n, rows = 4, (256, 1024)
    graph = training_graph(LAYERS[:2])
    parameters = tuple(
        replace(p, parts=Parts("factors", (), r, r, 1024, 1024, -1, ()))
        for p, r in zip(graph.parameters, reversed(rows), strict=True)
    )
    graph = replace(graph, parameters=parameters)
    groups = [SyncGroup(strategy="sufficient_factors", members=(ParameterSlice(name=name),)) for name in ("w1", "w0")]
    program = lower_plan(groups, graph, Context(n))
    gathered, counts = n * rows[1] * 2048 * 4, n * 8
    assert MemoryModel(graph).peaks(program, ADAMW) == ((2 + 4 + 1) * WEIGHT + 2 * gathered + counts,) * n


def test_parameters_on_their_way_are_held_through_the_forward_pass() -> None:
    """All four weights, received and not yet stored, beside what the forward pass holds."""
    at_once, late = (peaks("partitioned_parameter_server", live_bytes=10**9, late=x) for x in (False, True))
    assert max(late) >= max(at_once)
    assert max(late) - 10**9 >= (4 + 2 + 4) * WEIGHT
