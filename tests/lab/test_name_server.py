"""A name server that leaves questions unanswered, as loaded ones do: torch's store looks up who connects to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.lab import unavailable_reason
from tests.tiers import thorough

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

IN_ITS_OWN_NETWORK = """
mount --make-rprivate /
mount --bind "$1/resolv.conf" /etc/resolv.conf
ip link set lo up
exec "$2" "$1/job.py"
"""
JOB = """
import os, socket, sys, threading
import torch, autopar
from tests.gloo.ranks import run_ranks

def serve(questions):
    count = 0
    while True:
        asked, by = questions.recvfrom(512)
        count += 1
        if count % 3:  # else the resolver waits for 5 s, and asks again
            questions.sendto(asked[:2] + b"\\x81\\x83" + asked[4:6] + bytes(6) + asked[12:], by)  # no such name

def steps(rank, world_size):
    for _ in range(4):
        model, batch = torch.nn.Linear(4, 2), (torch.randn(2, 4), torch.randn(2, 2))
        program = autopar.optimize(model, example_inputs=batch, loss_fn=torch.nn.functional.mse_loss, strategy="ddp",
                                   optimizer=torch.optim.SGD(model.parameters(), lr=0.1), check="never")
        program.step(batch)
    return "stepped"

if __name__ == "__main__":
    questions = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    questions.bind(("127.0.0.1", 53))
    threading.Thread(target=serve, args=(questions,), daemon=True).start()
    print(run_ranks(2, steps))
"""


@thorough
def test_programs_are_made_though_the_store_waits_for_a_name_server(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (tmp_path / "job.py").write_text(JOB)
    env = {k: v for k, v in os.environ.items() if k != "RES_OPTIONS"}
    found = subprocess.run(
        ["unshare", "--mount", "--net", "bash", "-c", IN_ITS_OWN_NETWORK, "bash", str(tmp_path), sys.executable],
        env={**env, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.stdout == "['stepped', 'stepped']\n", found.stderr
