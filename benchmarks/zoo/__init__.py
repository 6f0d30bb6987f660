"""Small real models, with batches to train them on: what the tests and the benchmarks run on.

`huggingface.ENTRIES` are Hugging Face architectures with tiny configurations and random weights, `plain.ENTRIES`
are plain torch modules, and `sizes.ENTRIES` are models of the size that people train. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.zoo.entry import Batch, Entry, Kind

__all__ = ["Batch", "Entry", "Kind", "find"]


def find(entries: Sequence[Entry], name: str) -> Entry:
    """The entry of that name; raises `KeyError` with the nearest right name."""
    from autopar.errors import did_you_mean

    table = {e.name: e for e in entries}
    if name not in table:
        raise KeyError(f"no model '{name}' in the zoo{did_you_mean(name, table)}")
    return table[name]
