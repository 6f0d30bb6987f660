"""What is said about plans, in words."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.formatting import count, duration, mebibytes, name_pattern, size
from autopar.report.difference import diff, difference
from autopar.report.parameter import explain_parameter, parameter_rows
from autopar.spec.explain import WIDTH, explain
from autopar.spec.plan import Measured, Plan, SyncGroup
from autopar.spec.summary import element_bytes, group_rows, ordered_alternatives, verdict
from tests.unit.plans import prediction, small_plan, whole

EXPLAINED = """\
Plan 'searched'
  model     TinyModel: 328 k elements in 8 parameters, 1.25 MiB, 1 frozen, 1 tied
  cluster   4 hosts x 1 cpu, 1 Gbit/s (4 ranks)
  fidelity  exact: the single-process result on the global batch, up to the order of additions
  digest    {digest}

Predicted, per optimizer step (sent and memory: of the rank with most)
               step              of this  exposed  sent/rank  memory/rank
  this plan  100 ms  +- 5.00 ms    1.00x  10.0 ms   3.00 MiB     40.0 MiB
  ddp        150 ms  +- 7.50 ms    1.50x  60.0 ms   3.00 MiB     40.0 MiB
  zero1      110 ms  +- 5.50 ms    1.10x  20.0 ms   3.00 MiB     40.0 MiB

Predicted 1.50x as fast as ddp; the difference is larger than the stated error. The prediction rests
on tables of devices and networks; nothing was measured on this cluster.

Groups, in the order in which they are issued: 4 groups
  group  strategy                    params   MiB  which
  0      all_reduce                       3  0.11  h.1.{{attn.*, mlp.weight}}
  1      all_reduce                       3  0.11  h.0.{{attn.*, mlp.weight}}
        because: Its all-reduce is hidden behind the rest of the backward pass.
  2      parameter_server (owner=0)       1  0.25  wte.weight[0:1024]
  3      parameter_server (owner=2)       1  0.75  wte.weight[1024:4096]
        because: A large table.
