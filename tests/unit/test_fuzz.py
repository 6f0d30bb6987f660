"""The fuzzer: the same cases by seed, and a planted fault is found and made small."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.ir import passes
from autopar.ir.capture import JointGraph
from autopar.ir.passes import Capture, Pass
from autopar.runtime.job.process_group import Group
from benchmarks.faults import FAULTS, LEADS_TO
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.compare import _unmoved, judge
from benchmarks.fuzz.draft import Draft, Rejected, Unrepeatable
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.outcome import Outcome, merged
from benchmarks.fuzz.plans import as_text, groups_of
from benchmarks.fuzz.rank import _is_as_traced, run_case
from benchmarks.fuzz.report import Tally
from benchmarks.fuzz.script import script
from benchmarks.fuzz.shrink import pruned, shrink
from benchmarks.fuzz.source import build, render
from benchmarks.fuzz.training import Record, eager
from benchmarks.fuzz.twists import ALONE as ALL_ALONE
from benchmarks.fuzz.twists import TOGETHER, Twist, average, hook, loaded, python_state, resumed
from benchmarks.fuzz.workers import Told

ALONE = Group(0, 1)
CASE = Case(
    "test/m0",
    init=("self.p1 = parameter((4, 3), 1)", "self.p2 = parameter((4,), 2)", "self.p3 = parameter((2, 4), 3)"),
    inputs=(("x", "values((n, 3), seed)"),),
    targets=(("y", "values((n, 2), seed + 1)"),),
    forward=(
        "h1 = F.linear(x, self.p1, self.p2)",
        "h2 = torch.tanh(h1)",
        "h3 = torch.sigmoid(h2) * 2",
        "h4 = F.linear(h2 + h3, self.p3)",
    ),
    output="h4",
    loss="F.mse_loss(out, y)",
    optimizer="torch.optim.AdamW(grouped(parameters, 2, 0.02), eps=1e-3)",
)


def wrong_sigmoid(joint: JointGraph, capture: Capture) -> JointGraph:
    """A fault: the gradient of a sigmoid is that of tanh."""
    for node in joint.module.graph.nodes:
        if node.target is torch.ops.aten.sigmoid_backward.default:
            node.target = torch.ops.aten.tanh_backward.default
    return joint


def test_cases_are_a_function_of_their_names() -> None:
    for name in ("5/m0", "5/m7", "5/p3"):
        first = generate(name)
        assert generate(name) == first
        assert Case.loads(first.dumps()) == first
        compile(render(first), name, "exec")
    assert generate("5/m0") != replace(generate("6/m0"), name="5/m0")
    assert generate("5/p3").world_size > 1


def test_cases_differ_in_what_they_try() -> None:
    text = "\n".join(render(generate(f"9/m{i}")) for i in range(150))
    for wanted in ("F.linear", "F.conv", "F.embedding", "_(", ".transpose(", "register_buffer", "dtype=torch.", ".T"):
        assert wanted in text, wanted


def test_a_right_program_is_equal() -> None:
    assert run_case(CASE, ALONE).kind == "equal"
    assert run_case(replace(CASE, entry="module"), ALONE).kind == "equal"
    assert run_case(replace(CASE, plan_seed=3, recompute="full"), ALONE).kind == "equal"


def test_what_cannot_be_trained_eagerly_is_no_finding() -> None:
    assert run_case(replace(CASE, output="h9"), ALONE).kind == "unusable"
    assert run_case(replace(CASE, forward=("h4 = x.log() * self.p2.sum()",)), ALONE).kind == "unusable"


def test_a_planted_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "BEHIND", (*passes.BEHIND, Pass("planted", "is wrong", wrong_sigmoid)))
    found = run_case(CASE, ALONE)
    assert found.kind == "disproved" and "the gradient of" in found.said
    small = shrink(CASE, found, lambda case: run_case(case, ALONE), 300.0)
    assert run_case(small, ALONE).kind == "disproved"
    assert len(small.forward) <= 2 and "torch.sigmoid" in " ".join(small.forward) and small.steps == 1
    assert "SGD" in small.optimizer and len(small.init) < len(CASE.init)
    text = script(small, found)
    compile(text, "script", "exec")
    assert text.startswith("# test/m0: disproved")


def test_a_fault_of_pytorchs_own_tracing_is_counted_apart() -> None:
    said: list[str] = []
    tally = Tally(said.append)
    for forward in (("h4 = x.clone()", "h4.unsqueeze(-1).expand(*h4.shape, 2).zero_()"), ("h4 = x.clone()",)):
        case = replace(CASE, init=CASE.init[:1], forward=(*forward, "h4 = F.linear(h4 + 1, self.p1)[:, :2]"))
        tally.add(Told(case.name, run_case(case, ALONE), None))
    tally.say(0)
    assert "1 equal" in said[0] and "1 refused, 1 refused: PyTorch's tracing" in said[0], said
    assert not tally.findings


def test_numbers_of_pytorchs_own_tracing_are_known_where_nothing_is_proved() -> None:
    """As with the plans of several ranks that the fuzzer runs, whose users are refused by the first step's proof."""
    forward = (
        "h4 = x.clone()",
        "h4.unsqueeze(-1).expand(*h4.shape, 2).zero_()",
        "h4 = F.linear(h4 + 1, self.p1)[:, :2]",
    )
    built = build(replace(CASE, init=CASE.init[:1], forward=forward))
    traced, right = eager(built, traced=True), eager(built)
    assert _is_as_traced(built, traced) and not _is_as_traced(built, right)


