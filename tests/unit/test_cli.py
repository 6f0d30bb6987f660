"""The command line: output, exit codes, and that a mistake never shows a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli.app import COMMANDS, app
from autopar.cli.model_argument import load_model
from autopar.cli.verify import cause
from autopar.errors import PlanError, SpecError
from autopar.report.parameter import explain_parameter
from autopar.spec.cluster import ClusterSpec
from autopar.spec.explain import explain
from autopar.spec.plan import Plan
from tests.unit.plans import small_plan

HEAVY = ("torch", "numpy", "rich", "pydantic", "yaml", "jinja2", "plotly", "networkx")

MODEL_FILE = """\
import torch


def tiny():
    return torch.nn.Linear(2, 1), (torch.ones(4, 2),), lambda out, target: out.sum()


def bare():
    return torch.nn.Linear(2, 1)


def named():
    model = torch.nn.Linear(2, 1)
    return {"model": model, "example_inputs": torch.ones(4, 2), "optimizer": torch.optim.SGD(model.parameters(), lr=1)}


def misnamed():
    return {"model": torch.nn.Linear(2, 1), "example_input": torch.ones(4, 2)}


def not_a_model():
    return 3, torch.ones(4, 2)


def too_many():
    return 1, 2, 3, 4


def not_an_optimizer():
    return {"model": torch.nn.Linear(2, 1), "optimizer": "adamw"}


def needs(layers, width=3):
    return torch.nn.Linear(layers, width)


def fails():
    return torch.nn.Linear(2, 1)(torch.ones(3))


a_number = 3
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model.py"
    path.write_text(MODEL_FILE)
    return path


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=["autopar", *COMMANDS])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom autopar.cli import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        f"loaded = [m for m in {HEAVY} if m in sys.modules]\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: autopar")


def test_help_lists_every_command() -> None:
    listed = run("--help").stdout
    assert all(f"\n  {name} " in listed for name in COMMANDS)


def test_an_unknown_command_gets_the_nearest_name() -> None:
    done = run("explian", "plan.json")
    assert done.exit_code == 2
    assert "no command 'explian'; did you mean 'explain'?" in done.stderr


def test_explain_prints_the_page(plan_file: Path) -> None:
    done = run("explain", str(plan_file))
    assert (done.exit_code, done.stdout, done.stderr) == (0, explain(small_plan()), "")


def test_explain_names_a_strategy_that_is_not_known(plan_file: Path) -> None:
    """It may be one of the user's own, which only the training script imports: the plan is explained all the same."""
    plan_file.write_text(plan_file.read_text().replace('"all_reduce"', '"all_reduc"'))
    for option in ((), ("--json",)):
        done = run("explain", str(plan_file), *option)
        assert done.exit_code == 0 and "all_reduc" in done.stdout
        assert f"{plan_file}: group 0 and 1 more: strategy 'all_reduc' is not known here" in done.stderr
        assert "did you mean 'all_reduce'?" in done.stderr


def test_explain_a_parameter(plan_file: Path) -> None:
    done = run("explain", str(plan_file), "--parameter", "h.0.mlp.weight")
    assert (done.exit_code, done.stdout) == (0, explain_parameter(small_plan(), "h.0.mlp.weight"))


def test_explain_as_json(plan_file: Path) -> None:
    told = json.loads(run("explain", str(plan_file), "--json").stdout)
    assert told["digest"] == small_plan().digest
    assert told["prediction"]["step_time_s"] == 0.1
    assert [g["strategy"] for g in told["groups"]] == [g.strategy for g in small_plan().groups]
    assert len(told["parameters"]) == 9
    one = json.loads(run("explain", str(plan_file), "--parameter", "head.weight", "--json").stdout)
    assert [row["slice"] for row in one] == [[0, 0, 1024], [0, 1024, 4096]]


