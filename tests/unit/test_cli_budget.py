"""`autopar search --budget`: what evidence vouches for is taken, and without any it is said what has to be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import autopar
from autopar.cli.app import app
from autopar.spec.quality import Considered, QualityChoice
from tests.unit.test_cli_search import FACTORY

STEPS = 2_000
CLUSTER = "{hosts: [{name: host, count: %d, devices: 1 x cpu}], network: {bandwidth: %s}}"


def run(folder: Path, *arguments: str, ranks: int = 2) -> Result:
    (folder / "model.py").write_text(FACTORY.replace("(4", "(1024"))
    (folder / "cluster.yaml").write_text(CLUSTER % (ranks, "1 Mbit/s"))
    line = ["search", f"{folder}/model.py:make", "--cluster", f"{folder}/cluster.yaml", "--evaluations", "20"]
    return CliRunner().invoke(app, [*line, "-o", str(folder / "plan.json"), *arguments])


def evidence(folder: Path, *considered: Considered, optimizer: str = "AdamW") -> str:
    """Of a run on the same ranks, which found two exact pilots to differ by 0.1 %."""
    assert run(folder).exit_code == 0
    path = folder / "evidence.json"
    choice = QualityChoice(
        budget=0.01, exact_step_s=0.1, considered=considered, chance=0.001, steps=300, optimizer=optimizer
    )
    autopar.Plan.load(folder / "plan.json").model_copy(update={"quality": choice}).save(path)
    return str(path)


def found(name: str, expected: float, bound: float | None, **others: Any) -> Considered:
    return Considered(
        name=name, step_time_s=0.1, expected=expected, bound=bound, verdict="", **{"exactly": (), **others}
    )


def under(folder: Path, *arguments: str) -> tuple[autopar.Plan, str]:
    said = run(folder, "--budget", "1%", "--steps", str(STEPS), *arguments)
    assert said.exit_code == 0, said.output
    return autopar.Plan.load(folder / "plan.json"), " ".join(said.output.split())


def test_without_evidence_the_plan_is_exact_and_it_is_said_what_is_to_be_run(tmp_path: Path) -> None:
    plan, said = under(tmp_path)
    assert plan.fidelity == "exact" and plan.name == "exact"
    assert plan.quality is not None and {c.verdict for c in plan.quality.considered} == {"no evidence"}
    assert "lose everything" not in said
    assert (
        "on 2 ranks, run optimize(..., budget=autopar.QualityBudget(0.01, metric=..., batches=..., steps=2000))" in said
    )


def test_the_fastest_is_taken_that_a_bound_or_a_pilot_vouches_for(tmp_path: Path) -> None:
    seen = evidence(
        tmp_path,
        found("random_k", 0.02, None),
        found("power_sgd", 0.002, 0.2, lost=0.02, metric=0.5, late=0.001),
        found("top_k", 0.002, 0.2),
        found("scaled_sign(exchange=gather)", 0.002, 0.2, lost=0.004, metric=0.5, late=0.0, method="scaled_sign"),
        found("quantized(bits=4,exchange=gather)", 0.001, 0.009),
        found("ddp+every=4", 0.0, 0.0, exactly=("0.weight",)),
        found("rounded", 0.0, 0.0, method="wire=bfloat16+forward"),  # which this one's forward pass is not
    )
    plan, said = under(tmp_path, "--evidence", seen)
    assert plan.name == "scaled_sign(exchange=gather)", said
    assert plan.fidelity == "compressed"
    assert {g.from_step for g in plan.groups if g.strategy == "scaled_sign"} == {STEPS // 10}
    assert plan.quality is not None and not plan.was_edited
    assert {c.name: c.verdict for c in plan.quality.considered if c.verdict != "no evidence"} == {
        "random_k": "expected to lose more than the budget",
        "power_sgd": "lost too much",
        "top_k": "not shown to keep to the budget",
        "scaled_sign(exchange=gather)": "chosen",
        "quantized(bits=4,exchange=gather)": "slower",
        "ddp+every=4": "tried with more parameters synchronized exactly only",
    }
    assert "200 exact steps" in said and "It rests on what a run has found" in said


@pytest.mark.parametrize(("ranks", "optimizer"), [(3, "AdamW"), (2, "SGD")])
def test_evidence_of_another_training_is_refused(tmp_path: Path, ranks: int, optimizer: str) -> None:
    seen = evidence(tmp_path, found("scaled_sign", 0.0, 0.0), optimizer=optimizer)
    said = run(tmp_path, "--budget", "0.01", "--steps", str(STEPS), "--evidence", seen, ranks=ranks)
    assert said.exit_code == 2, said.output
    assert f"is of 2 ranks and {optimizer}, and what is planned has {ranks} ranks and AdamW" in said.output


def test_a_plan_without_evidence_and_mistakes_are_told(tmp_path: Path) -> None:
    evidence(tmp_path)
    with_steps = ("--budget", "1%", "--steps", str(STEPS))
    plain = str((tmp_path / "plan.json").rename(tmp_path / "plain.json"))
    for arguments, told in (
        ((*with_steps, "--evidence", plain), "was chosen without a quality budget"),
        (("--budget", "1%"), "--budget needs --steps N"),
        (("--budget", "1%", "--steps", "20"), "500 at least"),
        (("--budget", "100%", "--steps", "900"), "is all of it"),
        (("--evidence", plain), "pass --budget 1%"),
        ((*with_steps, "--trials", "3"), "leave --trials out"),
        ((*with_steps, "--fidelity", "rounded"), "leave --fidelity rounded out"),
        ((*with_steps, "--optimizer", "none"), "--budget needs the optimizer"),
    ):
        said = run(tmp_path, *arguments)
        assert (said.exit_code, told in " ".join(said.output.split())) == (2, True), said.output
