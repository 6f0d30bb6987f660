"""Starts the ranks of a conformance check, and puts together what they have found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.lab import Job, JobFailed, private_namespace, this_machine, unavailable_reason
from autopar.lab.host import Host
from autopar.strategies import Strategy
from autopar.testing.deadline import STUCK
from autopar.testing.findings import Conformance, Finding
from autopar.testing.load import load
from autopar.testing.rank import LOOKS_AT, MARK

WORLDS = (1, 2, 3, 4, 5)
DEADLINE_S = 120.0
_TIMEOUT_S = 1800.0


def check_strategy(
    strategy: str | type[Strategy],
    worlds: Sequence[int] = WORLDS,
    progress: Callable[[str], None] = lambda line: None,
    deadline_s: float = DEADLINE_S,
) -> Conformance:
    """Looks whether a strategy keeps its promises (`autopar.testing.findings.PROMISES`), on as many ranks as `worlds`
    says, all on this machine; takes a minute or a few. `progress` is told what is looked at. `deadline_s`: how long a
    rank may take for one look, a few steps of a small model; what takes longer is a broken promise, which names the
    operation that the rank was in, and nothing is looked at behind it.

    `strategy`: its name, its class, or where that is: `package.module:MyStrategy`. The class must be importable by
    other processes. Raises `PlanError` where there is no such strategy, `JobFailed` or `JobTimeout` where a rank dies
    or hangs under it; what it breaks besides is in the result.
    """
    where = strategy if isinstance(strategy, str) else f"{strategy.__module__}:{strategy.__qualname__}"
    name = load(where).name
    reason = unavailable_reason()
    if reason is not None:
        findings, notes = _found(this_machine(), where, worlds, False, progress, deadline_s)
        return Conformance(name, findings, (*notes, f"bytes on the wire were not counted: {reason}"))
    with private_namespace() as host:
        return Conformance(name, *_found(host, where, worlds, True, progress, deadline_s))


def _found(
    host: Host, where: str, worlds: Sequence[int], with_bytes: bool, progress: Callable[[str], None], deadline_s: float
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What ranks have found, and what is to be said of that."""
    told = {"strategy": where, "worlds": list(worlds), "bytes": with_bytes, "deadline_s": deadline_s}
    notes: tuple[str, ...] = ()
    argv = [sys.executable, "-m", "autopar.testing.rank", json.dumps(told)]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    with Job([host] * max(worlds), argv, env) as job:
        try:
            said = job.wait(_TIMEOUT_S, _Following(job, progress))
        except JobFailed as e:
            if e.exit_status != STUCK:
                raise
            said = [job.output(rank).read_text(errors="replace") for rank in range(max(worlds))]
            notes = (f"nothing was looked at behind what did not end within {deadline_s:g} s",)
    merged: dict[tuple[str, str], Finding] = {}
    for rank, text in enumerate(said):
        line = next((line for line in text.splitlines() if line.startswith(MARK)), f"{MARK}[]")
        for entry in json.loads(line.removeprefix(MARK)):
            finding = Finding(**entry)
            if not finding.kept:
                finding = Finding(finding.kind, finding.case, False, f"rank {rank} {finding.said}")
            first = merged.setdefault((finding.kind, finding.case), finding)
            if first.kept and not finding.kept:
                merged[finding.kind, finding.case] = finding
    return tuple(merged.values()), notes


class _Following:
    """Passes on what rank 0, which takes part in everything, says that it looks at."""

    def __init__(self, job: Job, progress: Callable[[str], None]) -> None:
        self._job = job
        self._progress = progress
        self._told = 0

    def __call__(self) -> None:
        lines = self._job.output(0, "stderr").read_text(errors="replace").splitlines()
        for line in lines[self._told :]:
            if line.startswith(LOOKS_AT):
                self._progress(line.removeprefix(LOOKS_AT))
        self._told = len(lines)
