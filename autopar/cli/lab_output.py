"""A job on the terminal: what its ranks print as they print it, the last words of a rank that fails, its exit code."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import click

from autopar.lab import Host, Job, JobFailed, JobTimeout, Lab

TIMED_OUT = 124
"""As of `timeout`."""
_LAST_WORDS = 20


def run_ranks(lab: Lab, argv: Sequence[str], env: Mapping[str, str], all_ranks: bool, timeout_s: float | None) -> int:
    """Runs `argv` once for each rank of a lab, beside servers on its serving hosts; shows what rank 0 prints, or all
    ranks. Returns the exit code."""
    hosts = lab.ranks
    # Else torch warns, on every rank, that the addresses of a lab have no names.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with Job(hosts, argv, {**quiet, "PYTHONUNBUFFERED": "1", **env}, lab.servers) as job:
        shown = range(len(hosts)) if all_ranks else [0]
        tails = [
            _Tail(path, to, f"[{rank} {hosts[rank].name}] " if all_ranks else "")
            for rank in shown
            for path, to in ((job.output(rank), sys.stdout), (job.output(rank, "stderr"), sys.stderr))
        ]
        try:
            job.wait(math.inf if timeout_s is None else timeout_s, lambda: _show(tails))
        except JobFailed as e:
            assert e.rank is not None and e.exit_status is not None
            _explain(e.rank, e.exit_status, hosts, "" if e.rank in shown else _last_words(job, e.rank))
            return 128 - e.exit_status if e.exit_status < 0 else e.exit_status
        except JobTimeout as e:
            click.echo(f"error: {e}", err=True)
            return TIMED_OUT
        finally:
            for tail in tails:
                tail.close()
    return 0


def _show(tails: Sequence[_Tail]) -> None:
    for tail in tails:
        tail.show()


def _explain(rank: int, status: int, hosts: Sequence[Host], last_words: str) -> None:
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    click.echo(f"error: rank {rank} on {hosts[rank].name} {how}; the others were ended", err=True)
    if last_words:
        click.echo(last_words, err=True)


def _last_words(job: Job, rank: int) -> str:
    lines = job.output(rank, "stderr").read_text(errors="replace").splitlines()[-_LAST_WORDS:]
    return "\n".join(f"  {line}" for line in lines)


class _Tail:
    """Shows a file as it grows; with a prefix, whole lines of it."""

    def __init__(self, path: Path, to: IO[str], prefix: str) -> None:
        self._file = path.open(errors="replace", newline="")
        self._to = to
        self._prefix = prefix
        self._line = ""

    def show(self) -> None:
        text = self._file.read()
        if self._prefix:
            *lines, self._line = (self._line + text).split("\n")
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
        if text:
            self._to.write(text)
            self._to.flush()

    def close(self) -> None:
        self.show()
        if self._line:
            self._to.write(f"{self._prefix}{self._line}\n")
            self._to.flush()
        self._file.close()
