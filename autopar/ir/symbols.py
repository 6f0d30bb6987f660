"""Symbols for sizes that vary, as tracing makes them: what it has assumed of them, and sizes to stand for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

Dimensions = tuple[tuple[tuple[int, int], sympy.Expr], ...]
Values = Mapping[sympy.Symbol, sympy.Integer]

_TRIES = 400


class StaticOnlyError(Exception):
    """A graph cannot serve batches of other sizes than the one that it is captured on."""


class NoHintsError(StaticOnlyError):
    """No sizes were found at which nothing is equal by chance."""


@dataclass(frozen=True)
class Described:
    """A tensor with symbols in its sizes."""

    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    device: torch.device


class Symbols:
    """Reads symbols off values that were traced."""

    def __init__(self, shape_env: Any, ties: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
        """`ties`: symbols that are held to be others."""
        self._env = shape_env
        self._ties = ties
        self._settled: dict[sympy.Expr, sympy.Expr] = {}

    @property
    def guards(self) -> list[sympy.Basic]:
        """What was assumed."""
        return [*(g.expr for g in self._env.guards), *(sympy.Eq(a, b) for a, b in self._ties.items())]

    def settled(self, expression: sympy.Expr) -> sympy.Expr:
        """The same in as few symbols as it takes."""
        if expression not in self._settled:
            self._settled[expression] = self._env.replace(expression).xreplace(self._ties)
        return self._settled[expression]

    def of(self, number: Any) -> sympy.Expr:
        is_symbolic = isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))
        return self.settled(number.node._expr if is_symbolic else sympy.sympify(number))

    def described(self, value: torch.Tensor) -> Described:
        if value.layout is not torch.strided:
            raise StaticOnlyError("what was traced holds a sparse tensor")
        return Described(
            tuple(map(self.of, value.shape)), tuple(map(self.of, value.stride())), value.dtype, value.device
        )

    def range_of(self, symbol: sympy.Symbol) -> Iterator[sympy.Basic]:
        """What tracing takes for granted of a symbol: that it is two or more, and what else limits it."""
        bounds = self._env.var_to_range[symbol]
        yield sympy.Ge(symbol, bounds.lower)
        if bounds.upper.is_finite:
            yield sympy.Le(symbol, bounds.upper)

    def now(self, symbol: sympy.Symbol) -> int:
        """The size in the batch that is captured."""
        return _now(self._env, symbol)


def raw_size(size: Any) -> sympy.Expr:
    """A size as it was before anything was found out about it."""
    return size.node._expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _now(shape_env: Any, symbol: sympy.Symbol) -> int:
    values = getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val
    return int(values[symbol])


def ties_of(shape_env: Any, dimensions: Dimensions) -> dict[sympy.Symbol, sympy.Symbol]:
    """Symbols of the same dimension of several tensors that have the same size now, to be taken for one."""
    first: dict[tuple[int, int], sympy.Symbol] = {}
    ties: dict[sympy.Symbol, sympy.Symbol] = {}
    for (_, d), size in dimensions:
        for root in sorted(shape_env.replace(size).free_symbols, key=str):
            other = first.setdefault((d, _now(shape_env, root)), root)
            if other is not root:
                ties[root] = other
    return ties


def generic_sizes(
    symbols: Symbols, known: set[sympy.Symbol], guards: Sequence[sympy.Basic], sizes: Sequence[sympy.Expr]
) -> tuple[Values, Values]:
    """Two sets of sizes that the graph serves, at which different sizes differ from each other and from all numbers."""
    roots = sorted({s for k in known for s in symbols.settled(k).free_symbols}, key=str)
    expressions = _different([e for e in dict.fromkeys(sizes) if e.free_symbols], roots)
    fixed = {int(e) for e in sizes if not e.free_symbols and e.is_integer}
    found: list[Values] = []
    candidates = [_near(symbols.now(root)) for root in roots]
    for chosen in itertools.islice(_together(candidates), _TRIES):
        at = dict(zip(roots, map(sympy.Integer, chosen), strict=True))
        values = {k: symbols.settled(k).xreplace(at) for k in known} | at
        own = [number_of(e.xreplace(values)) for e in expressions]
        if len({*own} - fixed) < len(own) or any(v in f.values() for f in found for v in at.values()):
            continue
        if all(g.xreplace(values) == sympy.true for g in guards):
            found.append(values)
            if len(found) == 2:
                return found[0], found[1]
    raise NoHintsError("what was traced assumes too much of the sizes")


def _different(expressions: Sequence[sympy.Expr], roots: Sequence[sympy.Symbol]) -> list[sympy.Expr]:
    """One of those that are the same but for how they are written, as `floor(a * b / b)` and `a`."""
    far = [{r: sympy.Integer(sympy.nextprime(10**4 * k + 500 * i)) for i, r in enumerate(roots)} for k in (1, 2, 3)]
    return list({tuple(number_of(e.xreplace(at)) for at in far): e for e in expressions}.values())


def _near(size: int) -> list[int]:
    """Sizes near to one, primes first."""
    near = list(range(5, 2 * size + 40))
    near.sort(key=lambda n: (not sympy.isprime(n), abs(n - size)))
    return near


def _together(candidates: Sequence[list[int]]) -> Iterator[tuple[int, ...]]:
    """One of each list, the first ones first."""
    for total in range(sum(map(len, candidates))):
        for places in _summing(total, len(candidates)):
            if all(p < len(c) for p, c in zip(places, candidates, strict=True)):
                yield tuple(c[p] for p, c in zip(places, candidates, strict=True))


def _summing(total: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _summing(total - first, count - 1):
            yield (first, *rest)


def number_of(value: sympy.Basic) -> int | float | bool:
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_integer else float(value)
