"""The command line: `python -m benchmarks.trials collect | calibrate | pack | card`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from benchmarks.trials.making.cells import BUDGET_S
from benchmarks.trials.records import COMPUTES, DATA, Compute, Dataset

JOURNAL = Path("out") / "trials.jsonl"
CALIBRATIONS = Path("out") / "calibrations.jsonl"
CARD = DATA / "README.md"


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long to take trials.")
@click.option("--most", default=10**9, help="End after so many trials.")
@click.option("--out", default=JOURNAL, show_default=True, type=click.Path(path_type=Path), help="The journal.")
@click.option("--seed", default=0, show_default=True, help="Of the plans.")
@click.option("--workload", "workloads", multiple=True, help="This one only; may be repeated.")
@click.option("--cluster", "clusters", multiple=True, help="This one only; may be repeated.")
@click.option("--compute", "computes", multiple=True, type=click.Choice(COMPUTES), help="This one only.")
@click.option("--one-choice", is_flag=True, help="All plans of a workload on a cluster at one speed, without clipping.")
@click.option("--seconds", default=BUDGET_S, show_default=True, help="For the timed steps of a trial.")
def collect(
    minutes: float,
    most: int,
    out: Path,
    seed: int,
    workloads: tuple[str, ...],
    clusters: tuple[str, ...],
    computes: tuple[Compute, ...],
    one_choice: bool,
    seconds: float,
) -> None:
    """Take trials and append them to a journal. A journal that is there already is continued."""
    import torch

    from autopar.lab import unavailable_reason
    from benchmarks.trials.making.collect import Collector, NothingToTry
    from benchmarks.trials.making.journal import Journal

    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no trials can be taken here: {reason}")
    torch.set_num_threads(1)
    began = time.monotonic()
    with Journal(out) as journal:
        collector = Collector(
            journal,
            seed,
            progress=lambda line: click.echo(f"{time.monotonic() - began:7.1f} {line}"),
            one_choice=one_choice,
            budget_s=seconds,
        )
        try:
            taken = collector.run(minutes, workloads or None, clusters or None, most, computes or COMPUTES)
        except NothingToTry as e:
            raise click.ClickException(str(e)) from e
    elapsed_s = time.monotonic() - began
    click.echo(f"{taken} trials in {elapsed_s:.0f} s, {elapsed_s / max(1, taken):.1f} s each")


@main.command()
@click.option("--seconds", default=10.0, show_default=True, help="For each cluster at each speed.")
@click.option("--trials", default=JOURNAL, show_default=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", default=CALIBRATIONS, show_default=True, type=click.Path(path_type=Path), help="The journal.")
def calibrate(seconds: float, trials: Path, out: Path) -> None:
    """Calibrate the lab as every cluster, at every speed, that trials have run it as."""
    from autopar.lab import unavailable_reason
    from benchmarks.trials.making.calibrate import calibrate_lab
    from benchmarks.trials.making.journal import Journal

    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"nothing can be calibrated here: {reason}")
    with Journal(out) as journal:
        taken = calibrate_lab(Dataset.load(trials), journal, seconds, click.echo)
    click.echo(f"{taken} calibrations")


@main.command()
@click.argument("journals", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--out", default=DATA / "trials.jsonl.xz", type=click.Path(path_type=Path), help="The file to write.")
def pack(journals: tuple[Path, ...], out: Path) -> None:
    """Compress journals into the data set's one file."""
    from benchmarks.trials.making.journal import pack

    size = pack(journals or (JOURNAL,), out)
    click.echo(f"{out.name}: {size / 1e6:.2f} MB")


@main.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--save", is_flag=True, help="Write it beside the data.")
def card(files: tuple[Path, ...], save: bool) -> None:
    """Print the data card, of the data set or of other files."""
    from benchmarks.trials.card import card

    text = card(Dataset.load(*files))
    click.echo(text)
    if save:
        CARD.write_text(text)


if __name__ == "__main__":
    main()
