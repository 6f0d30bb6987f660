"""How quantities, tables and lists of parameter names are written for people.

Used by messages, the explanation, the command line and the report, so that one figure reads the same everywhere. Binary
units are 1024-based (KiB, MiB, GiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def three_digits(x: float) -> str:
    """A number with about three digits, never in exponent form between 0.001 and 10^15."""
    for places, below in ((2, 9.995), (1, 99.95)):
        if abs(x) < below:
            return f"{x:.{places}f}"
    return f"{x:.0f}"


def duration(seconds: float) -> str:
    """A time with its unit: `338 ms`."""
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 0.9995:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def size(num_bytes: float) -> str:
    """A size with its binary unit: `61.2 MiB`."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.5:
            return f"{three_digits(value)} {unit}"
    return f"{three_digits(value / 1024)} TiB"


def mebibytes(num_bytes: float) -> str:
    """A size in MiB without the unit, for columns that name it: two places, or three digits where it is tiny."""
    value = num_bytes / 2**20
    if value == 0 or value >= 0.01:
        return f"{value:.2f}"
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.1e}"


def count(n: float) -> str:
    """A number of things: exact below ten thousand, else `10.4 M`."""
    if n < 10_000:
        return f"{n:.0f}"
    for unit, scale in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if n < 999.5 * scale:
            return f"{three_digits(n / scale)} {unit}"
    return f"{three_digits(n / 1e12)} T"


def number_of(n: int, singular: str, plural: str = "") -> str:
    """`1 group`, `2 groups`."""
    return f"{n} {singular if n == 1 else plural or singular + 's'}"


def shorten(text: str, width: int) -> str:
    """Cuts the middle out of a text that is too wide; names of parameters differ at both ends."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str, indent: str = "  ") -> list[str]:
    """Lines of a plain-text table. `align` has one letter a column, `l` or `r`."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [c.rjust(w) if a == "r" else c.ljust(w) for c, w, a in zip(row, widths, align, strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def name_pattern(names: Sequence[str], width: int = 40) -> str:
    """A list of parameter names as one short pattern: `encoder.layer.0-5.*`, `wte.weight, h.*`."""
    unique = list(dict.fromkeys(names))
    if len(unique) == 1:
        return shorten(unique[0], width)
    split = [name.split(".") for name in unique]
    depth = 0
    while all(len(parts) > depth + 1 for parts in split) and len({parts[depth] for parts in split}) == 1:
        depth += 1
    prefix = "".join(f"{part}." for part in split[0][:depth])
    heads: dict[str, int] = {}
    for parts in split:
        heads[parts[depth]] = heads.get(parts[depth], 0) + 1
    deep = {parts[depth] for parts in split if len(parts) > depth + 1}
    if all(head.isdigit() for head in heads):
        return shorten(f"{prefix}{_ranges(sorted(int(h) for h in heads))}{'.*' if deep else ''}", width)
    leaves = {parts[depth]: ".".join(parts[depth:]) for parts in split}
    labels = [leaves[head] if n == 1 else f"{head}.*" for head, n in heads.items()]
    whole = f"{prefix}{{{', '.join(labels)}}}" if prefix else ", ".join(labels)
    if len(whole) <= width:
        return whole
    if prefix:
        return shorten(f"{prefix}*", width)
    shown: list[str] = []
    for label in labels:
        tail = f", +{len(labels) - len(shown) - 1} more"
        if shown and len(", ".join([*shown, label])) + len(tail) > width:
            break
        shown.append(label)
    rest = len(labels) - len(shown)
    tail = f", +{rest} more" if rest else ""
    return shorten(", ".join(shown), width - len(tail)) + tail


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
