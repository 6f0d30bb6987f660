"""What the rewritten training step costs where there is nothing to synchronize: one rank, against eager PyTorch.

    python -m benchmarks.overhead [--check] [--quick] [--compile] [--only NAME]

With `--compile`: compiled compute against torch.compile, as `benchmarks.compiled` says.

Time: an eager step, an eager step with a fused AdamW, and the rewritten step, in turns, each in a process of its own.
Memory: the peak resident memory of a process that trains, one eager and one rewritten.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import click

from benchmarks.compiled import report as compiled_report
from benchmarks.harness import Report, Spread, Target, Timings, options, publish
from benchmarks.zoo import Entry, compiled, find, sizes

TIME_LIMIT = 1.00
"""Of the rewritten step, in eager steps: median over rounds."""
MEMORY_LIMIT = 1.05
OPTIMIZE_LIMIT_S = 15.0
OPTIMIZE_MODEL = "bert-base"
ROUNDS, QUICK_ROUNDS = 9, 3


def measure(what: str, entry: Entry, scaled: bool, rounds: int) -> dict[str, Any]:
    """Runs one measurement in a fresh process; raises `click.ClickException` with its last words where it fails."""
    argv = [sys.executable, "-m", "benchmarks.overhead_worker", what, entry.name, f"--rounds={rounds}"]
    process = subprocess.run(
        [*argv, *(["--scaled"] if scaled else [])],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise click.ClickException(f"{entry.name}, {what}: exit code {process.returncode}: {last}")
    result = json.loads(process.stdout.strip().splitlines()[-1])
    assert isinstance(result, dict)
    return result


def examine(report: Report, entry: Entry, scaled: bool, rounds: int) -> None:
    """Measures one model, and adds its rows, targets and figures to the report."""
    click.echo(f"{entry.name}: time", err=True)
    timed = measure("time", entry, scaled, rounds)
    timings = Timings({name: tuple(values) for name, values in timed["seconds"].items()})
    click.echo(f"{entry.name}: memory", err=True)
    memory = {what: measure(what, entry, scaled, rounds) for what in ("eager", "autopar")}
    peak = memory["autopar"]["process_bytes"] / memory["eager"]["process_bytes"]
    steps = memory["autopar"]["steps_bytes"] / memory["eager"]["steps_bytes"]
    optimize_s = memory["autopar"]["optimize_s"]
    ratios = {name: timings.ratio("autopar", name) for name in ("eager", "eager fused")}
    report.rows += [_row(entry, name, timings, memory, peak, steps, optimize_s) for name in timings.seconds]
    report.targets += [
        Target(
            f"{entry.name}: rewritten step, in eager steps (median of {rounds})", ratios["eager"].median, TIME_LIMIT
        ),
        Target(f"{entry.name}: peak memory of the process, relative to eager's", peak, MEMORY_LIMIT),
    ]
    if entry.name.startswith(OPTIMIZE_MODEL):
        report.targets.append(
            Target(f"{entry.name}: capture, planning and rewriting", optimize_s, OPTIMIZE_LIMIT_S, unit="s")
        )
    report.data[entry.name] = {"seconds": timed["seconds"], "memory": memory}


def _row(
    entry: Entry,
    name: str,
    timings: Timings,
    memory: dict[str, dict[str, Any]],
    peak: float,
    steps: float,
    optimize_s: float,
) -> tuple[str, ...]:
    def ratio(baseline: str) -> str:
        return "1" if name == baseline else _spread(timings.ratio(name, baseline))

    times = (f"{timings.time(name).median * 1e3:.1f}", ratio("eager"), ratio("eager fused"))
    if name not in memory:
        return (entry.name, name, *times, "", "", "", "")
    bytes_ = f"{memory[name]['process_bytes'] / 2**20:.0f}"
    if name == "eager":
        return (entry.name, name, *times, bytes_, "1", "1", "")
    return (entry.name, name, *times, bytes_, f"{peak:.3f}", f"{steps:.3f}", f"{optimize_s:.1f}")


def _spread(s: Spread) -> str:
    return f"{s:.3f}"


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="Small models and few rounds: to see that it runs, not to be quoted.")
@click.option("--compile", "compiles", is_flag=True, help="Compare compile=True with torch.compile.")
@click.option("--only", multiple=True, metavar="NAME", help="Measure this model alone; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), help=f"Rounds that count.  [default: {ROUNDS}, quick {QUICK_ROUNDS}]")
@options
def main(
    quick: bool,
    compiles: bool,
    only: tuple[str, ...],
    rounds: int | None,
    check: bool,
    json_file: str | None,
    save: bool,
) -> None:
    """Compares the rewritten step with the eager one, on one rank."""
    table = compiled.entries() if compiles else sizes.entries(scaled=quick)
    try:
        entries = [find(table, name) for name in only] or list(table)
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    if compiles:
        found = compiled_report(entries, rounds or (QUICK_ROUNDS if quick else ROUNDS))
        command = "python -m benchmarks.overhead --compile"
        sys.exit(publish(found, command=command, check=check, json_file=json_file, save=save))
    report = Report(
        name="overhead",
        title="One rank: the rewritten training step against the eager one"
        + (" (small models: to see that it runs)" if quick else ""),
        columns=(
            "model",
            "step",
            "ms",
            "relative to eager",
            "relative to eager, fused",
            "peak MiB",
            "peak relative to eager",
            "of the steps alone",
            "optimize s",
        ),
    )
    report.notes = [
        "Times are medians over rounds in which all three run in turn, each in a process of its own; ratios are "
        "medians (quartiles) of the ratios within a round. A step is forward, backward, optimizer and zero_grad, in "
        "float32, in train mode with a dropout of 0.1. AdamW is torch's with its defaults, which in eager PyTorch on "
        "CPU is a loop over the parameters. Where the user leaves the implementation open, as here, autopar takes the "
        "fused one: the ratio to the eager step with a fused AdamW, which users have to ask for, compares like with "
        "like.",
        "Memory is the high-water mark of the resident memory (VmHWM) of a fresh process that builds the model and "
        "takes four steps, imports and capture included; 'of the steps alone' is the same after resetting the mark "
        "before the first step. 'optimize s' is capture, planning and rewriting in the process that measures memory.",
    ]
    for entry in entries:
        examine(report, entry, quick, rounds or (QUICK_ROUNDS if quick else ROUNDS))
    command = "python -m benchmarks.overhead" + (" --quick" if quick else "")
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
