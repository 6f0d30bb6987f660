"""The terms of a loss, as an algebra: what each value of the forward pass is to the samples of a batch.

A value is `Fixed` (the same for every batch), `Rows` (its elements belong to single samples), a `Term` (a sum over the
batch, or such a sum divided by a count), or `Unknown`. The rules below say what each operator makes of these. Only the
loss's own arithmetic is followed: what a matrix product, a softmax or another operator of the model returns counts as
rows where it has a dimension for the samples. Whether it truly treats samples one by one is seen by running it
(`autopar.runtime.losses.probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.fx


@dataclass(frozen=True)
class Count:
    """How much of what a mean is over a batch has: `node`'s value times `factor`, or `factor` alone."""

    key: object
    """Counts of equal keys are equal for every batch."""
    unit: str
    factor: float = 1.0
    node: torch.fx.Node | None = None
    ignored: int | None = None
    """Where given, `node` holds class numbers, of which those that are not this one are counted, each by
    `class_weight` of it."""
    class_weight: torch.fx.Node | None = None
    nothing: torch.fx.Node | None = None
    """A value that, for a batch of which nothing counts, is 0 and divided by, or NaN."""


@dataclass(frozen=True)
class Total:
    """A node whose value the batch alone decides."""

    node: torch.fx.Node
    key: object
    """Nodes of equal keys compute the same."""


@dataclass(frozen=True)
class Fixed:
    """Does not depend on the batch."""

    number: float | None = None
    """Its value, where the graph says it."""
    per: Count | None = None
    """What it is the reciprocal of: then it does depend on the batch, by this count alone."""


@dataclass(frozen=True)
class Rows:
    """Elements that belong to single samples."""

    size: int
    """Elements of the largest value that it was reduced from; divisors of it may be counts."""
    per: Count | None = None
    """What each element is divided by."""


@dataclass(frozen=True)
class Term:
    """A sum over the batch's samples, or a mean over them; either where the graph does not tell: a sum over eight
    samples that is divided by the number 8 is a mean only if that number follows the batch."""

    counts: tuple[Count, ...] | None
    """As a mean: what it is a mean over, or what the means that it is a sum of are over. `None`: it is no mean."""
    adds: bool = False
    """Whether it may be a sum over the batch."""
    size: int = 1
    """As `Rows.size`."""
    total: Total | None = None
    """Where the batch alone decides the value: what counts, without casts, factors and lower bounds."""
    bounded: bool = False
    """Whether it cannot be 0."""


@dataclass(frozen=True)
class Unknown:
    """What the loss makes of the batch cannot be said by one weight, or is not understood."""

    node: torch.fx.Node | None
    why: str


Value = Fixed | Rows | Term | Unknown


def added(node: torch.fx.Node, a: Value, b: Value) -> Value:
    """a + b, or a - b."""
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return a if isinstance(a, Unknown) else b
    if isinstance(a, Fixed) and not isinstance(b, Fixed):
        a, b = b, a
    if isinstance(a, Rows):
        if isinstance(b, Rows):
            return Rows(max(a.size, b.size), a.per) if a.per == b.per else Unknown(node, "adds means of samples")
        if isinstance(b, Fixed) and b.per is None and a.per is None:
            return a
        return Unknown(node, "compares each sample with a value of the whole batch")
    if isinstance(a, Term) and isinstance(b, Term):
        counts = None if a.counts is None or b.counts is None else _merged(a.counts, b.counts)
        adds = a.adds and b.adds
        if counts is None and not adds:
            return Unknown(node, "adds a sum over the batch to a mean over the batch")
        return Term(counts, adds, max(a.size, b.size))
    if isinstance(a, Term) and isinstance(b, Fixed):
        if b.number == 0:
            return a
        small = b.number is not None and abs(b.number) <= 1e-5
        if a.total is not None and small:  # a count that is kept from being 0
            return replace(a, bounded=True)
        if a.counts is None or b.per is not None:
            return Unknown(node, "adds a sum over the batch to a value that is not summed over the batch")
        return Term(a.counts, False, a.size)
    return Fixed() if a == Fixed(getattr(a, "number", None)) else Unknown(node, "adds reciprocals of counts")