Not synchronized (frozen): 1 parameter, 32.0 KiB: wpe.weight
"""


MEASURED = Measured(
    rests_on="trials",
    step_time_s=0.08,
    best_step_time_s=0.08,
    baseline="ddp",
    baseline_step_time_s=0.1,
    trials=6,
    failed=1,
    where="4 ranks of this machine",
)


def test_the_whole_page() -> None:
    plan = small_plan()
    assert explain(plan) == EXPLAINED.format(digest=plan.digest)


def test_many_groups_of_one_kind_share_a_row_and_the_page_stays_narrow() -> None:
    text = explain(small_plan(num_layers=40))
    assert "  0-39   all_reduce                        120  4.40  h.0-39.*\n" in text
    assert "  40-41  parameter_server (owner=0..2)       1  1.00  wte.weight\n" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_row_of_several_groups_gives_the_reason_of_the_largest() -> None:
    plan = small_plan()
    reasons = tuple(g.model_copy(update={"reason": f"reason {i}"}) for i, g in enumerate(plan.groups))
    rows = group_rows(plan.model_copy(update={"groups": reasons}), merge=True)
    assert [row.reason for row in rows] == ["(group 0, the largest) reason 0", "(group 3, the largest) reason 3"]


def test_long_names_and_reasons_stay_narrow() -> None:
    plan = small_plan()
    renamed = plan.model_copy(
        update={
            "name": "n" * 90,
            "cluster": plan.cluster.model_copy(update={"summary": "a host " * 40}),
            "groups": tuple(g.model_copy(update={"strategy": "s" * 70, "reason": "why " * 90}) for g in plan.groups),
            "alternatives": tuple(a.model_copy(update={"name": "x" * 200}) for a in plan.alternatives),
        }
    )
    assert max(map(len, explain(renamed).splitlines())) <= WIDTH


def test_a_plan_without_prediction_says_so() -> None:
    plan = small_plan().model_copy(update={"prediction": None})
    assert "This plan carries no prediction: it was not priced by a cost model." in explain(plan)


@pytest.mark.parametrize(
    ("mine", "ddp", "said"),
    [
        (0.100, 0.150, "Predicted 1.50x as fast as ddp; the difference is larger than the stated error."),
        (0.100, 0.105, "Predicted 1.05x as fast as ddp; the intervals overlap, so only a measurement can tell."),
        (0.100, 0.0802, "Predicted slower than ddp, which takes 0.80x the time; the difference is larger"),
        (0.100, 0.1001, "Predicted to take the same time as ddp."),
    ],
)
def test_the_verdict_says_no_more_than_the_error_bars_allow(mine: float, ddp: float, said: str) -> None:
    plan = small_plan()
    others = tuple(a.model_copy(update={"prediction": prediction(ddp)}) for a in plan.alternatives if a.name == "ddp")
    assert said in verdict(plan.model_copy(update={"prediction": prediction(mine), "alternatives": others}))


def test_the_baseline_itself_is_compared_by_its_time() -> None:
    ddp, zero1 = ordered_alternatives(small_plan())
    plan = small_plan().model_copy(update={"name": "ddp", "prediction": ddp.prediction})
    plan = plan.model_copy(update={"priced": plan.basis})
    assert verdict(plan) == "This is ddp itself: predicted slower than zero1, which takes 0.73x the time."
    decided = plan.model_copy(update={"measured": MEASURED})
    assert verdict(decided)[:-1] == verdict(plan)[:-1] + ", and taken because of trials"
    too_large = zero1.model_copy(update={"note": "does not fit: 1 MiB more than the device has"})
    others = plan.model_copy(update={"alternatives": (ddp, too_large)})
    assert verdict(others) == "This is ddp itself: none of the other plans that were priced is better."


def test_what_trials_decided_is_no_order_of_magnitude() -> None:
    guessed = small_plan().model_copy(update={"prediction": prediction(0.1, provenance="guessed")})
    guessed = guessed.model_copy(update={"priced": guessed.basis})
    for told, said in (
        ({"lessons": 4}, "in part on guesses, and on what 4 trials on this cluster taught."),
        ({"measured": MEASURED}, "in part on guesses; trials were run beside it."),
    ):
        text = " ".join(explain(guessed.model_copy(update=told)).split())
        assert said in text and "order of magnitude" not in text


@pytest.mark.parametrize(
    ("provenance", "said"),
    [("measured", "rests on measurements"), ("looked up", "nothing was measured"), ("guessed", "on guesses")],
)
def test_provenance_is_stated(provenance: str, said: str) -> None:
    plan = small_plan().model_copy(update={"prediction": prediction(0.1, provenance=provenance)})
    assert said in " ".join(explain(plan).split())


def test_the_baseline_comes_first_among_the_alternatives() -> None:
    assert [a.name for a in ordered_alternatives(small_plan())] == ["ddp", "zero1"]


def test_a_parameter_in_slices_is_found_by_its_tied_name() -> None:
    assert explain_parameter(small_plan(), "head.weight") == (
        "head.weight (tied: planned as wte.weight)\n"
        "  shape     4096 x 64 float32, 1.00 MiB, trainable\n"
        "  tied to   head.weight\n"
        "  slice     wte.weight[0:1024], 256 KiB\n"
        "  group     2 of 0..3 in issue order\n"
        "  strategy  parameter_server (owner=0)\n"
        "  with      no other parameter\n"
        "  because   A large table.\n"
        "  slice     wte.weight[1024:4096], 768 KiB\n"
        "  group     3 of 0..3 in issue order\n"
        "  strategy  parameter_server (owner=2)\n"
        "  with      no other parameter\n"
        "  because   A large table.\n"
    )


def test_a_parameter_names_its_neighbours() -> None:
    text = explain_parameter(small_plan(), "h.0.attn.bias")
    assert "  with      2 others (h.0.{attn.weight, mlp.weight}), 113 KiB in all\n" in text


def test_reasons_of_the_plan_that_was_edited_are_not_given_for_what_it_became() -> None:
    plan = small_plan()
    groups = tuple(g.model_copy(update={"strategy": "all_reduce", "options": {}}) for g in plan.groups)
    edited = plan.model_copy(update={"priced": plan.basis, "groups": groups})
    assert {row.reason for row in group_rows(edited)} == {""}
    assert {row.reason for row in parameter_rows(edited)} == {"", "frozen"}
    text = explain_parameter(edited, "h.0.attn.bias")
    assert "because" not in text and "  edited    since the plan was priced: " in text
    assert "edited" not in explain_parameter(plan, "h.0.attn.bias")


def test_a_frozen_parameter_is_in_no_group() -> None:
    assert "none: a frozen parameter has no gradient" in explain_parameter(small_plan(), "wpe.weight")


def test_an_unknown_parameter_gets_the_nearest_name() -> None:
    with pytest.raises(PlanError, match=r"no parameter 'h\.0\.atn\.bias'; did you mean 'h\.0\.attn\.bias'\?"):
        explain_parameter(small_plan(), "h.0.atn.bias")


def test_diff_of_a_plan_with_itself() -> None:
    plan = small_plan()
    assert diff(plan, plan).endswith("\nBoth execute the same program.\n")
    assert difference(plan, plan).changes == []


def test_diff_names_what_is_synchronized_otherwise_and_what_is_only_regrouped() -> None:
    plan = small_plan()
    last, first, *servers = plan.groups
    moved = last.members[0]
    groups = (
        last.model_copy(update={"members": last.members[1:]}),
        first.model_copy(update={"members": (*first.members, moved)}),
        SyncGroup(strategy="all_reduce", members=(whole("wte.weight"),), options={"wire": "bfloat16"}),
    )
    other = plan.model_copy(update={"groups": groups, "fidelity": "rounded"})
    text = diff(plan, other)
    assert "fidelity: exact -> rounded" in text
    assert "Groups: 4 -> 3" in text
    assert (
        "  1 parameter, 1.00 MiB: wte.weight\n"
        "      2 slices along dimension 0: [0:1024] parameter_server (owner=0); "
        "[1024:4096] parameter_server (owner=2)\n"
        "      -> all_reduce (wire=bfloat16)\n"
    ) in text
    assert "  6 parameters, 226 KiB: h.0-1.*\n      as before, in other groups\n" in text
    assert len(servers) == 2


def test_diff_of_plans_for_other_models_names_the_parameters() -> None:
    text = diff(small_plan(2), small_plan(3))
    assert "model: parameter 'h.2.attn.weight' is not in the first" in text


def test_rows_hold_every_parameter_once_and_all_bytes() -> None:
    plan = small_plan()
    rows = parameter_rows(plan)
    assert [row.parameter.name for row in rows[:3]] == ["wte.weight", "wte.weight", "wpe.weight"]
    assert rows[2].group is None
    assert sum(row.num_bytes for row in rows) == sum(p.numel for p in plan.model.parameters) * 4
    assert sum(row.num_bytes for row in group_rows(plan)) == sum(row.num_bytes for row in rows) - 128 * 64 * 4


def test_groups_of_another_wire_format_are_not_merged() -> None:
    plan = small_plan(num_layers=20)
    groups = list(plan.groups)
    groups[5] = groups[5].model_copy(update={"options": {"wire": "float16"}})
    rows = group_rows(Plan.model_validate(plan.model_dump() | {"groups": tuple(g.model_dump() for g in groups)}))
    assert [(r.first, r.last, r.options) for r in rows[:3]] == [(0, 4, ""), (5, 5, "wire=float16"), (6, 19, "")]


@pytest.mark.parametrize(
    ("names", "width", "pattern"),
    [
        (["a.weight"], 20, "a.weight"),
        (["h.0.w", "h.1.w", "h.2.w", "h.5.w"], 40, "h.0-2,5.*"),
        (["p.0", "p.1"], 40, "p.0-1"),
        (["h.0.w", "h.0.b"], 40, "h.0.{w, b}"),
        (["wte.weight", "h.0.w", "h.1.w"], 40, "wte.weight, h.*"),
        (["alpha", "beta", "gamma", "delta"], 20, "alpha, beta, +2 more"),
        (["encoder.a" * 3, "encoder.a" * 3], 20, "encoder....encoder.a"),
        (["a", "a.b"], 20, "a.*"),
    ],
)
def test_name_patterns(names: list[str], width: int, pattern: str) -> None:
    assert name_pattern(names, width) == pattern
    assert len(name_pattern(names, width)) <= width


def test_quantities() -> None:
    assert [duration(s) for s in (0, 3.2e-8, 85.2e-6, 0.0123, 0.338, 0.99999, 12.34, 4000)] == [
        "0 s", "32.0 ns", "85.2 us", "12.3 ms", "338 ms", "1.00 s", "12.3 s", "4000 s",
    ]  # fmt: skip
    assert [size(b) for b in (0, 1000, 1536, 2**20 - 1, 61.2 * 2**20, 2**40)] == [
        "0 B", "1000 B", "1.50 KiB", "1.00 MiB", "61.2 MiB", "1.00 TiB",
    ]  # fmt: skip
    assert [count(n) for n in (7, 9999, 16_384, 10_400_000, 1.2e9, 3e12)] == [
        "7", "9999", "16.4 k", "10.4 M", "1.20 G", "3.00 T",
    ]  # fmt: skip
    assert [mebibytes(b) for b in (0, 4, 3072, 2**20)] == ["0.00", "3.8e-06", "0.0029", "1.00"]
    assert [element_bytes(d) for d in ("float32", "bfloat16", "float8_e4m3fn", "bool", "complex64")] == [4, 2, 1, 1, 8]


def test_a_plan_says_whether_it_rests_on_trials() -> None:
    plan = small_plan().model_copy(update={"measured": MEASURED})
    plan = plan.model_copy(update={"priced": plan.basis})
    said = "Rests on trials: measured 80.0 ms against 100 ms of ddp: 1.25x as fast; 6 trials, 1 of which failed on"
    assert said in " ".join(explain(plan).split())
    assert Plan.loads(plan.model_dump_json()) == plan
    predicted = MEASURED.model_copy(update={"rests_on": "prediction", "step_time_s": None})
    assert "Rests on its prediction" in explain(plan.model_copy(update={"measured": predicted}))
    edited = plan.model_copy(update={"groups": plan.groups[::-1]})
    assert edited.was_edited and "Rests on" not in explain(edited)
    assert "measured" not in small_plan().model_dump_json(), "as it was before there were trials"
