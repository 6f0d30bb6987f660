"""The tables in which a module holds its parameters and buffers: dicts, but for TorchScript's."""

from __future__ import annotations

from collections import UserDict
from typing import Any


def table_of(table: Any) -> Any:
    """A module's `_parameters` or `_buffers`, to be asked as a dict is; a dict itself is returned."""
    return table if isinstance(table, dict) else _Scripted(table)


class _Scripted(UserDict[str, Any]):
    """A table of a module in TorchScript, whose values are looked up anew each time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self._table.items())

    def __setitem__(self, key: str, value: Any) -> None:
        self._table[key] = value