def multiplied(node: torch.fx.Node, a: Value, b: Value, sizes: Sequence[int]) -> Value:
    """a * b."""
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return a if isinstance(a, Unknown) else b
    if isinstance(a, Fixed) and not isinstance(b, Fixed):
        a, b = b, a
    if isinstance(b, Fixed):
        return divided_by_count(node, a, b.per) if b.per is not None else scaled(a, b.number, sizes)
    if isinstance(a, Rows) and isinstance(b, Rows):
        if a.per is None or b.per is None:
            return Rows(max(a.size, b.size), a.per or b.per)
        return Unknown(node, "multiplies means of samples")
    return Unknown(node, "multiplies values of the whole batch")


def divided(node: torch.fx.Node, a: Value, b: Value, sizes: Sequence[int]) -> Value:
    """a / b."""
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return a if isinstance(a, Unknown) else b
    if isinstance(b, Fixed):
        if b.per is not None:
            return Unknown(node, "divides by the reciprocal of a count")
        return scaled(a, None if not b.number else 1 / b.number, sizes, by_division=True)
    if isinstance(b, Rows):
        if isinstance(a, Term) or b.per is not None:
            return Unknown(node, "divides a value of the whole batch by one of each sample")
        return Rows(max(b.size, a.size) if isinstance(a, Rows) else b.size, a.per)
    count = count_of(node, b)
    if count is not None and b.adds:
        return divided_by_count(node, a, count)
    if isinstance(a, Term) and count is not None and a.counts is not None and a.counts == b.counts:
        return Term((count,), size=a.size)  # the quotient of two means over the same elements
    return Unknown(node, "divides by a value of the whole batch that is no count")


def count_of(node: torch.fx.Node, term: Term) -> Count | None:
    """What a value counts that the batch alone decides, read by the division `node`."""
    if term.total is None:
        return None
    by = node.args[-1]
    factor = 1.0 if term.adds or not term.counts else term.counts[0].factor
    return Count(
        (term.total.key, factor),
        "what the loss divides by",
        factor,
        term.total.node,
        nothing=by if isinstance(by, torch.fx.Node) and not term.bounded else None,
    )


def divided_by_count(node: torch.fx.Node, a: Value, count: Count) -> Value:
    """a / count."""
    if isinstance(a, Fixed) and a.per is None:
        return Fixed(per=count)
    if isinstance(a, Rows) and a.per is None:
        return Rows(a.size, count)
    if isinstance(a, Term) and a.adds:
        return Term((count,), size=a.size)
    return Unknown(node, "divides a mean by a count")


def scaled(a: Value, factor: float | None, sizes: Sequence[int], by_division: bool = False) -> Value:
    """a times what does not depend on the batch. A number that is a multiple of one of `sizes`, which may be numbers of
    samples, may count them, and a sum become a mean by it, or a mean a sum."""
    if isinstance(a, Fixed):
        known = a.number is not None and factor is not None and a.per is None
        return Fixed(a.number * factor, None) if known else Fixed(None, a.per)  # type: ignore[operator]
    if not isinstance(a, Term):
        return a
    if factor is None or factor == 0:
        return a
    count, times = round(1 / factor) if abs(factor) <= 1 else 0, round(factor)
    if a.adds and _may_count(count, 1 / factor, a.size, sizes) and (count > 1 or by_division):
        return replace(a, counts=(elements(count),))
    if a.counts and sizes[0] > 1 and _may_count(times, factor, a.size, sizes):
        return replace(a, adds=True)
    return a


def _may_count(number: int, exact: float, size: int, sizes: Sequence[int]) -> bool:
    return number > 0 and abs(exact - number) <= 1e-6 * number and _is_multiple(number, sizes) and size % number == 0


def _is_multiple(number: int, sizes: Sequence[int]) -> bool:
    return any(number % n == 0 for n in sizes if n > 1 or len(sizes) == 1)


def summed(a: Value) -> Value:
    """The sum over all samples."""
    if not isinstance(a, Rows):
        return a
    return Term((a.per,), size=a.size) if a.per is not None else Term(None, True, a.size)


def averaged(node: torch.fx.Node, a: Value, count: int) -> Value:
    """The mean over `count` elements, those of all samples."""
    if not isinstance(a, Rows):
        return a
    if a.per is not None:
        return Unknown(node, "divides by a count, and then by another one")
    return Term((elements(count),), size=a.size)


def elements(count: int) -> Count:
    """A number of elements that the batch's shapes give."""
    return Count(float(count), "elements of the loss", float(count))


def _merged(a: tuple[Count, ...], b: tuple[Count, ...]) -> tuple[Count, ...]:
    keys = {c.key for c in a}
    return a + tuple(c for c in b if c.key not in keys)
