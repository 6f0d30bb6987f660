"""`python -m benchmarks.demo`: plan for a language model, train it on four ranks, and compare with torch DDP."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.lab import Lab, loopback, unavailable_reason
from autopar.spec import units
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity

if TYPE_CHECKING:
    from autopar.spec.plan import Plan
    from benchmarks.interleaved import Block
    from benchmarks.peers.case import Case
    from benchmarks.peers.outcome import CaseOutcome
    from benchmarks.zoo.workload import Workload

BLOCK_STEPS = 3

console = Console(soft_wrap=True)


@click.command()
@click.option("--rate", default="1 Gbit/s", show_default=True, help="Rate of each host's link.")
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(min=2, max=16))
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=2), help="Timed steps of each system.")
@click.option("--fidelity", default="exact", show_default=True, type=click.Choice(["exact", "rounded"]))
@click.option("--seed", default=0, show_default=True, help="Of the model and of the batches.")
@click.option("--loopback", "no_lab", is_flag=True, help="Do not use network namespaces even where they can be had.")
@click.option(
    "--out",
    default=Path("out/demo"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the plan, the report, the figures, and the tokens.",
)
@click.option("--check", is_flag=True, help="Exit with 1 where a figure misses its target.")
def main(rate: str, ranks: int, steps: int, fidelity: str, seed: int, no_lab: bool, out: Path, check: bool) -> None:
    """Train a GPT-2 of Python's standard library with autopar and with torch DDP, in turn, and compare them."""
    started = time.monotonic()
    try:
        rate_bps = 8 * float(units.parse(rate, units.NETWORK_RATE))
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--rate") from e
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out.mkdir(parents=True, exist_ok=True)
    reason = "--loopback was given" if no_lab else unavailable_reason()
    cluster = _described(ranks, None if reason else rate_bps, out / "cluster.yaml")
    with loopback(cluster) if reason else Lab.of(cluster) as lab, TemporaryDirectory(prefix="autopar-") as folder:
        network = (
            f"{ranks} ranks on loopback" if reason else f"{ranks} hosts, one network namespace each, links of {rate}"
        )
        console.print(f"[bold]Network[/]  {network}")
        if reason:
            console.print(
                f"         {reason}. Loopback has no network to save: what is sent costs next to nothing, so\n"
                "         there is little to gain, and its bytes are also those of other programs. Links of a given\n"
                "         rate need root on Linux with iproute2 (ip and tc)."
            )
        workload, text = _prepare(out, seed)
        plan = _plan(workload, cluster, cast("Fidelity", fidelity), out)

        from benchmarks.demo.outcome import Outcome
        from benchmarks.peers.case import Case

        try:
            outcome = Outcome.of(_train(Case(workload, "demo", cluster, Path(folder), given=plan), lab, steps))
        except ValueError as e:
            raise click.ClickException(str(e)) from e

    from autopar.report import build_report

    about = {"network": network, "rate": None if reason else rate, "ranks": ranks, "fidelity": fidelity}
    outcome.save(out / "results.json", {**about, "text": text, "timed_steps": steps, "seconds": _since(started)})
    measured = {plan.name: outcome.autopar.median_step_s, "ddp": outcome.ddp.median_step_s}
    build_report(plan, out / "report.html", measured=measured, commands=["make demo"])
    console.print()
    console.print(outcome.table(f"{network}; {steps} timed steps, in turns of {BLOCK_STEPS}"))
    if plan.prediction is not None:
        console.print(f"\nPredicted for autopar: {plan.prediction.step_time_s * 1e3:.0f} ms a step.")
    console.print(f"Losses of the two differ by at most {outcome.loss_difference:.1e} of their value.")
    console.print(f"Written: {', '.join(str(out / n) for n in ('plan.json', 'report.html', 'results.json'))}")
    console.print(f"Done in {_since(started):.0f} s.")
    if check and (short := outcome.shortfalls()):
        console.print("[bold red]Short of the target:[/]", *short, sep="\n  ")
        sys.exit(1)


