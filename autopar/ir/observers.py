"""Statements that only observe, left out of a capture: prints, warnings, log calls, assertions, checks that raise; and
those that ask for gradients of what is no parameter (`hidden_states.requires_grad = True`).

They have no part in what a training step computes, and PyTorch cannot trace those that look at a tensor's value. So
where a capture breaks at one, it is tried again with that statement switched off: the functions that hold it run, for
the time of the capture, as if it stood behind `if False`.
"""

from __future__ import annotations

import ast
import gc
import linecache
import re
import types
import warnings
from collections.abc import Iterator

from autopar.errors import AutoparWarning
from autopar.ir.refusals import Place, is_rank_0

_LOG_CALLS = frozenset(
    ("debug", "info", "warning", "warn", "error", "critical", "exception", "log", "warning_once", "info_once")
)
_OUTPUT_CALLS = frozenset(
    f"sys.{stream}.{call}" for stream in ("stdout", "stderr") for call in ("write", "writelines", "flush")
)
_CHECK_CALLS = "_assert _assert_async _check _check_index _check_is_size _check_not_implemented _check_tensor_all"
_CHECK_CALLS += " _check_tensor_all_with _check_type _check_value _check_with"
_CHECKS = frozenset(f"torch.{name}" for name in _CHECK_CALLS.split())


_BLOCKS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.For,
    ast.While,
    ast.With,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
_SWALLOWS = frozenset(("suppress", "raises", "catch"))
"""Names of what a `with` statement may catch exceptions by."""
_ASKS = re.compile(r"\w+\.requires_grad = True")


class Observers:
    """Switches statements off while it is open, one at a time."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module] = {}
        self._off: set[ast.AST] = set()
        self._before: dict[types.FunctionType, types.CodeType] = {}

    def __enter__(self) -> Observers:
        return self

    def __exit__(self, *_: object) -> None:
        for function, code in self._before.items():
            function.__code__ = code

    @property
    def have_switched(self) -> bool:
        """Whether any statement is switched off."""
        return bool(self._before)

    def switch_off(self, places: list[Place]) -> bool:
        """Switches off the innermost statement that only observes of those that were running; `False` where there is
        none. What is raised and may be caught, by any function that was running, is more than an observation."""
        known = [(p, tree) for p in places if (tree := self._tree(p.file)) is not None]
        caught = any(_may_be_caught(tree, p) for p, tree in known)
        for place, tree in reversed(known):
            found = [n for n in _observing(tree, place) if n not in self._off and not (caught and _may_raise(n))]
            for statement in found:
                _switch_off(tree, statement)
                self._off.update(ast.walk(statement))
            if found and self._swap(ast.fix_missing_locations(tree), place):
                if not all(map(_asks_for_gradient, found)):
                    _say(place)
                return True
        return False

    def _tree(self, file: str) -> ast.Module | None:
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse("".join(linecache.getlines(file)), file)
            except (SyntaxError, ValueError):
                return None
        return self._trees[file]

    def _swap(self, tree: ast.Module, place: Place) -> bool:
        """Gives every living function around the place its code anew; `False` where there is none."""
        future = next((0x1000000 for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"), 0)
        codes = {(c.co_qualname, c.co_firstlineno): c for c in _codes(compile(tree, place.file, "exec", future, True))}
        swapped = False
        for function in _functions(place.file):
            code = function.__code__
            new = codes.get((code.co_qualname, code.co_firstlineno))
            last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
            if new is None or not code.co_firstlineno <= place.line <= max(last, _last_line(code)):
                continue
            if new.co_freevars != code.co_freevars:
                continue
            self._before.setdefault(function, code)
            function.__code__ = new
            swapped = True
        return swapped


def _say(place: Place) -> None:
    if not is_rank_0():
        return
    warnings.warn(
        f"this statement looks at a tensor's value or writes something out, and is no part of the captured training "
        f"step: it does not run there\n  at {place}\n  To see or check the value, return it from forward, or look "
        "after the step.",
        AutoparWarning,
        stacklevel=2,
    )


def _functions(file: str) -> Iterator[types.FunctionType]:
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename == file:
            yield thing


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _last_line(code: types.CodeType) -> int:
    return max((line for c in _codes(code) for _, _, line in c.co_lines() if line), default=code.co_firstlineno)


def _observing(tree: ast.Module, place: Place) -> list[ast.stmt]:
    """The innermost statement at the place, where it only observes; where the column is not known, all such that
    begin on its line or span it."""
    running = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _covers(n, place)]
    if place.column is not None and running:
        running = [min(running, key=_extent)]
    return [n for n in running if _only_observes(n)]


def _span(node: ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a statement begins and ends; an `if` with its condition."""
    end = node.test if isinstance(node, ast.If) else node
    return (node.lineno, node.col_offset), (end.end_lineno or 0, end.end_col_offset or 0)


