"""`autopar lab` without root: what it says, and ranks on loopback. With root: tests/lab/test_command.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = """
hosts:
  - {name: worker, count: 2, devices: 2 x cpu}
  - {name: server, serves: true}
network: 1GbE
"""
HEAVY = {"torch", "numpy", "pydantic", "yaml", "networkx", "rich"}


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


def lab(*args: str) -> Result:
    return CliRunner().invoke(app, ["lab", *args])


def loopback(cluster: str, script: str, *options: str) -> Result:
    return lab("run", "--loopback", *options, cluster, "--", sys.executable, "-c", script)


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["up", "--help"], ["down", "--help"]])
def test_the_help_imports_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom autopar.cli import main\ntry:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "lab", *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_ranks_have_the_environment_of_torchrun_and_rank_0_is_shown(cluster: str) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"]
    script = f"import os, sys; print(*(os.environ[n] for n in {names})); print('aside', file=sys.stderr)"
    done = loopback(cluster, script)
    assert done.exit_code == 0
    assert done.stdout == "0 4 0 2 0 2 127.0.0.1\n"
    first, second = done.stderr.splitlines()
    assert first.startswith("2 hosts x 2 cpu + 1 serving host, 1 Gbit/s: loopback of one machine, not emulated")
    assert second == "aside"


def test_all_ranks_are_shown_line_by_line(cluster: str) -> None:
    script = "import os; print('one', os.environ['RANK']); print('two', end='')"
    done = loopback(cluster, script, "--all-ranks", "-q")
    assert done.exit_code == 0
    hosts = ["worker-0", "worker-0", "worker-1", "worker-1"]
    expected = [f"[{rank} {host}] {text}" for rank, host in enumerate(hosts) for text in (f"one {rank}", "two")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("sys.exit('too tired')", 1, "ended with exit status 1; the others were ended\n  too tired\n"),
        ("sys.exit(3)", 3, "ended with exit status 3; the others were ended\n"),
        ("os.kill(os.getpid(), 9)", 137, "was ended by signal 9; the others were ended\n"),
    ],
)
def test_the_first_rank_that_fails_gives_the_exit_code(cluster: str, how: str, code: int, said: str) -> None:
    script = f"import os, sys, time\nif os.environ['RANK'] == '2': {how}\ntime.sleep(600)"
    done = loopback(cluster, script, "-q")
    assert done.exit_code == code
    assert done.stderr == f"error: rank 2 on worker-1 {said}"


def test_the_rank_that_failed_first_is_named_and_not_those_that_lost_it(cluster: str, tmp_path: Path) -> None:
    """As with gloo: rank 3 says why it leaves, and its end makes the others fail, which may end before it."""
    script = f"""
import os, pathlib, sys, time
gone = pathlib.Path({str(tmp_path)!r}, "gone")
if os.environ["RANK"] == "3":
    print("the reason", file=sys.stderr, flush=True)
    time.sleep(0.05)
    gone.touch()
    time.sleep(0.1)
    sys.exit(5)
while not gone.exists():
    time.sleep(0.001)
sys.exit("connection lost")
"""
    done = loopback(cluster, script, "-q")
    assert done.exit_code == 5
    assert "rank 3 on worker-1 ended with exit status 5; the others were ended\n  the reason\n" in done.stderr


def test_what_takes_too_long_is_ended(cluster: str) -> None:
    done = loopback(cluster, "import time; time.sleep(600)", "--timeout", "1")
    assert done.exit_code == 124
    assert "ranks [0, 1, 2, 3] were not done after 1 s" in done.stderr


def test_a_rank_that_asks_for_input_gets_none(cluster: str) -> None:
    done = loopback(cluster, "import sys; print(repr(sys.stdin.read()))", "--timeout", "60")
    assert (done.exit_code, done.stdout) == (0, "''\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run"], "Missing argument 'CLUSTER'"),
        (["run", "CLUSTER"], "say what to run: autopar lab run cluster.yaml -- python train.py"),
        (["run", "CLUSTER", "--"], "say what to run"),
        (["run", "CLUSTER", "--", "train.py"], "there is no program 'train.py'; write `-- python train.py`"),
        (["run", "CLUSTER", "--", "pyhton", "train.py"], "there is no program 'pyhton'"),
        (["run", "--scale", "0", "CLUSTER", "--", "true"], "0.0 is not in the range x>0"),
        (["up", "nowhere.yaml"], "nowhere.yaml"),
        (["down", "a-lab-that-nobody-has"], "no lab 'a-lab-that-nobody-has' is up"),
        (["down", "name", "--all"], "give either a NAME or --all, not both"),
    ],
)
def test_mistakes_are_said_in_a_line(cluster: str, args: list[str], said: str) -> None:
    done = lab(*(cluster if word == "CLUSTER" else word for word in args))
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def _as_nobody() -> list[str]:
    """Another user, who may read what root has installed and no more."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv not found")
    may_read = ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *may_read, sys.executable]
    tried = subprocess.run([*words, "-c", "import autopar.cli.app, os; assert os.geteuid()"], cwd=ROOT)
    if tried.returncode != 0:
        pytest.skip("another user cannot run Python here")
    return words


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it says that it needs Linux")
@pytest.mark.parametrize(("what", "advice"), [("run", "; with --loopback the ranks run on this machine"), ("up", "")])
def test_who_is_not_root_is_told(cluster: str, what: str, advice: str) -> None:
    words = [*_as_nobody(), "-m", "autopar", "lab", what, cluster, *(["--", "true"] if what == "run" else [])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: network namespaces need root{advice}")
    assert len(done.stderr.splitlines()) == 1
