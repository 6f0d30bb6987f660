"""`python -m autopar.testing STRATEGY ...`: looks whether strategies keep their promises."""

from __future__ import annotations

import sys

import click

from autopar.errors import AutoparError
from autopar.lab import JobFailed, JobTimeout
from autopar.strategies import STRATEGIES
from autopar.testing.check import WORLDS, check_strategy


@click.command()
@click.argument("strategies", nargs=-1, metavar="[NAME|MODULE:CLASS]...")
@click.option(
    "--ranks", type=click.IntRange(1, 16), multiple=True, help="On so many; may be repeated. Default: 1 to 5."
)
def main(strategies: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    """Train small models under each strategy, on ranks of this machine, and compare with one process; count the bytes
    on the wire (as root); compare what is issued with what is priced. Without arguments: every strategy of autopar."""
    passed = True
    for name in strategies or sorted(STRATEGIES):
        try:
            found = check_strategy(name, tuple(sorted(ranks)) or WORLDS, lambda line: click.echo(line, err=True))
        except (AutoparError, JobFailed, JobTimeout) as e:
            raise click.ClickException(str(e)) from e
        click.echo(str(found))
        passed &= found.passed
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