def test_explain_diff(plan_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    small_plan(3).save(other)
    done = run("explain", str(plan_file), "--diff", str(other))
    assert done.exit_code == 0
    assert "Groups: 4 -> 5" in done.stdout
    told = json.loads(run("explain", str(plan_file), "--diff", str(plan_file), "--json").stdout)
    assert told["same_program"] is True
    assert run("explain", str(plan_file), "--diff", "x", "--parameter", "y").exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read the plan"),
        ('{"schema_version": 1, "name"', "the file is truncated or is no plan"),
        ("[]", "a plan is a JSON object, this is a list"),
        ('{"schema_version": 99}', "schema version 99, this autopar reads version 1"),
        ('{"schema_version": 1, "groups": []}', "2 problems in"),
    ],
)
def test_a_bad_plan_file_is_an_error_without_a_traceback(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    done = run("explain", str(path))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert "Traceback" not in done.output and done.stdout == ""


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "explain", str(tmp_path / "none.json"), "--debug"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")


def test_doctor_reports_what_is_there() -> None:
    done = run("doctor", "--json")
    told = json.loads(done.stdout)
    found = {f["name"]: f for f in told["findings"]}
    assert found["python"]["value"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"]["state"] == "ok"
    assert told["usable"] is (done.exit_code == 0)
    assert {"torch", "gloo", "nccl", "memory", "root", "ip", "tc", "torchrun"} <= found.keys()
    assert "torch" in run("doctor").stdout


def test_doctor_names_what_torchrun_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = run("doctor")
    assert done.exit_code == 2
    assert "WORLD_SIZE" in done.stdout and "autopar cannot work here: torchrun" in done.stdout


def test_run_prints_the_torchrun_command(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    script = tmp_path / "train.py"
    script.write_text("")
    done = run("run", "--dry-run", str(plan_file), str(script), "--lr", "1e-3", "-q")
    assert done.stdout == (
        f"AUTOPAR_PLAN={plan_file} {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=4 "
        f"{script} --lr 1e-3 -q\n"
    )


def test_run_on_several_hosts(plan_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    ends = (str(plan_file), str(script))
    done = run("run", "--dry-run", "--nnodes", "2", "--node-rank", "1", "--master", "first:1234", *ends)
    assert (
        "-m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=first --master-port=1234 --nproc-per-node=2 "
        in done.stdout
    )
    for options, said in (
        (("--nnodes", "2"), "needs --node-rank"),
        (("--nnodes", "3"), "do not share evenly over 3 hosts"),
        (("--nnodes", "2", "--node-rank", "2", "--master", "h"), "goes from 0 to 1"),
        (("--node-rank", "1"), "give --nnodes too"),
        (("--nproc-per-node", "3"), "the plan was made for 4 ranks"),
        (("--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "0", "--master", "h"), "leaves no rank"),
    ):
        done = run("run", "--dry-run", *options, *ends)
        assert done.exit_code == 2 and said in done.stderr, done.stderr
    cluster = ClusterSpec.loads("hosts: [{name: a, devices: 3 x cpu}, {name: b, devices: 1 x cpu}]\nnetwork: 1GbE")
    small_plan().model_copy(update={"cluster": cluster.fingerprint}).save(plan_file)
    for host, ranks in (("0", 3), ("1", 1)):
        done = run("run", "--dry-run", "--nnodes", "2", "--node-rank", host, "--master", "h", *ends)
        assert f" --nproc-per-node={ranks} " in done.stdout, done.stderr


def test_run_needs_a_script(plan_file: Path) -> None:
    done = run("run", str(plan_file), "nowhere.py")
    assert done.exit_code == 2 and "there is no script 'nowhere.py'" in done.stderr


def test_run_starts_the_ranks_with_the_plan_and_passes_the_exit_code_on(tmp_path: Path) -> None:
    plan = small_plan()
    plan_file = tmp_path / "plan.json"
    plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"world_size": 2})}).save(plan_file)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['AUTOPAR_PLAN'])\n"
        "sys.exit(5 if len(sys.argv) > 2 else 0)\n"
    )
    command = [sys.executable, "-m", "autopar", "run", "plan.json", "train.py", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(plan_file)] * 2
    assert "torch.distributed.run --standalone --nproc-per-node=2 train.py" in done.stderr and done.stdout == ""
    failed = subprocess.run([*command, "fail"], cwd=tmp_path, capture_output=True, text=True, env=_environment())
    assert failed.returncode == 1  # torchrun's, whatever the ranks exit with


def test_report_writes_a_page(plan_file: Path) -> None:
    done = run("report", str(plan_file), "--measured", "ddp=0.2", "--measured", "searched=0.12")
    page = plan_file.parent / "report.html"
    assert (done.exit_code, done.stdout) == (0, f"wrote {page}\n")
    assert "Measured 120 ms against 200 ms of ddp: 1.67x as fast." in page.read_text()


@pytest.mark.parametrize("pair", ["ddp", "ddp=fast", "=3", "ddp=-1", "ddp=nan"])
def test_report_refuses_a_measurement_it_cannot_read(plan_file: Path, pair: str) -> None:
    done = run("report", str(plan_file), "--measured", pair)
    assert done.exit_code == 2 and "expected NAME=SECONDS" in done.stderr


def test_report_refuses_a_measurement_of_a_plan_that_it_does_not_know(plan_file: Path) -> None:
    done = run("report", str(plan_file), "--measured", "zero2=0.2")
    assert done.exit_code == 2 and not (plan_file.parent / "report.html").exists()
    assert "'zero2'" in done.stderr and "did you mean 'zero1'? plans that it knows: searched, ddp, zero1" in done.stderr


