"""`python -m benchmarks.fuzz --seconds 60 --seed N`: see `benchmarks.fuzz`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.hunt import Hunt
from benchmarks.fuzz.outcome import FINDINGS
from benchmarks.fuzz.report import Tally
from benchmarks.fuzz.script import script
from benchmarks.fuzz.source import render

CHECK = 2000, 1000
"""Models and plans of `--check`."""

_IN_TURNS = 24

_ALTOGETHER = 6
"""How many times as long as one finding may be made small, all of them may."""


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Stop after so many, half of them for models.")
@click.option("--seed", type=int, default=None, help="Cases are a function of it; by default, one never used before.")
@click.option("--models", type=int, default=None, help="So many models on one rank, instead of --seconds.")
@click.option("--plans", type=int, default=None, help="So many models with plans on 2 and 3 ranks, likewise.")
@click.option("--check", is_flag=True, help="{} models and {} plans with a seed never used before.".format(*CHECK))
@click.option("--only", multiple=True, metavar="SEED/CASE", help="Runs these cases again, and shows them.")
@click.option("--jobs", default=2, show_default=True, help="Models that are tried at the same time.")
@click.option("--shrink", "shrink_s", default=20.0, show_default=True, help="Seconds to make a finding small; 0: not.")
@click.option("--until", metavar="REGEX", help="Stop at the first finding whose line matches.")
@click.option("--scripts", type=click.Path(path_type=Path), help="A folder for a script of each kind of finding.")
def main(
    seconds: float, seed: int | None, models: int | None, plans: int | None, check: bool, only: tuple[str, ...],
    jobs: int, shrink_s: float, until: str | None, scripts: Path | None,
) -> None:  # fmt: skip
    """Trains random models under random plans with autopar and with eager PyTorch, and compares the numbers.

    Exits with 1 where a number is wrong, ranks' parameters drift apart, or anything but an `AutoparError` is raised.
    """
    if check:
        models, plans = CHECK
    counted = models is not None or plans is not None
    drawn = int(time.time()) if seed is None else seed
    tally = Tally(click.echo, until)
    with Hunt(jobs, tally) as hunt:
        if only:
            for name in only:
                click.echo(render(generate(name)))
            hunt.run(list(only))
        elif counted:
            hunt.run([f"{drawn}/m{i}" for i in range(models or 0)])
            hunt.run([f"{drawn}/p{i}" for i in range(plans or 0)])
        else:
            end = time.monotonic() + seconds
            for start in range(0, 10**9, _IN_TURNS):
                for kind in "mp":  # models take about half of the time, plans the other
                    hunt.run([f"{drawn}/{kind}{start + i}" for i in range(_IN_TURNS // (1 + (kind == "p")))], end)
                if time.monotonic() > end or tally.over:
                    break
        end = time.monotonic() + _ALTOGETHER * shrink_s
        for found in tally.kinds() if shrink_s else ():
            if time.monotonic() > end:
                click.echo(f"not made small: {found.outcome.kind}, {found.name}")
                continue
            small = hunt.small(found, shrink_s)
            text = script(small.case, small.outcome)
            click.echo(f"\n# ---- as small as it was found in {shrink_s:g} s\n{text}")
            if scripts is not None:
                scripts.mkdir(parents=True, exist_ok=True)
                (scripts / f"{found.outcome.kind}-{found.name.replace('/', '-')}.py").write_text(text)
    tally.say(drawn)
    sys.exit(1 if any(tally.counts[k] for k in FINDINGS) else 0)


if __name__ == "__main__":
    main()
