"""`autopar plan`, and `autopar report` with the model at hand: from a model file to a plan, a page and a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli.app import app
from autopar.cost_models.corrected import shipped
from autopar.cost_models.trial_log import TrialRecord
from autopar.spec.cluster import ClusterSpec
from autopar.spec.explain import explain
from autopar.spec.plan import Plan
from tests.unit.plans import small_plan

MODEL_FILE = """\
import torch
from torch import nn


def mlp():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, (torch.ones(8, 64), torch.zeros(8, dtype=torch.long)), nn.functional.cross_entropy


def other():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, (torch.ones(8, 64), torch.zeros(8, dtype=torch.long)), nn.functional.cross_entropy


def without_inputs():
    return nn.Linear(2, 1)


def leaves():
    raise SystemExit(0)


def one_argument():
    return nn.Linear(2, 1), torch.ones(4, 2), lambda output: output.sum()


def frozen():
    return nn.Linear(2, 1).requires_grad_(False), torch.ones(4, 2)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.layer(x).sum()


def breaks():
    return Breaks(), torch.ones(4, 2)
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "planned_model.py"
    path.write_text(MODEL_FILE)
    return path


def test_each_pass_says_what_it_does_to_the_model(model_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    run("plan", f"{model_file}:mlp", "--cluster", "local:4", "-o", str(written), "--strategy", "ddp")
    done = run("explain", str(written), "--passes", "--model", f"{model_file}:mlp")
    assert done.exit_code == 0, done.output
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert rows[:2] == ["pass", "identities"] and "memory reused" in rows
    assert "the strategies of 1 group emit" in done.stdout
    told = json.loads(run("explain", str(written), "--passes", "--model", f"{model_file}:mlp", "--json").stdout)
    assert sum(row["removed"] for row in told["passes"]) > 0
    assert run("explain", str(written), "--passes").exit_code == 2


def test_a_searched_plan_is_written_and_told(model_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    done = run("plan", f"{model_file}:mlp", "--cluster", "local:4", "-o", str(written), "--time-budget", "2")
    assert done.exit_code == 0, done.output
    plan = Plan.load(written)
    assert done.stdout == explain(plan)
    assert f"wrote {written}" in done.stderr and "planning Sequential on 1 host x 4 cpu" in done.stderr
    assert plan.cluster.world_size == 4 and plan.prediction is not None
    assert "ddp" in {a.name for a in plan.alternatives}


def test_a_plan_by_name_as_json_says_nothing_else_on_stdout(model_file: Path) -> None:
    done = run("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "zero1", "--json", "-q")
    assert done.exit_code == 0, done.output
    assert {g.strategy for g in Plan.loads(done.stdout).groups} == {"partitioned_parameter_server"}
    assert done.stderr == ""


def test_a_plan_without_an_optimizer_keeps_full_replicas(model_file: Path) -> None:
    done = run(
        "plan", f"{model_file}:mlp", "--cluster", "local:2", "--optimizer", "none", "--json", "--time-budget", "1"
    )
    assert {g.strategy for g in Plan.loads(done.stdout).groups} == {"all_reduce"}


def test_a_plan_by_name_rounds_only_where_that_is_allowed_and_says_so(model_file: Path) -> None:
    command = ("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "ddp+bf16")
    refused = run(*command)
    assert refused.exit_code == 2
    assert "rounded" in refused.stderr
    done = run(*command, "--fidelity", "rounded")
    assert "  fidelity  rounded: " in done.stdout


def test_an_edited_plan_is_priced_again_and_labelled(model_file: Path, tmp_path: Path) -> None:
    """Until then, what is predicted is said to be of another plan, and the label not to be that of its groups."""
    written, model = tmp_path / "plan.json", f"{model_file}:mlp"
    run("plan", model, "--cluster", "local:4", "--strategy", "ddp", "-o", str(written))
    before = Plan.load(written)
    assert "another plan" not in run("explain", str(written)).stdout
    told = json.loads(run("explain", str(written), "--json").stdout)
    assert told["edited_since_priced"] is False and told["fidelity_of_groups"] == "exact"

    content = json.loads(written.read_text())
    content["groups"][0]["every"] = 50
    written.write_text(json.dumps(content))
    said = run("explain", str(written)).stdout
    assert "What is predicted is of another plan: this one was edited since" in said and "before it was edited" in said
    assert "but its groups are 'local'" in said
    told = json.loads(run("explain", str(written), "--json").stdout)
    assert told["edited_since_priced"] is True and told["fidelity_of_groups"] == "local"
    assert "another plan" in run("explain", str(written), "--diff", str(written)).stdout

    done = run("plan", model, "--plan", str(written), "-o", str(written))
    assert done.exit_code == 0, done.output
    after = Plan.load(written)
    assert after.name == "ddp (edited)" and after.fidelity == "local" and after.groups[0].every == 50
    assert after.prediction is not None and before.prediction is not None
    assert after.prediction.wire_bytes * 49 < before.prediction.wire_bytes
    assert [a.name for a in after.alternatives] == ["ddp"] and after.alternatives[0].prediction == before.prediction
    said = run("explain", str(written)).stdout
    assert "another plan" not in said and "its groups" not in said
    again = run("plan", model, "--plan", str(written), "--json")
    assert Plan.loads(again.stdout) == after


def test_plans_of_before_say_nothing_of_what_was_priced(model_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    run("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "ddp", "-o", str(written))
    content = json.loads(written.read_text())
    del content["priced"]
    content["groups"][0]["delay"] = 1
    written.write_text(json.dumps(content))
    assert "before it was edited" not in run("explain", str(written)).stdout
    assert json.loads(run("explain", str(written), "--json").stdout)["edited_since_priced"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--strategy", "zero1"), "leave --strategy out"),
        (("--fidelity", "exact"), "leave --fidelity out"),
        (("--cluster", "local:3"), "the plan was made for 2 ranks"),
        (("--optimizer", "none"), "needs a program that runs the optimizer"),
    ],
)
def test_what_cannot_be_priced_says_why(options: tuple[str, ...], said: str, model_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    run(
        "plan",
        f"{model_file}:mlp",
        "--cluster",
        "local:2",
        "--strategy",
        "ddp+delay=1",
        "-o",
        str(written),
        "--fidelity",
        "stale",
    )
    done = run("plan", f"{model_file}:mlp", "--plan", str(written), *options)
    assert done.exit_code == 2 and said in done.stderr, done.output
    other = run("plan", f"{model_file}:other", "--plan", str(written))
    assert other.exit_code == 2 and "the plan was made for another model" in other.stderr


@pytest.mark.parametrize(
    ("factory", "options", "code", "said"),
    [
        ("mlp", ("--strategy", "zero2"), 2, "did you mean 'zero1'?"),
        ("mlp", ("--time-budget", "0"), 2, "time-budget"),
        ("mlp", ("--fidelity", "exakt"), 2, "fidelity"),
        ("without_inputs", (), 2, "example_inputs"),
        ("frozen", (), 2, "no trainable parameter"),
        ("leaves", (), 2, "the factory raised SystemExit: 0"),
        ("one_argument", (), 2, "loss_fn takes (output), and it is called as loss_fn(output, target)"),
    ],
)
def test_what_cannot_be_planned(model_file: Path, factory: str, options: tuple[str, ...], code: int, said: str) -> None:
    done = run("plan", f"{model_file}:{factory}", "--cluster", "local:2", *options)
    assert done.exit_code == code, done.output
    assert said in done.stderr and "Traceback" not in done.output and done.stdout == ""


def test_a_model_that_fits_no_device_exits_with_3(model_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "hosts:\n  - {name: tiny, count: 2, devices: {kind: cpu, memory: 64 KiB}}\nnetwork: {bandwidth: 1 Gbit/s}\n"
    )
    done = run("plan", f"{model_file}:mlp", "--cluster", str(cluster))
    assert done.exit_code == 3, done.output
    assert done.stderr.splitlines()[-1].startswith("error: no plan fits")


def test_a_misspelt_cluster_names_file_line_and_key(model_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("hosts:\n  - {name: a, devices: 1 x cpu}\nnetwork: {bandwith: 1 Gbit/s}\n")
    done = run("plan", f"{model_file}:mlp", "--cluster", str(cluster))
    assert done.exit_code == 2
    assert f"{cluster}:3" in done.stderr and "did you mean 'bandwidth'?" in done.stderr


def test_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import sys, time\ndef f():\n    print('here', flush=True)\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "autopar", "plan", "slow.py:f", "--cluster", "local:2", "-q"]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(command, cwd=tmp_path, env=found, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "here\n"  # what a factory prints is no result
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "interrupted\n"


def test_a_report_with_the_model_has_a_timeline_and_a_trace(model_file: Path, tmp_path: Path) -> None:
    plan, page, trace = (str(tmp_path / name) for name in ("plan.json", "page.html", "trace.json"))
    assert run("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "PS", "-o", plan).exit_code == 0
    done = run("report", plan, "-o", page, "--model", f"{model_file}:mlp", "--trace", trace)
    assert (done.exit_code, done.stdout) == (0, f"wrote {page}\nwrote {trace}\n"), done.stderr
    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e["ph"] == "X"]
    predicted = Plan.load(plan).prediction
    assert predicted is not None
    assert {"forward", "backward", "reduce", "broadcast", "update"} <= {e["cat"] for e in events}
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(predicted.step_time_s * 1e6)
    assert 'id="chart-timeline"' in Path(page).read_text()


def test_what_changes_the_decision_is_explained_and_reported(model_file: Path, tmp_path: Path) -> None:
    plan, page = str(tmp_path / "plan.json"), tmp_path / "page.html"
    assert run("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "PS", "-o", plan).exit_code == 0
    groups = json.loads(run("explain", plan, "--json").stdout)["groups"]
    assert groups[0]["runner_up"]["step_time_s"] > 0 and groups[0]["runner_up"]["strategy"] != "parameter_server"
    done = run("explain", plan, "--what-if", "--model", f"{model_file}:mlp", "--json")
    assert done.exit_code == 0, done.output
    found = {row["name"]: row for row in json.loads(done.stdout)["what_if"]}
    predicted = Plan.load(plan).prediction
    assert predicted is not None
    assert found["as it is"]["step_time_s"] == pytest.approx(predicted.step_time_s)
    assert all(row["step_time_s"] is not None or row["left_out"] for row in found.values())
    assert found["batch x 2"]["assumption"] and found["hosts x 2"]["left_out"]
    done = run("report", plan, "-o", str(page), "--what-if", "--model", f"{model_file}:mlp")
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert (
        'id="what-if"' in text and "at half the bandwidth between the devices" in text and "<th>runner-up</th>" in text
    )


def test_what_trials_taught_is_taken_along(model_file: Path, tmp_path: Path) -> None:
    """A cluster whose steps take four times as long as predicted, as one trial has found."""
    model, plan, trials = f"{model_file}:mlp", str(tmp_path / "plan.json"), tmp_path / "plan.trials.jsonl"
    cluster, features = ClusterSpec.local(2).fingerprint, dict.fromkeys(shipped().features, 0.0)
    ran = TrialRecord(
        cluster.digest, cluster.summary, "any", "data sheets", "ddp", "any", "here", "ok",
        simulated_s=0.1, measured_s=0.4, features=features,
    )  # fmt: skip
    trials.write_text(json.dumps(ran.line()) + "\n")
    made = run("plan", model, "--cluster", "local:2", "--strategy", "PS", "--trials", str(trials), "-o", plan)
    assert made.exit_code == 0, made.output
    recorded = Plan.load(plan)
    assert recorded.lessons == 1 and recorded.prediction is not None
    for options, untaught in (((), True), (("--trials", str(trials)), False)):
        done = run("explain", plan, "--what-if", "--model", model, "--json", *options)
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert ("--trials FILE" in (told["remark"] or "")) is untaught
        now = told["what_if"][0]
        assert ("not decided" in now["verdict"]) is untaught and now["changes"] is not untaught
        assert (now["step_time_s"] == pytest.approx(recorded.prediction.step_time_s)) is not untaught
        page = tmp_path / "page.html"
        assert run("report", plan, "-o", str(page), "--model", model, *options).exit_code == 0
        assert ("without its trials (--trials FILE)" in page.read_text()) is untaught
    assert run("explain", plan, "--trials", str(trials)).exit_code == 2
    assert run("report", plan, "--trials", str(trials)).exit_code == 2


def test_a_plan_that_cannot_be_written_is_shown(model_file: Path) -> None:
    done = run("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "ddp", "-o", "/dev/full", "--json")
    assert done.exit_code == 2 and "/dev/full: cannot write the plan: No space left" in done.stderr
    assert Plan.loads(done.stdout).name == "ddp"


def test_what_is_read_is_not_written_over(model_file: Path, tmp_path: Path) -> None:
    before, cluster = model_file.read_text(), tmp_path / "cluster.yaml"
    cluster.write_text(ClusterSpec.local(2).to_yaml())
    for output, name in ((model_file, "MODEL"), (cluster, "--cluster")):
        done = run("plan", f"{model_file}:mlp", "--cluster", str(cluster), "-o", str(output))
        assert done.exit_code == 2 and f"is the file of {name} as well: write it to another one" in done.stderr
    assert model_file.read_text() == before


@pytest.mark.parametrize(
    "options", [("--what-if",), ("--what-if", "--passes", "--model", "m.py:f"), ("--calibration", "c.json")]
)
def test_what_if_needs_the_model_and_stands_alone(options: tuple[str, ...], tmp_path: Path) -> None:
    assert run("explain", str(tmp_path / "plan.json"), *options).exit_code == 2
    assert run("report", str(tmp_path / "plan.json"), "--what-if").exit_code == 2


def test_a_report_refuses_another_model(model_file: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    assert run("plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "ddp", "-o", plan).exit_code == 0
    done = run("report", plan, "--model", f"{model_file}:other")
    assert done.exit_code == 2 and "the plan was made for another model" in done.stderr
    assert run("report", plan, "--trace", "t.json").exit_code == 2


def test_a_model_that_cannot_be_captured_is_planned_to_run_eagerly(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run("plan", f"{model_file}:breaks", "--cluster", "local:2", "--time-budget", "1", "-o", str(path))
    assert done.exit_code == 0, done.output
    assert "planned_model.py:" in done.stderr and "runs eagerly" in done.stderr and "AutoparWarning" not in done.stderr
    assert Plan.load(path).prediction is not None


def test_a_reader_that_has_gone_ends_a_command_quietly(tmp_path: Path) -> None:
    """As in `autopar explain plan.json | head -1`."""
    small_plan().save(tmp_path / "plan.json")
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "autopar", "explain", str(tmp_path / "plan.json")]
    with os.fdopen(writing, "w") as gone:
        done = subprocess.run(line, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_command_in_a_report_can_be_copied(tmp_path: Path) -> None:
    plan = tmp_path / "a plan.json"
    small_plan().save(plan)
    assert run("report", str(plan)).exit_code == 0
    assert f"autopar run &#39;{plan}&#39; train.py" in (tmp_path / "report.html").read_text()