def test_report_writes_over_no_file_of_its_own(plan_file: Path) -> None:
    before = plan_file.read_bytes()
    for options in (("-o", str(plan_file)), ("--model", "x:y", "--trace", f"{plan_file.parent}/./{plan_file.name}")):
        done = run("report", str(plan_file), *options)
        assert done.exit_code == 2 and "is the file of PLAN as well" in done.stderr
    page = str(plan_file.parent / "report.html")
    done = run("report", str(plan_file), "--model", "x:y", "--trace", page)
    assert done.exit_code == 2 and "is the file of -o as well: write it to another one" in done.stderr
    assert plan_file.read_bytes() == before and not Path(page).exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(plan_file: Path, tmp_path: Path) -> None:
    done = run("report", str(plan_file), "-o", str(tmp_path / "no" / "report.html"))
    assert done.exit_code == 2 and "does not exist" in done.stderr
    done = run("report", str(plan_file), "-o", str(tmp_path))
    assert done.exit_code == 2 and "is a folder" in done.stderr
    done = run("calibrate", "--cluster", "local:2", "--complete", str(tmp_path / "no" / "cluster.yaml"))
    assert done.exit_code == 2 and "does not exist" in done.stderr


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("local:0", "expected local:N"),
        ("local", "expected local:N"),
        ("local:four", "expected local:N"),
        ("nowhere.yaml", "there is no file 'nowhere.yaml'"),
    ],
)
def test_a_cluster_that_cannot_be_had(cluster: str, said: str) -> None:
    done = run("plan", "x:y", "--cluster", cluster)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and said in done.stderr


def test_a_file_whose_name_begins_with_local_is_a_file(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its cluster is none of ranks of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.lab.namespaces.unavailable_reason", lambda: "not root")
    Path("local-lab.yaml").write_text(ClusterSpec.local(2).to_yaml())
    done = run("calibrate", "--cluster", "local-lab.yaml", "--time-budget", "0.1")
    assert done.exit_code and "not root; on the cluster itself" in done.stderr
    done = run("search", f"{model_file}:tiny", "--cluster", "local-lab.yaml", "--trials", "1", "--evaluations", "1")
    assert done.exit_code == 2 and "or --lab to emulate the cluster on this machine" in done.stderr


@pytest.mark.parametrize(
    ("factory", "has"),
    [("tiny", ("example_inputs", "loss_fn")), ("bare", ()), ("named", ("example_inputs", "optimizer"))],
)
def test_what_a_factory_may_return(model_file: Path, factory: str, has: tuple[str, ...]) -> None:
    made = load_model(f"{model_file}:{factory}")
    assert type(made.model).__name__ == "Linear"
    assert tuple(k for k in ("example_inputs", "loss_fn", "optimizer") if getattr(made, k) is not None) == has


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("tniy", "has no 'tniy'; did you mean 'tiny'?"),
        ("nothing_like_it", "it defines tiny, bare, named"),
        ("misnamed", "a key 'example_input'; did you mean 'example_inputs'?"),
        ("not_a_model", "the model is a int, expected a torch.nn.Module"),
        ("too_many", "the factory returned 4 values"),
        ("not_an_optimizer", "optimizer is a str"),
        ("needs", "the factory needs arguments (layers)"),
        ("fails", "tiny_model.py, line 38)"),
        ("a_number", "'a_number' is a int, expected a function"),
    ],
)
def test_what_is_wrong_with_a_factory(model_file: Path, factory: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_model(f"{model_file}:{factory}")
    assert said in str(caught.value)


def test_where_a_model_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_model.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    for argument, said in (
        ("model", "expected package.module:factory or path/to/file.py:factory"),
        ("model.py", "for a file: 'model.py:factory'"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("a_module_that_is_not_there:f", "there is no module 'a_module_that_is_not_there'"),
        ("broken_model:f", "No module named 'a_module_that_is_not_there'"),
        ("broken_model.py:f", "broken_model.py, line 1)"),
        ("bad_syntax.py:f", "bad_syntax.py, line 1)"),
    ):
        with pytest.raises(SpecError) as caught:
            load_model(argument)
        assert said in str(caught.value)


def test_an_error_in_a_rank_keeps_its_kind_and_its_message() -> None:
    told = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "x.py", line 3, in f\nautopar.errors.PlanError: no plan builder\nis called so\n'
    )
    found = cause(RuntimeError(told))
    assert type(found) is PlanError and str(found) == "no plan builder\nis called so"
    other = RuntimeError("Traceback (most recent call last):\nValueError: else")
    assert cause(other) is other


def test_a_saved_plan_is_what_explain_reads(plan_file: Path) -> None:
    assert Plan.load(plan_file) == small_plan()


def _environment() -> dict[str, str]:
    """This process's environment, without what a surrounding torchrun would have left, and able to find autopar."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
