"""Whether a number is other than the eager one because PyTorch's own tracing makes it so, and at which line.

Tracing writes a model's operators anew so that none writes to memory (functionalization), and has faults of its own: a
value written through an expanded view is lost, for one. `torch.compile(backend="aot_eager")` runs that trace and
nothing else, so it tells such faults from those of autopar.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.distributions import Distribution

from autopar.runtime.proofs.blame import alike, line_of
from autopar.runtime.proofs.one_pass import How, Ran, as_it_is, differences


def tracing_fault(eagerly: Callable[[How], Ran], by_graph: Callable[[], Ran], tolerance: float) -> str | None:
    """The line at which PyTorch's own tracing of the model goes wrong, empty where it is not found; `None` unless the
    captured graph computes what PyTorch's plain trace computes, and that is not what the model computes eagerly.

    `eagerly`: runs the model, is given what calls the user's function, and leaves no trace. `by_graph`: runs the
    captured graph, on the same values."""
    checks = Distribution._validate_args  # which PyTorch's compiler switches off for good when it is first asked
    try:
        return _fault(eagerly, by_graph, tolerance)
    finally:
        Distribution.set_default_validate_args(bool(checks))


def _fault(eagerly: Callable[[How], Ran], by_graph: Callable[[], Ran], tolerance: float) -> str | None:
    expected = eagerly(as_it_is)
    try:
        traced = eagerly(_by_tracing)
    except Exception:  # not every model that autopar captures is compiled as it is
        return None
    if not differences(traced, expected, tolerance) or differences(by_graph(), traced, tolerance):
        return None
    lines = _Lines()
    try:
        eagerly(lines)
    except Exception:  # an operator that cannot be functionalized outside of the compiler
        return ""
    return lines.first


def _by_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as PyTorch traces it, with its operators run one by one."""
    return _quietly(torch.compile(function, backend="aot_eager", dynamic=False))


class _Lines:
    """Runs a function as it is, and looks for the first operator after which some value is another one where writes to
    memory are rewritten; a `How`."""

    def __init__(self) -> None:
        self.first = ""
        """Its line; empty where no value differs, as where only the backward pass does."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _quietly(torch.compile(function, backend=self._compiler, dynamic=False))

    def _compiler(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            if not self.first:
                with torch.no_grad():
                    self.first = _first_other(module, values)
            return module(*values)

        return run


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has not asked for PyTorch's compiler
            return function(*arguments, **named)

    return run


def _first_other(module: torch.fx.GraphModule, values: Sequence[Any]) -> str:
    """The line of the first operator with which the graph up to there gives other values once it is functionalized."""
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]

    def differs(count: int) -> bool:
        prefix = _Prefix(module, set(nodes[:count]))
        own = [[v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values] for _ in range(2)]
        plain, rewritten = prefix.values(*own[0]), torch.func.functionalize(prefix.values)(*own[1])
        return not all(alike(a, b) for a, b in zip(rewritten, plain, strict=True))

    if not differs(len(nodes)):
        return ""
    low, high = 0, len(nodes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return line_of(nodes[high - 1])


class _Prefix(torch.fx.Interpreter):
    """Runs the first operators of a graph."""

    def __init__(self, module: torch.fx.GraphModule, nodes: set[torch.fx.Node]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._nodes = nodes

    def values(self, *arguments: Any) -> list[torch.Tensor]:
        """Copies of all tensors that there are after the last one has run, inputs included."""
        self.run(*arguments)
        return [v.clone() for v in self.env.values() if isinstance(v, torch.Tensor)]

    def run_node(self, n: torch.fx.Node) -> Any:
        return super().run_node(n) if n.op == "placeholder" or n in self._nodes else None
