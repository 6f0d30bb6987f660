"""`autopar search --lab --trials`: the finalists are trained on the emulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar import Plan
from autopar.cli.app import app
from autopar.lab import unavailable_reason
from tests.gloo.test_trials import FACTORY

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

CLUSTER = "{hosts: [{name: host, count: 2, devices: 1 x cpu}], network: {bandwidth: 200 Mbit/s}}"


def test_finalists_are_trained_in_the_lab_and_the_next_plan_learns_from_them(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    output = tmp_path / "plan.json"
    line = ["search", f"{tmp_path}/model.py:make", "--cluster", str(tmp_path / "cluster.yaml"), "-o", str(output)]
    found = CliRunner().invoke(app, [*line, "--evaluations", "20", "--lab", "--trials", "2"])
    assert found.exit_code == 0, found.output
    plan = Plan.load(output)
    assert plan.measured is not None and plan.measured.trials == 2 and plan.measured.failed == 0
    assert "2 ranks of this machine, which emulates 2 hosts x 1 cpu" in plan.measured.where
    assert "the trials are kept in" in found.output
    line[0] = "plan"
    found = CliRunner().invoke(app, [*line, "--trials", str(tmp_path / "plan.trials.jsonl")])
    assert found.exit_code == 0, found.output
    taught = {a.name: a.prediction.relative_error for a in Plan.load(output).alternatives}
    assert taught[plan.measured.baseline] < 0.3, "it was 0.6, of a guess"
    line[line.index("--cluster") + 1] = "local:2"
    found = CliRunner().invoke(app, [*line, "--trials", str(tmp_path / "plan.trials.jsonl")])
    assert found.exit_code != 0 and "was run on another cluster" in found.output
