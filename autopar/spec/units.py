"""Quantities with units: read from text, written as text, and always with where they come from.

Inside autopar a quantity is a float in bytes, seconds, bytes per second or FLOP per second. Outside it is text with
a unit: `25 Gbit/s`, `80 GiB`, `5 us`, `312 TFLOP/s`, `2 TB/s`. Case counts: `b` is a bit, `B` is a byte; `GiB` is
1024-based, `GB` is 1000-based. After the unit may stand where the figure comes from: `0.955 Gbit/s (measured)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from autopar.errors import did_you_mean

Provenance = Literal["measured", "looked up", "guessed"]
PROVENANCES: tuple[Provenance, ...] = ("measured", "looked up", "guessed")
"""From the strongest to the weakest. `looked up`: a datasheet says so, or the user wrote it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in base units (bytes, seconds, bytes/s or FLOP/s), and where it comes from. `float(figure)` works."""

    value: float
    provenance: Provenance = "looked up"

    def __float__(self) -> float:
        return self.value


def weakest(*figures: Figure) -> Provenance:
    """The weakest provenance among the figures that a result rests on; `measured` where there are none."""
    return max((f.provenance for f in figures), key=PROVENANCES.index, default="measured")


def guess(value: float) -> Figure:
    """A figure that nobody measured or looked up."""
    return Figure(value, "guessed")


@dataclass(frozen=True, eq=False)
class Dimension:
    """A kind of quantity, with its units as multiples of the base unit."""

    name: str
    example: str
    shown: Mapping[str, Fraction]
    """The units used in output, and named first in errors."""
    listed: Mapping[str, Fraction] = field(default_factory=dict)
    """Further units, named in errors."""
    aliases: Mapping[str, Fraction] = field(default_factory=dict)
    """Other spellings that are understood."""
    zero: bool = False
    """Whether zero is a sensible value."""

    @property
    def units(self) -> dict[str, Fraction]:
        return {**self.shown, **self.listed, **self.aliases}


def _powers(suffix: str, prefixes: str = ",k,M,G,T", unit: Fraction | int = 1) -> dict[str, Fraction]:
    """`_powers("B", ",k,M")` is B, kB, MB."""
    return {p + suffix: Fraction(unit) * 1000**i for i, p in enumerate(prefixes.split(","))}


_BIT = Fraction(1, 8)
_BINARY = ["K", "M", "G", "T"]
_BITS = _powers("bit/s", unit=_BIT)
_BIT_ALIASES = _powers("b/s", unit=_BIT) | _powers("bps", unit=_BIT)
_BYTES = _powers("B/s")
_BINARY_BYTES = {f"{p}iB/s": Fraction(1024**i) for i, p in enumerate(_BINARY, start=1)}

SIZE = Dimension("size", "80 GiB", _powers("B") | {f"{p}iB": Fraction(1024**i) for i, p in enumerate(_BINARY, start=1)})
DURATION = Dimension(
    "duration",
    "5 us",
    {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)},
    aliases={"\N{MICRO SIGN}s": Fraction(1, 10**6), "\N{GREEK SMALL LETTER MU}s": Fraction(1, 10**6)},
    zero=True,
)
NETWORK_RATE = Dimension("data rate", "25 Gbit/s", _BITS, _BYTES, _BIT_ALIASES | _BINARY_BYTES)
MEMORY_RATE = Dimension("data rate", "2 TB/s", _BYTES, _BINARY_BYTES, _BITS | _BIT_ALIASES)
FLOP_RATE = Dimension(
    "compute rate", "312 TFLOP/s", _powers("FLOP/s", ",k,M,G,T,P"), aliases=_powers("FLOPS", ",k,M,G,T,P")
)
_ALL = (SIZE, DURATION, NETWORK_RATE, FLOP_RATE)
_LEAST, _MOST = 1e-30, 1e30
"""Of any quantity in base units, but zero: what arithmetic on several of them can bear."""

# Digits and exponent are bounded, so that exact arithmetic on them is cheap whatever the file says.
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][+-]?\d{1,2})?)"
    r"\s*(?P<unit>[^\s\d(][^\s(]*)?\s*(?:\((?P<provenance>[^()]*)\))?"
)


def parse(value: object, dimension: Dimension) -> Figure:
    """Reads a quantity: text as above, or a `Figure` in base units. Raises `ValueError` with the units it wants."""
    if isinstance(value, Figure):
        return _checked(Figure(float(value.value), value.provenance), f"{value.value:g}", dimension)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{shown(value)} is no {dimension.name}; {_wanted(dimension)}")
    written = str(value).strip()
    match = _QUANTITY.fullmatch(written)
    if match is None:
        raise ValueError(f"{shown(written)} is no number with a unit; {_wanted(dimension)}")
    unit, provenance = match["unit"], match["provenance"] or "looked up"
    if unit is None:
        raise ValueError(f"{shown(value)} has no unit; {_wanted(dimension)}")
    factor = dimension.units.get(unit)
    if factor is None:
        problem = _unit_problem(unit, dimension)
        wanted = f" (units: {_units(dimension)})" if problem.endswith("?") else f"; {_wanted(dimension)}"
        raise ValueError(f"{shown(written)}: {problem}{wanted}")
    for known in PROVENANCES:
        if provenance == known:
            return _checked(Figure(float(Fraction(match["number"]) * factor), known), shown(written), dimension)
    raise ValueError(
        f"{shown(written)}: after the unit may stand where the figure comes from, one of "
        f"{', '.join(f'({p})' for p in PROVENANCES)}{did_you_mean(provenance, PROVENANCES)}"
    )


def text(quantity: Figure | float, dimension: Dimension) -> str:
    """Writes a quantity in its handiest unit, exactly: `parse(text(x))` is x. Provenance is said unless looked up."""
    value = float(quantity)
    note = f" ({quantity.provenance})" if isinstance(quantity, Figure) and quantity.provenance != "looked up" else ""
    base = next(u for u, n in dimension.units.items() if n == 1)
    best, best_cost = f"{value!r} {base}", (99, 0, 0)
    for unit, factor in _fitting(value, dimension):
        number = repr(float(Fraction(value) / factor)).removesuffix(".0")
        written = f"{number} {unit}"
        digits = number.replace(".", "").strip("0")
        cost = (len(digits), max(3, len(number.split(".")[0])), len(written))  # 3.35 TB/s, not 3350 GB/s
        if cost < best_cost and "e" not in number and float(Fraction(number) * factor) == value:
            best, best_cost = written, cost
    return best + note


def rounded(quantity: Figure | float, dimension: Dimension) -> str:
    """Writes a quantity for people, to three digits: `1 Gbit/s`, `39.6 GiB`."""
    value = float(quantity)
    unit, factor = max(_fitting(value, dimension), key=lambda c: c[1])
    number = value / float(factor)
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _fitting(value: float, dimension: Dimension) -> list[tuple[str, Fraction]]:
    """The units in which the value is at least one, and the base unit of zero; the smallest unit of what is less."""
    if value == 0:
        return [(u, n) for u, n in dimension.shown.items() if n == 1]
    fitting = [(u, n) for u, n in dimension.shown.items() if value >= n * Fraction(999, 1000)]
    return fitting or [min(dimension.shown.items(), key=lambda c: c[1])]


def _checked(figure: Figure, written: str, dimension: Dimension) -> Figure:
    if figure.value < 0 or (figure.value == 0 and not dimension.zero) or not figure.value < float("inf"):
        limit = "zero or more" if dimension.zero else "more than zero"
        raise ValueError(f"{written} is not possible: a {dimension.name} here is {limit}, and finite")
    if figure.value and not _LEAST <= figure.value <= _MOST:
        raise ValueError(f"{written} is not possible: it is too large or too small for a {dimension.name}")
    return figure


def _unit_problem(unit: str, dimension: Dimension) -> str:
    other = next((d for d in _ALL if unit in d.units and d.name != dimension.name), None)
    if other is not None:
        return f"'{unit}' is a unit of {other.name}, not of {dimension.name}"
    # Letters of the wrong case are the likeliest slip, and may mean bits or bytes.
    near = [u for u in dimension.units if u.lower() == unit.lower()]
    if near:
        return f"'{unit}' is no unit of {dimension.name}; did you mean {' or '.join(repr(u) for u in near)}?"
    return f"'{unit}' is no unit of {dimension.name}{did_you_mean(unit, dimension.units)}"


def _wanted(dimension: Dimension) -> str:
    return f"write for example '{dimension.example}' (units: {_units(dimension)})"


def _units(dimension: Dimension) -> str:
    return ", ".join([*dimension.shown, *dimension.listed])


def shown(value: object) -> str:
    """A value for an error message, cut short where it is long."""
    written = repr(value)
    return written if len(written) <= 60 else written[:57] + "..."
