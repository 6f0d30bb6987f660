"""Not written yet."""

from __future__ import annotations

from benchmarks.zoo.entry import Entry

ENTRIES: tuple[Entry, ...] = ()
