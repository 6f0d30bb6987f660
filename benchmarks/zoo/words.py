"""Real text that every machine has, as words: the Python standard library, tokenized in a second, kept in a file.

A word's id is its place in the order of frequency, after the special ids, so one file serves every vocabulary size:
what is rarer than the vocabulary has room for is unknown. Frequencies follow Zipf's law, as in any text.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.zoo.workload import SEED

PADDING, BEGIN, END, UNKNOWN, MASK = range(5)
SPECIAL = 5
"""Ids below this are no words."""

_WORD = re.compile(r"\w+|[^\w\s]|\n")
_FOLDER = Path(__file__).parents[2] / "out" / "suite"
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_LIMIT_BYTES = 16_000_000
"""All of the standard library, some 12 MB."""

Ids = npt.NDArray[np.int64]


def standard_library(limit_bytes: int) -> list[Path]:
    """The standard library's sources in sorted order, tests and installed packages left out, up to `limit_bytes`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT & set(path.relative_to(root).parts):
            files.append(path)
            total += path.stat().st_size
            if total >= limit_bytes:
                break
    return files


@cache
def text() -> npt.NDArray[np.int32]:
    """The whole text as ids, mapped from the file; made when it is first asked for on this machine."""
    files = standard_library(_LIMIT_BYTES)
    key = hashlib.sha256("\n".join(f"{f} {f.stat().st_size}" for f in files).encode()).hexdigest()[:16]
    path = _FOLDER / f"words-{key}.npy"
    if not path.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.stem}-{os.getpid()}.partial.npy")  # ranks may make it at the same time
        np.save(unfinished, _tokenize(files))
        unfinished.replace(path)
    ids: npt.NDArray[np.int32] = np.load(path, mmap_mode="r", allow_pickle=False)
    return ids


def _tokenize(files: list[Path]) -> npt.NDArray[np.int32]:
    words: dict[str, int] = {}
    parts = []
    for file in files:
        found = _WORD.findall(file.read_text(errors="ignore"))
        parts.append(np.fromiter((words.setdefault(w, len(words)) for w in found), dtype=np.int32, count=len(found)))
    ids = np.concatenate(parts)
    counts = np.bincount(ids, minlength=len(words))
    place = np.empty(len(words), dtype=np.int32)
    place[np.argsort(-counts, kind="stable")] = np.arange(len(words), dtype=np.int32) + SPECIAL
    return place[ids]


def windows(step: int, rank: int, count: int, length: int, vocabulary: int) -> Ids:
    """`count` runs of `length` words, from places that the step and the rank decide: (count, length)."""
    ids = text()
    starts = np.random.default_rng([SEED, step, rank]).integers(0, len(ids) - length, size=count)
    rows = np.stack([ids[s : s + length] for s in starts]).astype(np.int64)
    rows[rows >= vocabulary] = UNKNOWN
    return rows
