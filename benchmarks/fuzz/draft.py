"""A model while it is written: each statement is tried on real values before it is kept.

Two copies run side by side on 7 and on 5 samples, the second on the last five of the first's: their shapes tell which
dimensions follow the batch, and their values whether a sample's result depends on that sample alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz import prelude

SAMPLES = (7, 5)
_CONFIRMED = 5, 5, 3, 2, 1
"""Further inputs on which samples must not be mixed: the last so many of as many samples as there are at first."""
_MOST_ELEMENTS = 4000
_TAME, _WILD = 3.0, 1e4
_ASSIGNED = re.compile(r"^(h\d+) = ")
_NAMES = re.compile(r"(?<![\w.])(?:h\d+|x)\b")
_IN_PLACE = re.compile(r"_\(|\] = |\+= |\*= |self\.b\d+ = ")

Tree = dict[str, torch.Tensor]
Shape = tuple[int | None, ...]
"""`None` for a dimension that follows the batch."""


class Rejected(Exception):
    """What was drawn cannot be used; another draw may."""


class Unrepeatable(Rejected):
    """What was kept fails when all of it runs again: what was looked at between statements has decided whether autograd
    allows them. There is no model to be made of it."""


@dataclass(frozen=True)
class Variable:
    """A value of the model."""

    name: str
    shape: Shape
    floating: bool = True


class Draft:
    """Statements so far, the values they lead to, and the draws for further ones."""

    def __init__(self, rng: random.Random, rowwise: bool, dtype: str) -> None:
        self.rng = rng
        self.rowwise = rowwise
        """Whether each sample's result must depend on that sample alone."""
        self.narrow = dtype != "float64"
        """Whether values will be rounded, so that nothing may jump."""
        self.init: list[str] = []
        self.inputs: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.variables: dict[str, Variable] = {}
        self.parameters: dict[str, tuple[int, ...]] = {}
        self.buffers: dict[str, tuple[int, ...]] = {}
        self.shared_storage = False
        self._pending: list[str] = []
        self._number = 0
        self._spaces: list[dict[str, Any]] = []
        self.replay()

    # Draws

    def constant(self) -> float:
        return self.rng.choice((-1.5, -0.7, -0.3, 0.25, 0.5, 0.9, 1.3, 2.0))

    def new(self, prefix: str = "h") -> str:
        self._number += 1
        return f"{prefix}{self._number}"

    def pick(self, wanted: Callable[[Variable], bool] = lambda v: True) -> Variable:
        """A floating-point variable, rather a late one."""
        able = [v for v in self.variables.values() if v.floating and wanted(v)]
        if not able:
            raise Rejected("no variable fits")
        unread = self.unread()
        fresh = [v for v in able if v.name in unread]
        if fresh and self.rng.random() < 0.6:
            return self.rng.choice(fresh)
        return able[-1 - min(int(self.rng.expovariate(0.5)), len(able) - 1)]

    def unread(self) -> list[str]:
        """Floating-point variables that no later statement reads."""
        read = {n for line in self.lines for n in _NAMES.findall(line.partition(" = ")[2] or line)}
        return [n for n, v in self.variables.items() if v.floating and n not in read]

    def integer(self) -> Variable:
        able = [v for v in self.variables.values() if not v.floating]
        if not able:
            raise Rejected("no integers")
        return self.rng.choice(able)

    def parameter(self, shape: Sequence[int | None], scale: float = 0.6, reuse: float = 0.25) -> str:
        """An expression of a parameter of a shape: a new one, or one that is used elsewhere."""
        if any(s is None for s in shape):
            raise Rejected("a parameter cannot follow the batch")
        wanted = tuple(int(s or 0) for s in shape)
        same = [n for n, s in self.parameters.items() if s == wanted]
        if same and self.rng.random() < reuse:
            return f"self.{self.rng.choice(same)}"
        turned = [n for n, s in self.parameters.items() if s == wanted[::-1] and len(s) == 2]
        if turned and self.rng.random() < reuse:
            return f"self.{self.rng.choice(turned)}.T"
        if same and self.rng.random() < 0.04:  # whose gradients are one
            return f"({self.parameter(shape, scale, reuse=0.0)} + self.{self.rng.choice(same)})"
        name, draw = self.new("p"), self.rng.random()
        layout = ""
        if draw < 0.08 and len(wanted) > 1:
            layout = ', layout="transposed"'
        elif draw < 0.12:
            layout = ', layout="strided"'
        elif draw < 0.5 and len(wanted) == 4:
            layout = ', layout="channels_last"'
        frozen = ", trainable=False" if self.rng.random() < 0.06 else ""
        seed = self.rng.randrange(10_000)
        self._add(f"self.{name} = parameter({wanted}, {seed}, {scale}{layout}{frozen})")
        if same and self.rng.random() < 0.05 and not frozen and wanted:
            self._add(f"self.{name}.data = self.{self.rng.choice(same)}.data")
            self.shared_storage = True
        self.parameters[name] = wanted
        return f"self.{name}"

    def buffer(self, shape: Sequence[int | None], kind: str = "values") -> str:
        """The name of a new buffer."""
        if any(s is None for s in shape):
            raise Rejected("a buffer cannot follow the batch")
        name, wanted = self.new("b"), tuple(int(s or 0) for s in shape)
        value = f"values({wanted}, {self.rng.randrange(10_000)}, 0.5)" if kind == "values" else "torch.tensor(0)"
        self._add(f'self.register_buffer("{name}", {value})')
        self.buffers[name] = wanted
        return f"self.{name}"

    def _add(self, line: str) -> None:
        self._pending.append(line)
        for space in self._spaces:
            exec(line, space)

    # Trials

    def input(self, name: str, expression: str) -> None:
        self.inputs.append((name, expression))
        self.replay()
        value = self._spaces[0][name]
        self.variables[name] = Variable(name, (None, *value.shape[1:]), value.is_floating_point())

    def replay(self, seed: int = 0, last: int = SAMPLES[1]) -> None:
        """Begins anew with what was kept, on the inputs of a seed, and on the `last` of their samples. Raises
        `Unrepeatable`."""
        self._spaces = []
        whole: Tree = {}
        for samples in (SAMPLES[0], last):
            model: Any = nn.Module()
            model.c0 = 0.75
            space: dict[str, Any] = {**vars(prelude), "torch": torch, "F": F, "self": model}
            for name, expression in self.inputs:
                drawn = eval(expression, {**vars(prelude), "torch": torch, "n": samples, "seed": seed})
                space[name] = whole[name][-samples:].clone() if name in whole else drawn
            whole = whole or {n: space[n].clone() for n, _ in self.inputs}
            for line in [*self.init, *self.lines]:
                try:
                    exec(line, space)
                except (RuntimeError, IndexError, ValueError) as e:
                    raise Unrepeatable(f"{line}: {e}") from e
            self._spaces.append(space)

    def shape(self, expression: str) -> Shape:
        """The shape of an expression's value; raises `Rejected` where it has none."""
        first, second = (self._evaluated(expression, s) for s in self._spaces)
        return self._shape(first, second)

    def value(self, name: str) -> torch.Tensor:
        """What a variable is on the first batch."""
        found: torch.Tensor = self._spaces[0][name]
        return found

    def _evaluated(self, expression: str, space: dict[str, Any]) -> torch.Tensor:
        try:
            found = eval(expression, space)
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as e:
            raise Rejected(str(e)) from e
        if not isinstance(found, torch.Tensor):
            raise Rejected("no tensor")
        return found

    def _shape(self, first: torch.Tensor, second: torch.Tensor) -> Shape:
        if first.dim() != second.dim():
            raise Rejected("another number of dimensions for another batch")
        return tuple(a if a == b else None for a, b in zip(first.shape, second.shape, strict=True))

    def keep(self, statements: Sequence[str]) -> None:
        """Runs statements and keeps them, with the parameters that were drawn for them; raises `Rejected` where they
        fail, grow wild, or mix samples that must not be mixed."""
        before = len(self.init), len(self.lines), dict(self.variables)
        self.init += self._pending
        self._pending = []
        try:
            for statement in statements:
                self._run(statement)
        except Rejected:
            del self.init[before[0] :], self.lines[before[1] :]
            self.variables = before[2]
            self.parameters = {n: s for n, s in self.parameters.items() if any(f"self.{n} =" in x for x in self.init)}
            self.buffers = {n: s for n, s in self.buffers.items() if any(f'"{n}"' in x for x in self.init)}
            self.replay()
            raise

    def confirm(self) -> None:
        """Raises `Rejected` where samples that must not be mixed are mixed on other inputs, or on fewer, than those
        that statements were tried on: a maximum, or as many columns, may hide there what reads one sample for all."""
        for seed, last in enumerate(_CONFIRMED) if self.rowwise else ():
            self.replay(1000 * (seed + 1), last)
            for name in [n for n, v in self.variables.items() if v.floating]:
                first, second = (s[name] for s in self._spaces)
                if not _rowwise(first, second, self._shape(first, second), last):
                    raise Rejected("mixes samples of other inputs")
        self.replay()

    def drop_pending(self) -> None:
        """Forgets parameters that were drawn for what was rejected."""
        for line in self._pending:
            for name in re.findall(r"self\.(\w+) = |register_buffer\(\"(\w+)\"", line):
                self.parameters.pop(name[0], None)
                self.buffers.pop(name[1], None)
        self._pending = []

    def _run(self, statement: str) -> None:
        for space in self._spaces:
            try:
                exec(statement, space)
            except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, AttributeError) as e:
                raise Rejected(str(e)) from e
        self.lines.append(statement)
        made = _ASSIGNED.match(statement)
        if made:
            self._check(made[1])
        if _IN_PLACE.search(statement):
            for name in [n for n, v in self.variables.items() if v.floating]:
                self._check(name, rescale=False)
            self._differentiable()

    def _check(self, name: str, rescale: bool = True) -> None:
        first, second = (s[name] for s in self._spaces)
        if not isinstance(first, torch.Tensor) or first.numel() > _MOST_ELEMENTS:
            raise Rejected("no tensor, or too large a one")
        shape = self._shape(first, second)
        if first.is_floating_point():
            most = float(first.detach().abs().max()) if first.numel() else 0.0
            if not most < _WILD:
                raise Rejected("too large values")
            if self.rowwise and not _rowwise(first, second, shape):
                raise Rejected("mixes samples")
            if most > _TAME and rescale:
                self.variables[name] = Variable(name, shape)
                self._run(f"{name} = torch.tanh({name}) * 1.5")
                return
        self.variables[name] = Variable(name, shape, first.is_floating_point())

    def _differentiable(self) -> None:
        """Raises `Rejected` where an in-place operation has overwritten what the backward pass needs."""
        space = self._spaces[0]
        try:  # some views may not be looked at any more, either
            roots = [space[n].sum() for n, v in self.variables.items() if v.floating and space[n].requires_grad]
            if roots:
                torch.stack(roots).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        except RuntimeError as e:
            raise Rejected(str(e)) from e


def _rowwise(first: torch.Tensor, second: torch.Tensor, shape: Shape, last: int = SAMPLES[1]) -> bool:
    """Whether each of the `last` samples, which `second` has alone, is as in `first`."""
    follows = [i for i, s in enumerate(shape) if s is None]
    sizes = SAMPLES[0], last
    if len(follows) > 1 or any((first.shape[i], second.shape[i]) != sizes for i in follows):  # samples left out, too
        return False
    try:
        for i in follows:
            first = first.narrow(i, SAMPLES[0] - last, last)
        return torch.allclose(first, second, rtol=1e-10, atol=1e-12)
    except RuntimeError as e:  # one of several views, of which one was written to, may not be looked at any more
        raise Rejected(str(e)) from e
