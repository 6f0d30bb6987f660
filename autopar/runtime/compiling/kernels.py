"""One start of the C++ compiler for all kernels of a step: inductor starts it for each, and most of a small kernel's
time is what loading PyTorch's headers takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autopar.runtime.compiling.inductor import compile_errors

_INCLUDE = re.compile(r"^\s*#include .*$", re.MULTILINE)
_POINTER = re.compile(r"(const )?\w+\s?\*")


@contextlib.contextmanager
def one_file() -> Iterator[None]:
    """While it is open, inductor's graphs are made without their kernels; when it closes, all of them are compiled as
    one C++ file. Raises `CompileError` where that fails; then none of these graphs can be run."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    alone: Callable[..., Any] = AsyncCompile.cpp_pybinding
    wait = AsyncCompile.wait
    kernels = Kernels(CppPythonBindingsCodeCache.load_pybinding)
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str, *others: Any, **named: Any) -> Any:
        if others or named or not is_joinable(argtypes, source_code):
            return alone(self, argtypes, source_code, *others, **named)
        return kernels.add(argtypes, source_code)

    def wait_later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waiting.append((self, scope))

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    AsyncCompile.wait = wait_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = alone  # type: ignore[method-assign]
        AsyncCompile.wait = wait  # type: ignore[method-assign]
    with compile_errors():
        for compiler, scope in waiting:
            scope |= {name: kernels.function(k) for name, k in scope.items() if isinstance(k, Kernel)}
            wait(compiler, scope)


def is_joinable(argtypes: Sequence[str], source: str) -> bool:
    """Whether a kernel is of the form that is known here: it takes tensors, and is all that its file defines."""
    text = _INCLUDE.sub("", source).strip()
    return all(_POINTER.fullmatch(a) for a in argtypes) and bool(re.match(r'extern "C"\s+void\s+kernel\(', text))


@dataclass(frozen=True)
class Kernel:
    """Stands for a kernel in the code that inductor has generated, until its function takes this object's place."""

    place: int
    """Among the kernels of the file."""
    width: int
    """How many tensors it takes."""


class Kernels:
    """Kernels that are compiled together when the first function of theirs is asked for, once all are added."""

    def __init__(self, load: Callable[[list[str], str], Callable[..., None]]) -> None:
        self._load = load
        self._added: dict[tuple[tuple[str, ...], str], Kernel] = {}
        self._run: Callable[..., None] | None = None

    def add(self, argtypes: Sequence[str], source: str) -> Kernel:
        """Adds a kernel to the file; returns the same object for equal kernels."""
        return self._added.setdefault((tuple(argtypes), source), Kernel(len(self._added), len(argtypes)))

    def function(self, kernel: Kernel) -> Callable[..., None]:
        """The function that runs the kernel; compiles the file when this is called first."""
        width = max(k.width for k in self._added.values())
        if self._run is None:
            self._run = self._load(["int64_t", *["void*"] * width], joined([*self._added]))
        run = partial(self._run, kernel.place)
        missing = [torch.empty(0)] * (width - kernel.width)
        return (lambda *given: run(*given, *missing)) if missing else run


def joined(kernels: Sequence[tuple[Sequence[str], str]]) -> str:
    """A C++ file with several kernels and the function `kernel`, which takes the place of one among them and its
    arguments, and after these any others."""
    width = max(len(argtypes) for argtypes, _ in kernels)
    includes: dict[str, None] = {}
    parts, cases = [], []
    for place, (argtypes, source) in enumerate(kernels):
        includes |= dict.fromkeys(line.strip() for line in _INCLUDE.findall(source))
        parts.append(f"#define kernel kernel_{place}\n{_INCLUDE.sub('', source).strip()}\n#undef kernel\n")
        given = ", ".join(f"static_cast<{t}>(p{i})" for i, t in enumerate(argtypes))
        cases.append(f"        case {place}: kernel_{place}({given}); break;")
    taken = ", ".join(["int64_t which", *(f"void* p{i}" for i in range(width))])
    choice = f'extern "C" void kernel({taken})\n{{\n    switch (which) {{\n' + "\n".join(cases) + "\n    }\n}\n"
    return "\n".join(["", *includes, *parts, choice])
