"""The options of commands that search: memory that is kept free, strategies that are given and that are forbidden."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_PART = re.compile(r"(\d{1,3}(?:\.\d{0,6})?)\s*(%?)")


def constraint_options(function: F) -> F:
    """Adds `--memory-reserve`, `--pin` and `--forbid`, passed on as `memory_reserve`, `pin` and `forbid`."""
    options = (
        click.option(
            "--memory-reserve",
            default="10%",
            show_default=True,
            metavar="PERCENT",
            callback=part,
            help="Of each device's memory, kept free for what no prediction counts.",
        ),
        click.option(
            "--pin",
            metavar="PATTERN=STRATEGY",
            multiple=True,
            callback=_pins,
            help="Synchronize parameters of these names so: 'embed.*=sparse_rows', '*.bias=parameter_server(owner=1)'. "
            "Can be repeated; of several that match, the last one counts.",
        ),
        click.option(
            "--forbid", metavar="STRATEGY", multiple=True, help="Use this strategy for no parameter. Can be repeated."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def part(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """A part of a whole, from 0 to below 1, as people write it."""
    said = _PART.fullmatch(value.strip())
    if said is None:
        raise click.BadParameter(f"'{value}' is no part of a whole: write 10%, or 0.1", context, parameter)
    part = float(said[1]) / 100 if said[2] else float(said[1])
    if part >= 1:
        hint = f"; did you mean '{said[1]}%'?" if not said[2] and part < 100 else ""
        raise click.BadParameter(f"'{value}' is all of it: expected less than 100%{hint}", context, parameter)
    return part


def _pins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        at = _equals(value)
        pattern, strategy = value[:at].strip(), value[at + 1 :].strip()
        if at < 0 or not pattern or not strategy:
            raise click.BadParameter(
                f"'{value}': expected PATTERN=STRATEGY, as 'embed.*=sparse_rows'", context, parameter
            )
        found.pop(pattern, None)
        found[pattern] = strategy
    return found


def _equals(value: str) -> int:
    """The place of the last `=` outside of parentheses, -1 where there is none: names of parameters may hold one, and
    so do options of a strategy."""
    at, depth = -1, 0
    for place, letter in enumerate(value):
        depth += (letter == "(") - (letter == ")")
        at = place if letter == "=" and depth <= 0 else at
    return at
