"""How `autopar serve` ends: with the job, or as it is asked to, with a line that says so and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from torch._C._distributed_c10d import TCPStore

from autopar.cli.app import app
from autopar.runtime.job.ports import held_port
from autopar.runtime.job.servers import _connect
from tests.gloo.ranks import WITHOUT_LOGS

JOB = """
import sys
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serves", flush=True)
input()
"""


def _started(port: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "autopar", "serve", f"127.0.0.1:{port}", "--name", "host", "--timeout", "60"]
    root, env = Path(__file__).resolve().parents[2], {**os.environ, **WITHOUT_LOGS}
    return subprocess.Popen(words, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_to_end_says_so_and_no_more(number: signal.Signals) -> None:
    """While it waits for what ranks send."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("autopar/servers/1", json.dumps({"ranks": 1, "servers": ["host"], "timeout_s": 60.0}))
    with _started(store.port) as server:
        mesh = _connect(store, 1, 0, 1, ("host",), 60.0)
        assert server.stderr is not None
        said = [server.stderr.readline(), server.stderr.readline()]
        server.send_signal(number)
        out, rest = server.communicate(timeout=60)
    assert server.returncode == 0, rest
    assert said == [f"host 'host' serves the job at 127.0.0.1:{store.port}\n", "program 1: adding up for 1 ranks\n"]
    assert (out, rest) == ("", "ended, as it was asked to, after 1 program\n")
    del mesh


def test_a_server_ends_with_the_job_and_says_so_and_no_more() -> None:
    with (
        held_port() as port,
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as job,
        _started(port) as server,
    ):
        assert job.stdout is not None and job.stdout.readline() == "serves\n"
        assert server.stderr is not None
        said = server.stderr.readline()
        job.communicate("\n", timeout=60)
        out, rest = server.communicate(timeout=60)
    assert server.returncode == 0, rest
    assert re.fullmatch(r"host 'host' serves the job at 127.0.0.1:\d+\n", said)
    assert (out, rest) == ("", "ended, with the job, after 0 programs\n")


def test_an_ipv6_address_is_one_without_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def nobody(*where: object, **how: object) -> None:
        asked.extend(where)
        raise dist.DistNetworkError("nobody is there")

    monkeypatch.setattr("torch._C._distributed_c10d.TCPStore", nobody)
    done = CliRunner().invoke(app, ["serve", "[2001:db8::1]:29500", "--timeout", "1"])
    assert asked == ["2001:db8::1", 29500] and "no job at [2001:db8::1]:29500 within 1 s" in done.stderr
