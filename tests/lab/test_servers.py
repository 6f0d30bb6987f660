"""`autopar serve` on the serving hosts of a lab: what ranks add up with its help, and what they say without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from autopar.lab import Job, JobFailed, Lab, unavailable_reason
from autopar.spec.cluster import ClusterSpec
from tests.lab.left import ROOT, environment
from tests.tiers import thorough

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

CLUSTER = """
hosts:
  - {name: worker, count: 2, devices: 1 x cpu, bandwidth: 1 Gbit/s}
  - {name: server, count: 2, serves: true, bandwidth: 2 Gbit/s}
"""
TRAIN = """
import sys
import torch
from torch import nn
import autopar
from autopar.lab import serve
strategy, timeout, cluster = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 1000), nn.ReLU(), nn.Linear(1000, 4)).double()
batch = (torch.randn(2, 300).double(), torch.randn(2, 4).double())
made = autopar.plan(model, autopar.ClusterSpec.loads(cluster), example_inputs=batch, loss_fn=nn.functional.mse_loss,
                    strategy=strategy)
program = autopar.optimize(model, example_inputs=batch, loss_fn=nn.functional.mse_loss, plan=made,
                           optimizer=torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=float(timeout),
                           check="never")  # which would send its trial, too
def steps(request):
    for _ in range(request["steps"]):
        loss = program.step(batch)
    return {"loss": loss.item()}
serve(steps)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.of(ClusterSpec.loads(CLUSTER)) as lab:
        yield lab


def _job(lab: Lab, strategy: str, *, servers: bool = True, timeout_s: float = 60.0) -> Job:
    argv = [sys.executable, "-c", TRAIN, strategy, str(timeout_s), CLUSTER]
    return Job(lab.ranks, argv, servers=lab.servers if servers else ())


def test_ranks_train_with_servers_as_without(lab: Lab) -> None:
    losses, sent = {}, {}
    for strategy in ("servers", "ddp"):
        before = lab.servers[0].bytes_sent()
        with _job(lab, strategy) as job:
            losses[strategy] = job.ask({"steps": 3}, 120)[0]["loss"]
        sent[strategy] = lab.servers[0].bytes_sent() - before
    assert losses["servers"] == pytest.approx(losses["ddp"], rel=1e-12)
    # Two ranks and two servers of twice the rate: a server adds a third up, and sends it to both.
    assert sent["ddp"] < 100_000
    assert sent["servers"] == pytest.approx(3 * 2 / 3 * 8 * (301 * 1000 + 1001 * 4), rel=0.1)


def test_a_server_that_does_not_come_is_named_with_what_to_do(lab: Lab) -> None:
    with _job(lab, "servers", servers=False, timeout_s=7.0) as job:
        with pytest.raises(JobFailed) as failed:
            job.ask({"steps": 1}, 120)
        assert "waiting for a server on host 'server-0', 'server-1'" in job.output(0, "stderr").read_text()
    said = str(failed.value)
    assert "has gradients added up on host 'server-0', 'server-1', where no server has come within 7 s" in said
    assert f"run `autopar serve {lab.hosts[0].address}:" in said
    assert "--name server-0` there" in said


@pytest.mark.parametrize("known", [pytest.param(False, marks=thorough), True])
def test_a_server_that_dies_is_named(lab: Lab, known: bool) -> None:
    with _job(lab, "servers") as job:
        job.ask({"steps": 1}, 120)
        os.kill(job.serving[1].pid, signal.SIGKILL)
        if known:  # to the ranks' sockets, before they send
            job.serving[1].wait()
            time.sleep(1)
        with pytest.raises(JobFailed, match="the server on host 'server-1' is gone"):
            job.ask({"steps": 2}, 120)


def _serve(*args: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "autopar", "serve", *args]
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)


def test_a_server_without_a_job_says_so() -> None:
    done = _serve("127.0.0.1:1", "--timeout", "1")
    assert done.returncode != 0
    assert "no job at 127.0.0.1:1 within 1 s" in done.stderr
    assert "Traceback" not in done.stderr
    for where in ("somewhere", "127.0.0.1:99999", "127.0.0.1:0"):
        assert "expected ADDRESS:PORT" in _serve(where).stderr
