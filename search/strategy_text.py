"""A strategy with options, as people write it: `parameter_server(owner=1)`, `power_sgd(rank=4)`."""

from __future__ import annotations

import json
import re

from autopar.errors import PlanError
from autopar.spec.plan import OptionValue

_TEXT = re.compile(r"\s*(?P<strategy>[^\s()]+)\s*(?:\((?P<options>.*)\))?\s*")
_COMMA = re.compile(r",(?![^\[]*\])")


def strategy_and_options(text: str) -> tuple[str, dict[str, OptionValue]]:
    """The name, and the options as JSON reads their values, or as they are written. Raises `PlanError` where the text
    is no name with options; whether there is such a strategy, and such an option, is not looked at."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise PlanError(
            f"'{text}' names no strategy: write parameter_server, or parameter_server(owner=1) with options"
        )
    return match["strategy"], _options(match["options"] or "")


def _options(text: str) -> dict[str, OptionValue]:
    found: dict[str, OptionValue] = {}
    for part in filter(str.strip, _COMMA.split(text)):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name or not value:
            raise PlanError(f"option '{part.strip()}' has no value: write NAME=VALUE, as owner=1")
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        found[name] = tuple(read) if isinstance(read, list) else read
    return found
