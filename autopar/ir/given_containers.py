"""What a model sets in the dicts and lists that it is given: a captured graph sets nothing there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from autopar.errors import AutoparWarning
from autopar.ir.refusals import is_rank_0

Kept = tuple[str, Any, Any]
"""A place, as a user would write it; the container there, and what it held."""


def kept_containers(value: Any, at: str) -> Iterator[Kept]:
    """The dicts and lists within a value, which lies `at` a place."""
    if isinstance(value, dict):
        yield at, value, dict(dict.items(value))  # a subclass may make something new of what it is asked for
        for key, inner in dict.items(value):
            yield from kept_containers(inner, f"{at}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield at, value, list(value)
        for i, inner in enumerate(value):
            yield from kept_containers(inner, f"{at}[{i}]")


def warn_of_set(kept: Iterable[Kept]) -> None:
    """Warns where one of the containers holds something else now, or something that was not there."""
    for at, container, before in kept:
        if isinstance(container, dict):
            others = [k for k, v in dict.items(container) if k not in before or before[k] is not v]
        else:
            others = [i for i, v in enumerate(container) if i >= len(before) or before[i] is not v]
        if others and is_rank_0():
            warnings.warn(
                f"the model sets {at}[{others[0]!r}] in what it is given, which a captured module does not do: who "
                "reads it behind the call finds what was there before, and no gradient flows through it. Return it "
                "from forward, or pass capture='never' to autopar.optimize",
                AutoparWarning,
                stacklevel=2,
            )
            return
