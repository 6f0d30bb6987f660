"""The form of a batch: what it is made of, and where its tensors lie.

Containers are those that PyTorch's pytrees know. Of what is a leaf to these, dataclasses are looked into, so that the
tensors in their fields are inputs of a graph like others.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

_SETS = (
    "the model sets '{}' of a dataclass in its batch, which a graph would not hand back: return it from forward instead"
)
Held = tuple[Any, dict[str, Any]]
"""A dataclass that was put together, and what it was given to hold."""


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass that is nothing else besides, as a container, a module or a member of an enum."""
    kind: Any = type(value)
    return (
        hasattr(kind, "__dataclass_fields__")
        and kind.__new__ is object.__new__
        and not isinstance(value, (nn.Module, enum.Enum))
    )


def held_by(record: Any) -> dict[str, Any]:
    """What a dataclass holds: its fields, and what it was given besides, as by `__post_init__`."""
    found = {f.name: getattr(record, f.name) for f in fields(record) if hasattr(record, f.name)}
    return found | getattr(record, "__dict__", {})


def record_of(kind: type, held: dict[str, Any]) -> Any:
    """A dataclass of this kind that holds these; its `__init__` does not run, which may change what it is given."""
    made: Any = object.__new__(kind)
    for name, value in held.items():
        object.__setattr__(made, name, value)  # also where it is frozen
    return made


@dataclass(frozen=True)
class Form:
    """Of a batch, or of what a field holds."""

    spec: pytree.TreeSpec
    records: tuple[Record | None, ...]
    """Which of its leaves to PyTorch are dataclasses."""

    def rebuild(self, leaves: Iterator[Any], made: list[Held]) -> Any:
        """The batch, with these leaves in their places. `made` takes the dataclasses in it."""
        values = [next(leaves) if r is None else r.rebuild(leaves, made) for r in self.records]
        return pytree.tree_unflatten(values, self.spec)

    def placed(self, batch: Any, at: str = "batch") -> Iterator[tuple[str, Any]]:
        """The leaves of a batch of this form, each with its place as a user would write it: `batch['mask']`,
        `batch[0].x`. Raises `ValueError` where a container of the user's does not say places."""
        paths, _ = pytree.tree_flatten_with_path(batch)
        for (path, leaf), record in zip(paths, self.records, strict=True):
            place = at + pytree.keystr(path)
            if record is None:
                yield place, leaf
            else:
                for name, form in record.held.items():
                    yield from form.placed(getattr(leaf, name), f"{place}.{name}")

    def __str__(self) -> str:
        opened = [f"{i}: {r}" for i, r in enumerate(self.records) if r is not None]
        return str(self.spec) + (f" with {', '.join(opened)}" if opened else "")


@dataclass(frozen=True)
class Record:
    """Of a dataclass."""

    kind: type
    held: dict[str, Form]

    def rebuild(self, leaves: Iterator[Any], made: list[Held]) -> Any:
        """The dataclass, with these leaves in their places."""
        held = {name: form.rebuild(leaves, made) for name, form in self.held.items()}
        found = record_of(self.kind, held)
        made.append((found, held))
        return found

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={form}" for name, form in self.held.items())
        return f"{self.kind.__module__}.{self.kind.__qualname__}({inner})"


def check_as_given(made: list[Held]) -> None:
    """Raises `CaptureError` where a model has set what a dataclass of its batch holds: a graph has one of its own."""
    for record, held in made:
        for name, value in held.items():
            if getattr(record, name, None) is not value:
                raise CaptureError(_SETS.format(name))
        for name in getattr(record, "__dict__", ()):
            if name not in held:
                raise CaptureError(_SETS.format(name))


def taken_apart(batch: Any, within: tuple[int, ...] = ()) -> tuple[list[Any], Form]:
    """A batch's leaves, and its form. `within`: the dataclasses that it lies in, which are not looked into again."""
    given, spec = pytree.tree_flatten(batch)
    leaves: list[Any] = []
    records: list[Record | None] = []
    for leaf in given:
        if not is_record(leaf) or id(leaf) in within:
            leaves.append(leaf)
            records.append(None)
            continue
        inner = {}
        for name, value in held_by(leaf).items():
            own, inner[name] = taken_apart(value, (*within, id(leaf)))
            leaves += own
        records.append(Record(type(leaf), inner))
    return leaves, Form(spec, tuple(records))
