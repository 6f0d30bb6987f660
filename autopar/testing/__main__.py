"""`python -m autopar.testing STRATEGY ...`: looks whether strategies keep their promises."""

from __future__ import annotations

import sys

import click

from autopar.errors import AutoparError
from autopar.lab import JobFailed, JobTimeout
from autopar.strategies import STRATEGIES
from autopar.testing.check import DEADLINE_S, WORLDS, check_strategy


@click.command()
@click.argument("strategies", nargs=-1, metavar="[NAME|MODULE:CLASS]...")
@click.option(
    "--ranks", type=click.IntRange(1, 16), multiple=True, help="On so many; may be repeated. Default: 1 to 5."
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=DEADLINE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long one look at a strategy may take; what takes longer is ended, and the operation named.",
)
def main(strategies: tuple[str, ...], ranks: tuple[int, ...], deadline: float) -> None:
    """Train small models under each strategy, on ranks of this machine, and compare with one process; count the bytes
    on the wire (as root); compare what is issued with what is priced, and what is declared with what is done. Without
    arguments: every strategy of autopar."""
    worlds = tuple(sorted(ranks)) or WORLDS
    passed = True
    for name in strategies or sorted(STRATEGIES):
        try:
            found = check_strategy(name, worlds, lambda line: click.echo(line, err=True), deadline)
        except (AutoparError, JobFailed, JobTimeout) as e:
            raise click.ClickException(str(e)) from e
        click.echo(str(found))
        passed &= found.passed
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
