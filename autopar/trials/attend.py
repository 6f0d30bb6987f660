"""Beside each rank of a job: starts the process that runs trials, passes requests on to it, and starts it anew after a
failure. `python -m autopar.trials.attend FOLDER` is what `autopar search --launch` starts on every rank.

The process that trains is another one, so that a plan that crashes, hangs or takes all memory ends nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from autopar.errors import SpecError
from autopar.lab.host import Host
from autopar.lab.job import Job, JobFailed, JobTimeout
from autopar.runtime.job.ports import held_port
from autopar.runtime.job.store import InThread
from autopar.trials.board import POLL_S, Board, FolderBoard, Pulse

MEET_S = 300.0
"""How long to wait for rank 0 to say where the ranks meet."""
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpirun of MPICH and its kin
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)


@dataclass(frozen=True)
class Seat:
    """A rank's place in its job."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Seat:
        """As torchrun, mpirun or srun has it. Raises `SpecError` where none of them has started this process."""
        for names in _NAMES:
            said = [environment.get(name, "") for name in names]
            if all(text.isascii() and text.isdigit() for text in said[:2]):
                return cls(int(said[0]), int(said[1]), int(said[2]) if said[2].isdigit() else 0)
        raise SpecError(
            "nothing in the environment says which rank this is: start it with torchrun, srun or mpirun, or set RANK, "
            "WORLD_SIZE and LOCAL_RANK"
        )


def attend(board: Board, seat: Seat) -> None:
    """Answers what is asked on the board, until the search is over. Raises nothing that a trial does."""
    pulse, number, job = Pulse(board), 0, _Child(board, seat)
    try:
        while not pulse.is_over:
            text = board.get(f"ask/{number}")
            if text is None:
                time.sleep(POLL_S)
                continue
            board.put(f"answer/{number}/{seat.rank}", json.dumps(job.answer(json.loads(text), pulse)))
            number += 1
    finally:
        job.end()


class _Child:
    """The process that runs trials, of one start of the ranks after the other."""

    def __init__(self, board: Board, seat: Seat) -> None:
        self._board, self._seat = board, seat
        self._job: Job | None = None
        self._start = 0
        """Which start of the ranks it belongs to; 0 for none."""
        self._ports = ExitStack()
        """Rank 0's, held until its process, which serves the store there, has ended."""

    def answer(self, asked: dict[str, Any], pulse: Pulse) -> dict[str, Any]:
        """What the process says to `request`, or how it has `failed`, in words."""
        try:
            if asked["start"] != self._start:
                self.end()
                self._start = asked["start"]
                self._job = self._started(asked["timeout_s"])
            if self._job is None:
                return {"failed": f"rank {self._seat.rank} has ended before"}
            job, request, limit_s = self._job, asked["request"], asked["limit_s"]
            waited = InThread(lambda: job.ask(request, limit_s), "autopar-trial")
            while not waited.is_done(10 * POLL_S):
                if self._board.get(f"stop/{self._start}") is not None or pulse.is_over:
                    job.kill()
                    break
            return {"answer": waited.result()[0]} if waited.is_done(limit_s) else {"failed": "it was stopped"}
        except (JobFailed, JobTimeout, SpecError, OSError) as e:
            self.end()
            wrote_s = e.wrote_s if isinstance(e, JobFailed) and isfinite(e.wrote_s) else time.time()
            return {"failed": str(e), "late": isinstance(e, JobTimeout), "wrote_s": wrote_s}

    def end(self) -> None:
        if self._job is not None:
            self._job.__exit__(None, None, None)
            self._job = None
        self._ports.close()

    def _started(self, timeout_s: float) -> Job:
        host, port = self._meet()
        seat, own = self._seat, Host(socket.gethostname(), None, "127.0.0.1", "")
        environment = {
            "RANK": str(seat.rank),
            "WORLD_SIZE": str(seat.world_size),
            "LOCAL_RANK": str(seat.local_rank),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # that one is the job's, not these processes'
            "OMP_NUM_THREADS": str(torch.get_num_threads()),  # as training has that is started like this process
        }
        return Job([own], [sys.executable, "-m", "autopar.lab.rank", str(timeout_s)], environment).__enter__()

    def _meet(self) -> tuple[str, str]:
        """Where rank 0's process serves the store of this start, which rank 0 says."""
        key = f"meet/{self._start}"
        if self._seat.rank == 0:
            held = self._ports.enter_context(held_port())
            self._board.put(key, f"{self._address()} {held}")
        end = time.monotonic() + MEET_S
        while (said := self._board.get(key)) is None:
            if time.monotonic() > end:
                raise SpecError(f"rank 0 did not say where the ranks meet, within {MEET_S:g} s")
            time.sleep(POLL_S)
        host, _, port = said.partition(" ")
        return host, port

    def _address(self) -> str:
        """Of this host, as the others reach it: as torchrun has it; its name where that leads to the host itself alone
        here, as some have it in their list of hosts; loopback where the name leads nowhere."""
        given, name = os.environ.get("MASTER_ADDR"), socket.gethostname()
        if given:
            return given
        try:
            address = socket.gethostbyname(name)
        except OSError:
            return "127.0.0.1"
        return name if address.startswith("127.") else address


def main() -> None:
    attend(FolderBoard(sys.argv[1]), Seat.of(os.environ))


if __name__ == "__main__":
    main()
