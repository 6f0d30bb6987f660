"""YAML read as plain data, with the line of every value, and nothing else.

Strings, numbers, booleans, lists and mappings with text keys: no tags, hence no objects; no key twice. Anchors,
aliases and merge keys (`<<`) work, within bounds on size, nesting and expansion that a hostile file cannot escape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from autopar.errors import ClusterSpecError

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
"""Values in a file, each alias counted with all that it stands for."""
MAX_DEPTH = 32
MAX_SCALAR = 1_000
"""Characters of one value."""

Place = tuple[str | int, ...]
"""Keys and indices from the top of a file down to a value: `("hosts", 0, "bandwidth")`."""

_PLAIN = {f"tag:yaml.org,2002:{t}" for t in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


@dataclass(frozen=True)
class Source:
    """What a file says, and where."""

    name: str
    data: Any
    lines: Mapping[Place, int] = field(default_factory=dict)

    def nearest(self, place: Place) -> Place:
        """The longest part of `place`, from the top, that stands in the file, where one thing may stand for a list."""
        found: Place = ()
        for key in place:
            if (*found, key) in self.lines:
                found = (*found, key)
            elif key != 0:
                break
        return found

    def line(self, place: Place) -> int:
        """The line, from 1, of the value at `place`, or of what holds it."""
        return self.lines.get(self.nearest(place), 1)


def read_yaml(text: str, name: str) -> Source:
    """Reads YAML; `name` stands for the file in errors. Raises `ClusterSpecError` with file and line."""
    if len(text) > MAX_BYTES:
        raise ClusterSpecError(f"{name}: larger than 1 MiB: this is no cluster description")
    reader = _Reader()
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        data = None if node is None else reader.value(node, ())
    except _TooMuch as e:
        raise ClusterSpecError(f"{name}:{e.line}: {e}") from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise ClusterSpecError(f"{name}:{mark.line + 1 if mark else 1}: not YAML: {_said(e)}") from e
    except yaml.reader.ReaderError as e:
        line = text[: e.position].count("\n") + 1
        raise ClusterSpecError(f"{name}:{line}: not YAML: the character {e.character!r} is not allowed") from e
    return Source(name, data, reader.lines)


class _TooMuch(Exception):
    def __init__(self, message: str, node_line: int) -> None:
        super().__init__(message)
        self.line = node_line + 1


class _Loader(yaml.SafeLoader):
    """Stops while composing, so that a hostile file costs no more than the bounds allow."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.count += 1
        line = self.peek_event().start_mark.line  # type: ignore[no-untyped-call]
        if self.depth > MAX_DEPTH:
            raise _TooMuch(f"nested more than {MAX_DEPTH} deep: this is no cluster description", line)
        if self.count > MAX_VALUES:
            raise _TooMuch(f"more than {MAX_VALUES} values: this is no cluster description", line)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """Turns nodes into plain data and notes their lines."""

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.count = 0
        self.scalars = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, place: Place) -> Any:
        line = node.start_mark.line
        self.count += 1
        if self.count > MAX_VALUES or len(place) > MAX_DEPTH:
            raise _TooMuch("aliases (*name) that expand without bound: write the values out", line)
        if node.tag not in _PLAIN:
            raise _TooMuch(_foreign(node), line)
        self.lines.setdefault(place, line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*place, i)) for i, item in enumerate(node.value)]
        if len(node.value) > MAX_SCALAR:
            raise _TooMuch(f"a value of more than {MAX_SCALAR} characters: this is no cluster description", line)
        self.lines[place] = line + 1
        try:
            return self.scalars.construct_object(node)
        except ValueError as e:
            raise _TooMuch(f"'{node.value}' cannot be read: {e}", line) from e

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first: dict[str, int] = {}
        inherited: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag.endswith(":merge"):
                inherited = self._merged(value_node, place) | inherited
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            if key_node.tag.endswith(":merge"):
                continue
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.tag.endswith(":str"):
                shown = f"'{key_node.value}'" if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise _TooMuch(f"{shown} is used as a field's name; names are words", line)
            key = key_node.value
            if key in found:
                raise _TooMuch(f"'{key}' is given twice, first in line {first[key]}", line)
            first[key] = line + 1
            self.lines[(*place, key)] = line + 1
            found[key] = self.value(value_node, (*place, key))
        return inherited | found

    def _merged(self, node: yaml.Node, place: Place) -> dict[str, Any]:
        """What `<<: *name` or `<<: [*one, *other]` adds; the first one named wins, as YAML has it."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise _TooMuch("'<<' takes a mapping, as in '<<: *name'", node.start_mark.line)
            merged = self.value(part, place) | merged
        return merged


def _foreign(node: yaml.Node) -> str:
    if node.tag == "tag:yaml.org,2002:timestamp":
        return f"'{node.value}' is a date in YAML; put quotes around it if it is text"
    return f"the tag '{node.tag[:60]}' is not allowed: a cluster description holds plain values only"


def _said(error: yaml.MarkedYAMLError) -> str:
    said = " ".join(str(p) for p in (error.context, error.problem) if p)
    return said + (" (indent with spaces, not tabs)" if "\\t" in said else "")