def test_an_update_that_does_not_happen_in_16_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, dtype="bfloat16", optimizer="torch.optim.SGD(grouped(parameters, 1, 0.3), foreach=False)")
    assert run_case(case, ALONE).kind == "equal"
    from autopar.runtime.optimizers.optimizer import OptimizerPart

    step = OptimizerPart._apply

    def forgets(self: OptimizerPart, leaves: Any, gradients: Any) -> None:
        step(self, leaves, [g if g.dim() == 1 else torch.zeros_like(g) for g in gradients])

    monkeypatch.setattr(OptimizerPart, "_apply", forgets)
    assert run_case(case, ALONE).kind == "disproved"


NARROW = replace(CASE, dtype="bfloat16", optimizer="torch.optim.SGD(grouped(parameters, 1, 0.3), foreach=False)")
CHAOS = replace(
    NARROW,
    init=("self.p1 = nn.Parameter(torch.full((2, 3), 0.75, dtype=DTYPE))", *CASE.init[2:]),
    forward=("h = F.layer_norm(F.linear(x, self.p1), (2,))", "h4 = F.linear(h, self.p3[:, :2])"),
)
"""Normalizes two values that are equal, up to a rounding."""


def test_what_one_rounding_between_steps_moves_by_far_is_no_finding() -> None:
    built = build(CHAOS)
    expected, rounded = eager(built), eager(built, rounding=9)
    assert (rounded.gradients[0]["p1"] - expected.gradients[0]["p1"]).abs().max() > 0.5
    assert judge(built, rounded, expected, buffers=True) is None


def test_what_rounding_does_not_move_is_a_finding_all_the_same() -> None:
    built = build(NARROW)
    for found in (eager(built), eager(built, rounding=9)):
        found.parameters = [{**p, "p3": found.parameters[0]["p3"]} for p in found.parameters]
        seen = judge(built, found, eager(built), buffers=True)
        assert seen is not None and "p3" in seen.where
    found = eager(built)
    found.gradients[1]["p3"] *= 1.5
    assert judge(built, found, eager(built), buffers=True) is not None


def test_a_gradient_that_is_rounding_alone_moves_nothing_that_is_missed() -> None:
    def record(*values: float) -> Record:
        return Record(
            losses=[torch.tensor(1.0)] * 3,
            parameters=[{"p": torch.tensor([0.75 + v], dtype=torch.float64)} for v in values],
        )

    exact, expected = record(0.0, 4e-15, 2e-14), record(4e-7, 4e-6, 4e-7)  # there, and almost back
    assert _unmoved(record(0.0, 0.0, -4e-6), [expected], exact) is None
    assert _unmoved(record(0.0, 0.0, 0.0), [record(1e-4, 2e-4, 3e-4)], record(1e-4, 2e-4, 3e-4)) is not None


def test_pruning_leaves_out_what_nothing_reads() -> None:
    small = pruned(replace(CASE, output="h1"))
    assert small.forward == CASE.forward[:1] and small.init == CASE.init[:2]
    grouped = replace(
        CASE, output="h1", groups='[{"strategy": "all_reduce", "members": [{"name": "p1"}, {"name": "p3"}]}]'
    )
    (group,) = groups_of(pruned(grouped).groups)
    assert [m.name for m in group.members] == ["p1"]
    assert groups_of(as_text([group])) == (group,)


def test_ranks_are_judged_together() -> None:
    equal = Outcome("equal", digest="a")
    assert merged([equal, equal]).kind == "equal"
    assert merged([equal, Outcome("equal", digest="b")]).kind == "drifted"
    late = Outcome("crashed", "CollectiveError: rank 1 is late")
    assert merged([late, Outcome("crashed", "KeyError: 3")]).said == "KeyError: 3"
    assert merged([late, Outcome("refused", "CaptureError: no")]).kind == "refused"
    apart = [replace(equal, drawn=("1", "2")), replace(equal, drawn=("3", "4"))]
    assert merged(apart).kind == "equal"
    assert (
        merged([*apart, replace(equal, drawn=("5", "4"))]).said == "ranks have drawn the same random numbers in step 1"
    )
    as_ddp = Outcome("wrong", "loss", as_ddp=True)
    assert merged([as_ddp, equal]).kind == "wrong"
    assert merged([replace(as_ddp, warned="as DDP would"), as_ddp]).kind == "equal"


