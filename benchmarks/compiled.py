"""Compiled compute beside torch.compile: `python -m benchmarks.overhead --compile`.

Steps at one rank, and on two beside DDP; and what compiling takes, with empty caches.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.harness import Report, Target, Timings
from benchmarks.zoo import Entry

STEP_LIMIT = 1.00
"""Of autopar's compiled step, in torch.compile's, or in those of DDP with torch.compile."""
COMPILE_FACTOR = 1.5
"""How much longer compiling may take than torch.compile's time, multiplied by the share of distinct regions."""
LEAST_MODELS, LEAST_GROUPS = 5, 10
"""Models that are to reach the limit, and groups of a model that counts on two ranks."""
COLUMNS = ("model", "what", "autopar", "torch.compile", "ratio", "as it is")


def measure(what: str, entry: Entry, rounds: int, cache: str) -> dict[str, Any]:
    """Runs one measurement in a fresh process with inductor's cache in `cache`; raises `click.ClickException` with the
    last words of a process that fails."""
    argv = [sys.executable, "-m", "benchmarks.compiled_worker", what, entry.name, f"--rounds={rounds}"]
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        argv, env=os.environ | environment | {"TORCHINDUCTOR_CACHE_DIR": cache}, capture_output=True, text=True
    )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise click.ClickException(f"{entry.name}, {what}: exit code {process.returncode}: {last}")
    result = json.loads(process.stdout.strip().splitlines()[-1])
    assert isinstance(result, dict)
    return result


def report(entries: Sequence[Entry], rounds: int) -> Report:
    """Measures each model, and holds the figures to the targets."""
    found = Report("overhead-compiled", "One rank and two: compiled compute against torch.compile", COLUMNS)
    found.notes = [
        "Float32, train mode, without dropout, one thread a rank, torch's fused AdamW on both sides, as autopar takes "
        "it by itself. Ratios are medians (quartiles) of ratios within a round in which all run in turn. At one rank, "
        "seconds are the processor's, in which what other processes take from the machine is not; on two ranks the "
        "wall's, of the slower rank, with gradients in buckets of 1 MiB on both sides. 'As it is': autopar's step "
        "without compile=True.",
        "Where MKL has no AVX-512, as on AMD's processors, autopar's compiled step has oneDNN compute large float32 "
        "products; torch.compile's are MKL's.",
        "Compiling goes from the model to the end of the first step, in seconds of the processor, those of the C++ "
        "compiler among them, each side in a process of its own with an empty cache. The share of distinct layers is "
        "that of distinct regions among all.",
    ]
    for entry in entries:
        _examine(found, entry, rounds)
        for row in found.rows[-3:]:
            click.echo("  ".join(row), err=True)
    for what in ("one rank", "two ranks"):
        steps = [t for t in found.targets if what in t.name]
        if len(entries) >= LEAST_MODELS:  # not each of them need reach it
            found.targets = [t for t in found.targets if t not in steps]
            met = float(sum(t.met for t in steps))
            name = f"models whose step on {what} takes at most {STEP_LIMIT:g} of torch.compile's"
            found.targets.append(Target(name, met, LEAST_MODELS, "at least"))
    return found


def _examine(found: Report, entry: Entry, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="autopar-inductor-") as cache, tempfile.TemporaryDirectory() as other:
        click.echo(f"{entry.name}: compiling", err=True)
        own, peers = measure("autopar", entry, rounds, cache), measure("torch", entry, rounds, other)
        regions, distinct = own["regions"]
        share = distinct / regions
        ratio = own["processor_s"] / peers["processor_s"]
        shown = f"{ratio:.2f} ({distinct} of {regions} regions are distinct)"
        times = [f"{side['processor_s']:.1f} s" for side in (own, peers)]
        found.rows.append((entry.name, "compiling", *times, shown, ""))
        found.targets.append(Target(f"{entry.name}: compiling, in torch.compile's", ratio, COMPILE_FACTOR * share))
        shutil.copytree(cache, other, dirs_exist_ok=True)  # what follows compiles nothing again
        click.echo(f"{entry.name}: steps", err=True)
        steps = measure("steps", entry, rounds, other)
        _add(found, entry, "step at one rank", steps, "torch.compile")
        click.echo(f"{entry.name}: two ranks", err=True)
        on_two = measure("ranks", entry, rounds, other)
        groups = on_two["groups"]
        _add(found, entry, f"step on two ranks, {groups} groups", on_two, "DDP, torch.compile")
        if groups < LEAST_GROUPS:  # too small a model for that target: its figures are shown alone
            found.targets.pop()
        found.data[entry.name] = {"compiling": [own, peers], "steps": steps, "ranks": on_two}


def _add(found: Report, entry: Entry, what: str, measured: dict[str, Any], peer: str) -> None:
    timings = Timings({name: tuple(values) for name, values in measured["seconds"].items()})
    ratio = timings.ratio("autopar, compiled", peer)
    as_it_is = f"{timings.ratio('autopar', peer):.3f}" if "autopar" in timings.seconds else ""
    times = [f"{timings.time(name).median * 1e3:.1f} ms" for name in ("autopar, compiled", peer)]
    found.rows.append((entry.name, what, *times, f"{ratio:.3f}", as_it_is))
    found.targets.append(Target(f"{entry.name}: {what}, in {peer}'s", ratio.median, STEP_LIMIT))
