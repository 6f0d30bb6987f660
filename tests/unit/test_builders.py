"""Plan builders: AutoDist's assignments, what people write by hand, and the traps of both."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopar.errors import PlanError
from autopar.search.builders import AUTODIST, BUILDERS, builder_named, fuse
from autopar.search.builders.common import smallest_divisor, smallest_non_divisor
from autopar.spec.plan import SyncGroup, partition_problems
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import Layer, cpu_hosts, training_graph

ODD: tuple[Layer, ...] = (
    ("table", (50257, 8)),
    ("prime", (1009, 4)),
    ("scalar", ()),
    ("one", (1, 64)),
    ("two", (2, 3)),
    ("conv", (64, 32, 3, 3)),
    ("bias", (64,)),
)


def groups_of(
    name: str, layers: Sequence[Layer], n: int = 4, elementwise: bool = True, dtypes: Sequence[str] = (), rows: str = ""
) -> tuple[SyncGroup, ...]:
    graph = training_graph(layers, dtypes=dtypes, rows=[rows])
    context = Context(n, elementwise_update=elementwise)
    return builder_named(name)(graph.parameters, context, cpu_hosts(n))


@pytest.mark.parametrize("suffix", ["", "+bf16"])
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_parameter_is_in_exactly_one_place_and_the_plan_lowers(name: str, n: int, suffix: str) -> None:
    graph = training_graph(ODD, dtypes=["float32", "float32", "bfloat16"], rows=["table"])
    context = Context(n)
    groups = builder_named(name + suffix)(graph.parameters, context, cpu_hosts(n))
    assert partition_problems(groups, graph.model.parameters) == []
    program = lower_plan(groups, graph, context)
    # Groups come in the order of their gradients, or a bucket would wait behind one that is ready later.
    ready = [g.ready for g in program.groups]
    assert ready == sorted(ready)


@pytest.mark.parametrize("name", BUILDERS)
def test_dtypes_never_share_a_group(name: str) -> None:
    groups = groups_of(name, ODD, dtypes=["float32", "bfloat16"])
    dtype = {layer[0]: ("float32", "bfloat16")[i % 2] for i, layer in enumerate(ODD)}
    assert all(len({dtype[m.name] for m in g.members}) == 1 for g in groups)


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"zero1"}))
def test_parameters_stay_whole_where_the_optimizer_needs_them_whole(name: str) -> None:
    assert all(m.whole for g in groups_of(name, ODD, elementwise=False) for m in g.members)


@pytest.mark.parametrize("name", BUILDERS)
def test_one_rank_has_one_group_a_dtype(name: str) -> None:
    groups = groups_of(name, ODD, n=1, dtypes=["float32", "bfloat16"])
    assert [g.strategy for g in groups] == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize("name", ["PartitionedPS", "UnevenPartitionedPS", "PartitionedAR", "RandomAxisPartitionAR"])
def test_there_are_never_more_slices_than_ranks_and_small_things_stay_whole(name: str) -> None:
    pieces: dict[str, int] = {}
    for g in groups_of(name, ODD, n=3):
        for m in g.members:
            pieces[m.name] = pieces.get(m.name, 0) + 1
    assert max(pieces.values()) == 3
    assert pieces["scalar"] == 1
    if name != "RandomAxisPartitionAR":
        assert pieces["one"] == 1
        assert pieces["prime"] == (3 if "Uneven" not in name else 2)


def test_divisors() -> None:
    assert [smallest_divisor(n) for n in (1, 2, 4, 9, 13, 35)] == [1, 2, 2, 3, 13, 5]
    assert [smallest_non_divisor(n) for n in (1, 2, 3, 4, 6, 12)] == [1, 2, 2, 3, 4, 5]


# AutoDist's assignments on a fixed list, worked out by hand from its rules. Gradients are complete in reverse order,
# so groups are listed from the last parameter to the first.
LIST: tuple[Layer, ...] = (("a", (8, 4)), ("b", (6, 2)), ("c", (4,)), ("d", (9, 4)), ("e", (16, 2)))
"""32, 12, 4, 36 and 32 elements."""


def owners(groups: Sequence[SyncGroup]) -> list[tuple[str, object]]:
    return [(str(m), g.options["owner"]) for g in groups for m in g.members]


def test_ps_gives_all_to_rank_0() -> None:
    assert owners(groups_of("PS", LIST)) == [(n, 0) for n in "edcba"]


def test_ps_load_balancing_gives_each_to_the_least_loaded() -> None:
    # Two ranks: a -> 0 (32), b -> 1 (12), c -> 1 (16), d -> 1 (52), e -> 0 (64).
    assert owners(groups_of("PSLoadBalancing", LIST, n=2)) == [("e", 0), ("d", 1), ("c", 1), ("b", 1), ("a", 0)]


def test_partitioned_ps_cuts_in_the_smallest_divisor() -> None:
    # Three ranks; a: 2 slices on 0, 1; b: 2 on 2, 0; c: 2 on 2, 1; d: 3 on 2, 1, 0 (loads 8, 18, 22); e: 2 on 2, 1.
    assert owners(groups_of("PartitionedPS", LIST, n=3)) == [
        ("e[0:8]", 2), ("e[8:16]", 1),
        ("d[0:3]", 2), ("d[3:6]", 1), ("d[6:9]", 0),
        ("c[0:2]", 2), ("c[2:4]", 1),
        ("b[0:3]", 2), ("b[3:6]", 0),
        ("a[0:4]", 0), ("a[4:8]", 1),
    ]  # fmt: skip


def test_uneven_partitioned_ps_cuts_in_the_smallest_number_that_does_not_divide() -> None:
    cuts = [str(m) for g in groups_of("UnevenPartitionedPS", LIST, n=4) for m in g.members]
    assert cuts == [
        "e[0:6]", "e[6:11]", "e[11:16]",
        "d[0:5]", "d[5:9]",
        "c[0:2]", "c[2:3]", "c[3:4]",
        "b[0:2]", "b[2:4]", "b[4:5]", "b[5:6]",
        "a[0:3]", "a[3:6]", "a[6:8]",
    ]  # fmt: skip


def many(count: int) -> tuple[Layer, ...]:
    return tuple((f"p{i}", (2, 2)) for i in range(count))


def test_all_reduce_chunks_by_the_models_order() -> None:
    groups = groups_of("AllReduce", many(300))
    assert [[m.name for m in g.members] for g in groups] == [
        [f"p{i}" for i in range(a, b)] for a, b in ((256, 300), (128, 256), (0, 128))
    ]


def test_partitioned_ar_counts_slices() -> None:
    groups = groups_of("PartitionedAR", many(100))
    assert [len(g.members) for g in groups] == [72, 128]
    assert [str(m) for m in groups[1].members[:2]] == ["p0[0:1]", "p0[1:2]"]


def test_random_axis_is_seeded_and_rows_are_cut_along_dimension_0() -> None:
    first, again = (groups_of("RandomAxisPartitionAR", [("t", (8, 8)), *many(60)], rows="t") for _ in range(2))
    assert first == again
    dims = {m.name: m.dim for g in first for m in g.members}
    assert dims["t"] == 0
    assert set(dims.values()) == {0, 1}


def test_parallax_serves_rows_and_reduces_the_rest() -> None:
    groups = groups_of("Parallax", [("emb", (100, 4)), ("w", (4, 4)), ("b", (4,))], rows="emb")
    assert [(g.strategy, [m.name for m in g.members]) for g in groups] == [
        ("all_reduce", ["w", "b"]), ("parameter_server", ["emb"])
    ]  # fmt: skip


def test_autodist_is_complete() -> None:
    assert len(AUTODIST) == 8


def test_ddp_fills_buckets_in_the_order_of_gradients() -> None:
    mib = (256, 1024)
    groups = groups_of("ddp", [(f"w{i}", mib) for i in range(60)])
    assert [len(g.members) for g in groups] == [1, 25, 25, 9]
    assert groups[0].members[0].name == "w59"


def test_fusing_merges_what_agrees_and_nothing_else() -> None:
    graph = training_graph(LIST)
    split = groups_of("PSLoadBalancing", LIST, n=2)
    assert [(g.options["owner"], [m.name for m in g.members]) for g in fuse(split, graph.parameters, 1 << 20)] == [
        (1, ["d", "c", "b"]), (0, ["e", "a"])
    ]  # fmt: skip
    # A bucket is closed when it is full: d has 144 bytes, e 128.
    small = fuse(split, graph.parameters, 130)
    assert [[m.name for m in g.members] for g in small] == [["d"], ["c", "b"], ["e", "a"]]


def test_bf16_narrows_what_is_wide() -> None:
    groups = groups_of("zero1+bf16", LIST, dtypes=["float32", "bfloat16"])
    by_first = {g.members[0].name: g.options.get("wire") for g in groups}
    assert by_first == {"e": "bfloat16", "d": None}


def test_a_strategy_is_named_with_options_where_they_are_not_its_own() -> None:
    groups = groups_of("power_sgd(rank=4, min_compression=3)+from_step=20", LIST)
    assert {(g.strategy, g.options["rank"], g.options["min_compression"], g.from_step) for g in groups} == {
        ("power_sgd", 4, 3, 20)
    }
    with pytest.raises(PlanError, match="did you mean 'power_sgd'"):
        builder_named("powersgd(rank=4)")
    with pytest.raises(PlanError, match="option 'rank' has no value"):
        builder_named("power_sgd(rank)")


def test_an_unknown_builder_names_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'Parallax'"):
        builder_named("Paralax")
    with pytest.raises(PlanError, match="did you mean 'zero1'"):
        builder_named("zero+bf16")
    with pytest.raises(PlanError, match="did you mean 'PS'"):
        builder_named("ps")


@pytest.mark.parametrize(("suffix", "near"), [("fp16", "bf16"), ("evry=4", "every=N"), ("every=x", "every=N")])
def test_an_unknown_suffix_names_the_nearest(suffix: str, near: str) -> None:
    with pytest.raises(PlanError) as e:
        builder_named(f"ddp+{suffix}")
    assert f"no suffix '+{suffix}'; did you mean '+{near}'? suffixes: +bf16, +late, +every=N, " in str(e.value)


def test_fragments_take_turns_in_a_period() -> None:
    graph, context = training_graph([(name, (512, 1024)) for name in "abcd"]), Context(2)
    groups = builder_named("all_reduce_1MiB+every=6+fragments=2")(graph.parameters, context, cpu_hosts(2))
    assert [g.offset for g in groups] == [0, 3, 0, 3]
    assert {g.every for g in groups} == {6}
    one = builder_named("diloco+every=8+offset=3")(graph.parameters, context, cpu_hosts(2))
    assert {(g.strategy, g.every, g.offset) for g in one} == {("diloco", 8, 3)}
    with pytest.raises(PlanError, match="a period of 1 step has no 2 of them"):
        builder_named("diloco+fragments=2")(graph.parameters, context, cpu_hosts(2))
