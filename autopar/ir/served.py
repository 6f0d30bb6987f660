"""Which batches a graph serves that was captured for many sizes, and the numbers that it computes from their shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from autopar.ir.symbols import Dimensions, Values, number_of

Shapes = tuple[tuple[int, ...], ...]
"""Of a batch's tensors."""
Varying = frozenset[tuple[int, int]]
"""Dimensions of a batch's tensors that vary: (tensor, dimension)."""
_KEPT = 1024
"""Shapes of batches of which the sizes are remembered."""


@dataclass(eq=False)
class Sizes:
    """What a graph has assumed of its batch's shapes, and which numbers it computes from them."""

    dimensions: Dimensions
    """Of each dimension of each of the batch's tensors: a symbol, or a number."""
    guards: tuple[sympy.Basic, ...]
    """What must hold of the symbols."""
    hints: tuple[Values, Values]
    """Two sets of sizes at which nothing is equal by chance; the graph's nodes have the first."""
    expressions: list[sympy.Expr] = field(default_factory=list)
    """Of the inputs of kind `size`, by their index."""
    proved: set[Shapes] = field(default_factory=set)
    """Shapes of batches on which the graph was compared with the model run eagerly."""
    _known: dict[Shapes, tuple[int | float | bool, ...]] = field(default_factory=dict)

    def hold(self, shapes: Shapes) -> bool:
        """Whether the graph serves such a batch."""
        if shapes in self._known:
            return True
        values = self._values(shapes)
        if values is None or not all(guard.xreplace(values) == sympy.true for guard in self.guards):
            return False
        self._remember(shapes, values)
        return True

    def of(self, shapes: Shapes) -> tuple[int | float | bool, ...]:
        """The values of the inputs of kind `size`."""
        if shapes not in self._known:
            values = self._values(shapes)
            assert values is not None, "the graph was captured for batches of other sizes"
            self._remember(shapes, values)
        return self._known[shapes]

    def evaluate(self, expression: sympy.Expr, shapes: Shapes) -> int | float | bool:
        """The value of an expression in the symbols, for a batch."""
        values = self._values(shapes)
        assert values is not None, "the graph was captured for batches of other sizes"
        return number_of(expression.xreplace(values))

    def samples(self, hint: Values) -> int | None:
        """Samples in a batch of one of the hints: dimension 0 of its first tensor that has one."""
        return next((int(number_of(e.xreplace(hint))) for (_, d), e in self.dimensions if d == 0), None)

    def _remember(self, shapes: Shapes, values: Values) -> None:
        if len(self._known) >= _KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[shapes] = tuple(number_of(e.xreplace(values)) for e in self.expressions)

    def _values(self, shapes: Shapes) -> dict[sympy.Symbol, sympy.Integer] | None:
        values: dict[sympy.Symbol, sympy.Integer] = {}
        for (tensor, dimension), size in self.dimensions:
            own = sympy.Integer(shapes[tensor][dimension])
            if (values.setdefault(size, own) if isinstance(size, sympy.Symbol) else size) != own:
                return None
        return values