def _covers(node: ast.stmt, place: Place) -> bool:
    if isinstance(node, _BLOCKS):
        return False
    begin, end = _span(node)
    if place.column is None:
        return begin[0] <= place.line <= end[0]
    return begin <= (place.line, place.column) < end


def _extent(node: ast.stmt) -> tuple[int, int]:
    begin, end = _span(node)
    return end[0] - begin[0], end[1] - begin[1]


def _may_be_caught(tree: ast.Module, place: Place) -> bool:
    """Whether somebody in the file may catch what is raised at the place, and go on otherwise."""
    for node in ast.walk(tree):
        catches = isinstance(node, (ast.Try, ast.TryStar)) and bool(node.handlers)
        if isinstance(node, ast.With):
            catches = not all(
                _SWALLOWS.isdisjoint(ast.unparse(i.context_expr).split("(")[0].split(".")) for i in node.items
            )
        if catches and isinstance(node, ast.stmt) and node.lineno <= place.line <= (node.end_lineno or 0):
            return True
    return False


def _may_raise(node: ast.stmt) -> bool:
    checks = (n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) in _CHECKS)
    return any(isinstance(n, (ast.Raise, ast.Assert)) for n in ast.walk(node)) or any(checks)


def _only_observes(node: ast.stmt) -> bool:
    if any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(node)):
        return False
    if isinstance(node, ast.If):
        return all(isinstance(n, (ast.Raise, ast.Pass)) or _only_observes(n) for n in node.body)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _is_observer(ast.unparse(node.value.func))
    return isinstance(node, ast.Assert) or _asks_for_gradient(node)


def _asks_for_gradient(node: ast.stmt) -> bool:
    """Whether it has autograd compute the gradient of a local value, as models do for the sake of checkpoints: where
    the value is a frozen parameter, whose gradient would then be missing, the proof of the first step says so."""
    return isinstance(node, ast.Assign) and bool(_ASKS.fullmatch(ast.unparse(node)))


def _is_observer(called: str) -> bool:
    owner, _, name = called.rpartition(".")
    if called in ("print", "warnings.warn", "warn", "tqdm.write", *_OUTPUT_CALLS, *_CHECKS):
        return True
    return name in _LOG_CALLS and "log" in owner.rpartition(".")[2].lower()


def _switch_off(tree: ast.Module, node: ast.stmt) -> None:
    """Puts the statement behind `if False`, in its place; so the function's variables stay the same. What follows an
    `if` in its `else` stays."""
    rest = node.orelse if isinstance(node, ast.If) else []
    off = ast.copy_location(ast.If(test=ast.Constant(value=False), body=[node], orelse=rest), node)
    if isinstance(node, ast.If):
        node.orelse = []
    for owner in ast.walk(tree):
        for _, block in ast.iter_fields(owner):
            if isinstance(block, list) and node in block and owner is not off:
                block[block.index(node)] = off
                return
