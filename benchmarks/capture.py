"""Which Hugging Face architectures are captured, planned, rewritten, and step as eager PyTorch does.

    python -m benchmarks.capture [--check] [--only NAME] [--jobs N]

Every architecture of the zoo is taken through the whole road, in worker processes, so that none can take the
others down with it. What fails is listed with its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from queue import SimpleQueue

import click
import torch

from benchmarks.examine import LOSS_TOLERANCE, UPDATE_TOLERANCE, Outcome, attempt
from benchmarks.harness import Report, Target, options, publish
from benchmarks.zoo import Entry, find
from benchmarks.zoo.huggingface import ENTRIES

REQUIRED = 30
"""Architectures that must succeed."""
TIMEOUT_S = 120.0
"""For one architecture."""
SHARE = 10
"""Architectures a worker is started for: enough to spread its start, few enough that all end together."""


def outcomes(entries: Sequence[Entry], jobs: int) -> Iterator[Outcome]:
    """Examines every entry, `jobs` at a time; yields outcomes as they come."""
    waiting, lock, found = list(entries), threading.Lock(), SimpleQueue[Outcome]()
    for _ in range(jobs):
        threading.Thread(target=_feed, args=(waiting, lock, found), daemon=True).start()
    for _ in entries:
        yield found.get()


def _feed(waiting: list[Entry], lock: threading.Lock, found: SimpleQueue[Outcome]) -> None:
    """Starts workers for shares of the list that all threads take from; one that dies is replaced."""
    while True:
        with lock:
            share, waiting[:SHARE] = waiting[:SHARE], []
        if not share:
            return
        while share:
            reason = ""
            for outcome in _worker(share):
                if isinstance(outcome, str):
                    reason = outcome
                else:
                    found.put(outcome)
                    share = share[1:]
            if share:
                found.put(Outcome(share[0].name, share[0].kind, failure=reason))
                share = share[1:]


def _worker(entries: Sequence[Entry]) -> Iterator[Outcome | str]:
    """The outcomes of a worker process; where it ends early, why, as the last."""
    argv = [sys.executable, "-m", "benchmarks.capture", "--worker", *(e.name for e in entries)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for _ in entries:
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            line = process.stdout.readline()
            late = timer.finished.is_set()
            timer.cancel()
            if not line:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
                yield f"not done after {TIMEOUT_S:.0f} s" if late else f"exit code {process.wait()}: {last}"
                return
            yield Outcome(**json.loads(line))


def _work(names: Sequence[str]) -> None:
    """Examines architectures in turn, and prints each outcome as a line of JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, sys.stdout = sys.stdout, sys.stderr  # nothing but outcomes goes to the one who reads them
    for name in names:
        print(json.dumps(asdict(attempt(find(ENTRIES, name)))), file=results, flush=True)
        torch._dynamo.reset()


def report(found: Sequence[Outcome], required: int) -> Report:
    """The table in the order of the zoo, but failures last."""
    result = Report(
        name="capture",
        title="Hugging Face architectures: captured, planned, rewritten, and compared with the eager step",
        columns=("architecture", "kind", "parameters", "nodes", "optimize s", "plan for 4 ranks", "verdict"),
    )
    order = {e.name: i for i, e in enumerate(ENTRIES)}
    for o in sorted(found, key=lambda o: (bool(o.failure), bool(o.eager), order[o.name])):
        equal = f"equal: loss {o.loss_error:.0e}, update {o.update_error:.0e}"
        unreached = f"; {len(o.unreached)} parameters get no gradient" if o.unreached else ""
        figures = (f"{o.parameters:,}", str(o.nodes), f"{o.optimize_s:.1f}") if o.nodes else ("", "", "")
        verdict = (f"runs eagerly, {equal}: {o.eager}" if o.eager else equal) + unreached
        result.rows.append((o.name, o.kind, *figures, o.planned, f"FAILED: {o.failure}" if o.failure else verdict))
    good = [o for o in found if not o.failure and not o.eager]
    eager = [o.name for o in found if not o.failure and o.eager]
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(o.kind for o in good).items())
    result.notes = [
        f"{len(good)} of {len(found)} architectures are captured and equal: {kinds}. {len(eager)} run eagerly, and are "
        f"equal: {', '.join(eager) or 'none'}.",
        "Tiny configurations with random weights, dropout 0, float32, batch 2, one step of SGD: loss within "
        f"{LOSS_TOLERANCE:g} of eager PyTorch's, update of every parameter within {UPDATE_TOLERANCE:g} of the eager "
        "update's norm. The largest errors are shown; rounding counts as none. 'optimize s' is capture, planning for "
        "one rank and rewriting, one thread a process, with the processes side by side.",
    ]
    result.targets = [
        Target("architectures that are captured and equal", len(good), required, "at least"),
        Target("architectures that are not equal, or fail", sum(bool(o.failure) for o in found), 0, "at most"),
    ]
    result.data = {"outcomes": [asdict(o) for o in found]}
    return result


@click.command(context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="NAME", help="Examine this architecture alone; may be repeated.")
@click.option("--jobs", default=os.cpu_count() or 1, help="Architectures examined at a time.")
@click.option("--worker", is_flag=True, hidden=True)
@click.argument("names", nargs=-1, required=False, metavar="")
@options
def main(
    only: tuple[str, ...], jobs: int, worker: bool, names: tuple[str, ...], check: bool, json_file: str, save: bool
) -> None:
    """Takes every Hugging Face architecture of the zoo from capture to an equal step."""
    if worker:
        return _work(names)
    try:
        entries = [find(ENTRIES, name) for name in only] or list(ENTRIES)
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    found = []
    for outcome in outcomes(entries, jobs):
        found.append(outcome)
        click.echo(f"[{len(found)}/{len(entries)}] {outcome.name}: {outcome.failure or 'equal'}", err=True)
    result = report(found, len(entries) if only else REQUIRED)
    sys.exit(publish(result, command="python -m benchmarks.capture", check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