def test_what_a_slow_machine_may_lead_to_is_told_from_a_fault() -> None:
    assert Outcome("hung", "rank 1 did not answer within 60 s").may_be_slow
    assert Outcome("crashed", "CollectiveError: rank 1 was silent for 15 s").may_be_slow
    assert not Outcome("crashed", "KeyError: 3").may_be_slow
    assert not Outcome("wrong", "loss of step 1 is off by 2.0e-01").may_be_slow
    assert not Outcome("refused", "CaptureError: no").may_be_slow


@pytest.mark.parametrize("twist", dict.fromkeys([*ALL_ALONE, *TOGETHER]))
def test_a_twist_adds_lines_that_compile(twist: Twist) -> None:
    cases = [replace(CASE, samples=samples) for samples in (((4,),), ((2,), (3,)))]
    made = []
    for case, seed in itertools.product(cases, range(8)):
        with contextlib.suppress(Rejected):
            made.append(twist(case, random.Random(seed)))
            text = script(made[-1], Outcome("wrong", "a number"))
            compile(text, "script", "exec")
    assert made and all(case != CASE for case in made)


@pytest.mark.parametrize(
    ("twist", "expected"),
    # Hooks on gradients that are there from the start run, in an eager step; others are refused.
    [
        (python_state, ["equal"] * 2),
        (average, ["equal"] * 2),
        (resumed, ["equal"] * 2),
        (loaded, ["equal"] * 2),
        (hook, ["equal", "refused"]),
    ],
)
def test_a_hostile_script_is_followed_or_refused(twist: Twist, expected: list[str]) -> None:
    outcomes = [run_case(twist(CASE, random.Random(seed)), ALONE) for seed in range(2)]
    assert sorted(o.kind for o in outcomes) == expected, outcomes


def test_each_case_is_a_module_of_its_own_name() -> None:
    """TorchDynamo remembers modules by name: guards on globals would look at those of an earlier case."""
    names = [build(CASE).model().__module__ for _ in range(20)]
    assert len(set(names)) == len(names)
    assert names[0] not in sys.modules and names[-1] in sys.modules


def test_each_fault_is_known_by_what_it_leads_to() -> None:
    patches = {p.stem for p in FAULTS.glob("*.patch")}
    assert len(patches) == 16 and set(LEADS_TO) <= patches


def test_a_draft_rejects_what_mixes_samples() -> None:
    draft = Draft(random.Random(0), rowwise=True, dtype="float64")
    draft.input("x", "values((n, 3), seed)")
    draft.keep(["h1 = x * 0.5"])
    assert draft.shape("h1") == (None, 3)
    for mixing in ("h2 = x - x.mean(0)", "h2 = x.flip(0) * 3", "h2 = x.cumsum(0)"):
        with pytest.raises(Rejected):
            draft.keep([mixing])
    assert draft.lines == ["h1 = x * 0.5"]


def test_a_draft_rejects_a_write_behind_which_views_may_not_be_looked_at() -> None:
    draft = Draft(random.Random(0), rowwise=True, dtype="float64")
    draft.input("x", "values((n, 4), seed)")
    draft.keep(["h1 = x * parameter((4,), 1)", "h2 = h1.split(2, 1)[0]"])
    with pytest.raises(Rejected):
        draft.keep(["h1.mul_(2)"])
    assert draft.shape("h1 + 1") == (None, 4)


def test_a_draft_that_fails_when_it_runs_again_is_given_up() -> None:
    """Autograd allows some statements only because of what was looked at between them, as they were tried."""
    draft = Draft(random.Random(0), rowwise=False, dtype="float64")
    draft.input("x", "values((n, 3), seed)")
    draft.keep(["h1 = x * 2"])
    draft.lines.append("torch.ones(3, requires_grad=True).mul_(2)")
    with pytest.raises(Unrepeatable, match="a leaf"):
        draft.keep(["h2 = x + torch.ones(9)"])


@pytest.mark.parametrize("mixing", ["h2 = x + h1[0]", "h2 = x * 0 + (x * 0 + torch.arange(3)).diagonal()"])
def test_a_draft_is_looked_at_on_other_inputs_too(mixing: str) -> None:
    """The first row of `h1` is 0 on the inputs that statements are tried on, as others are; a diagonal is shorter where
    there are fewer samples than columns."""
    draft = Draft(random.Random(0), rowwise=True, dtype="float64")
    draft.input("x", "values((n, 3), seed)")
    draft.keep(["h1 = F.relu(x[:, 1])"])
    draft.confirm()
    draft.keep([mixing])
    with pytest.raises(Rejected):
        draft.confirm()


@pytest.mark.parametrize(("line", "kind"), [("h1 = x * (1 + RANK)", "equal"), ("x = x * (1 + RANK)", "wrong")])
def test_ranks_that_differ_in_what_nothing_reads_need_not_be_refused(line: str, kind: str) -> None:
    case = replace(CASE, samples=((4,), (4,)), must_refuse=True, forward=(line, *CASE.forward))
    assert run_case(case, ALONE).kind == kind