def _described(ranks: int, rate_bps: float | None, path: Path) -> ClusterSpec:
    """Writes the cluster's description, as a user would, and reads it back: hosts with links, or this machine."""
    from benchmarks.suite.clusters import even

    cluster = ClusterSpec.local(ranks) if rate_bps is None else even(ranks, rate_bps / 1e6)()
    path.write_text(cluster.to_yaml())
    return ClusterSpec.load(path)


def _prepare(out: Path, seed: int) -> tuple[Workload, str]:
    with _said("Text"):
        from benchmarks.demo.task import BATCH_SIZE, SEQUENCE_LENGTH, workload
        from benchmarks.demo.text import TEXT_BYTES, VOCABULARY, tokenize
        from benchmarks.zoo.words import standard_library

        tokens = tokenize(standard_library(TEXT_BYTES), out)
        made = workload(tokens.path, seed)
        parameters = sum(p.numel() for p in made.model().parameters())
    text = f"{tokens.files} files of Python's standard library, {tokens.text_bytes / 1e6:.1f} MB"
    console.print(f"         {text}: {tokens.count / 1e6:.2f} M tokens{' (from an earlier run)' * tokens.cached}")
    console.print(
        f"[bold]Model[/]    GPT-2, {parameters / 1e6:.1f} M parameters, vocabulary {VOCABULARY}, "
        f"{BATCH_SIZE} x {SEQUENCE_LENGTH} tokens a rank and step, AdamW"
    )
    return made, text


def _plan(workload: Workload, cluster: ClusterSpec, fidelity: Fidelity, out: Path) -> Plan:
    """Captures the model and searches, as a user would. Needs neither the cluster nor a process group."""
    with _said("Plan") as say:
        import autopar

        def show(what: str, priced: int, best_s: float) -> None:
            say(f"{what}, {priced} plans priced, best {best_s * 1e3:.0f} ms a step")

        model = workload.model()
        plan = autopar.plan(
            model,
            cluster,
            example_inputs=workload.batch(0, 0),
            optimizer=workload.optimizer(model),
            fidelity=fidelity,
            progress=show,
        )
        plan.save(out / "plan.json")
    console.print(plan.explain(), markup=False, highlight=False)
    return plan


def _train(case: Case, lab: Lab, steps: int) -> CaseOutcome:
    """Both systems in turn, blocks of `BLOCK_STEPS` steps at a time; at least `steps` that are timed."""
    from benchmarks.peers.case import Effort
    from benchmarks.peers.measure import Contest
    from benchmarks.peers.outcome import REFERENCE
    from benchmarks.peers.ranks import Ranks

    rounds = -(-steps // BLOCK_STEPS)
    effort = Effort(rounds, rounds, rounds_s=1e9, block_s=1e9, block_steps=BLOCK_STEPS, search_time_s=0.0, tune=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, Ranks(lab.ranks, lab.servers) as ranks:
        bar = progress.add_task("[bold]Train[/]    starting ranks", total=2 * (1 + rounds))

        def show(block: Block) -> None:
            name = "torch DDP" if block.system == REFERENCE else "autopar"
            state = f"[bold]Train[/]    {name:9} loss {block.losses[-1]:.3f}, {block.mean_step_s * 1e3:.0f} ms a step"
            if not console.is_terminal:  # where the bar is not drawn until the end
                console.print(state)
            progress.update(bar, advance=1, description=state)

        return Contest(case, ranks, effort, lambda what: None, show).run((REFERENCE,), lab.note, lab.emulated)


@contextmanager
def _said(what: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done, and how long it took; gives a function that says how far it is."""
    start = time.monotonic()
    with console.status(f"[bold]{what}[/] ...") as status:
        yield lambda how_far: status.update(f"[bold]{what}[/] ... {how_far}")
    console.print(f"[bold]{what:8}[/] {time.monotonic() - start:.1f} s")


def _since(start: float) -> float:
    return time.monotonic() - start


if __name__ == "__main__":
    main()
