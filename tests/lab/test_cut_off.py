"""A host that loses its link: the rank there learns it, and so do the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autopar.lab import Lab, unavailable_reason
from autopar.lab.host import shell
from tests.lab.left import environment
from tests.tiers import thorough

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

TRAIN = """
import torch
from torch import nn
import autopar
torch.set_num_threads(1)
torch.manual_seed(0)
model, batch = nn.Linear(8, 4), (torch.randn(2, 8), torch.randn(2, 4))
program = autopar.optimize(model, example_inputs=batch, loss_fn=nn.functional.mse_loss, strategy="ddp",
                           optimizer=torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=10.0)
program.step(batch)
print("stepped", flush=True)
input()
program.step(batch)
"""


@thorough
def test_a_rank_that_is_cut_off_learns_it_and_so_do_the_others() -> None:
    with Lab([None] * 3) as lab:
        ranks = []
        for rank, host in enumerate(lab.ranks):
            told = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
            env = {**environment(), **{name: str(value) for name, value in told.items()}}
            env["MASTER_ADDR"] = lab.ranks[0].address
            argv = [sys.executable, "-c", TRAIN]
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            ranks.append(host.popen(argv, env, **streams))
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "stepped\n"
        shell(f"ip -n {lab.ranks[1].namespace} link set {lab.ranks[1].interface} down")
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=60)[1] for process in ranks]
    assert "does not answer: it is frozen, cut off or gone, or this rank itself is cut off" in said[1], said[1]
    for rank in (0, 2):
        assert "rank 1 is gone" in said[rank], said[rank]
