"""One start of the C++ compiler for all kernels of a region: inductor starts it for each, and most of a small kernel's
time is what loading PyTorch's headers takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

_INCLUDE = re.compile(r"^\s*#include .*$", re.MULTILINE)
_POINTER = re.compile(r"(const )?\w+\s?\*")
_ATTRIBUTE = "_autopar_kernels"


@contextlib.contextmanager
def one_file() -> Iterator[None]:
    """While it is open, inductor compiles all kernels of a graph that it asks for together as one C++ file."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture

    alone: Callable[..., Any] = AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str, *others: Any, **named: Any) -> Any:
        if others or named or not is_joinable(argtypes, source_code):
            return alone(self, argtypes, source_code, *others, **named)
        kernels = self.__dict__.setdefault(_ATTRIBUTE, Kernels(CppPythonBindingsCodeCache.load_pybinding))
        return LambdaFuture(kernels.add(argtypes, source_code))

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = alone  # type: ignore[method-assign]


def is_joinable(argtypes: Sequence[str], source: str) -> bool:
    """Whether a kernel is of the form that is known here: it takes tensors, and is all that its file defines."""
    text = _INCLUDE.sub("", source).strip()
    return all(_POINTER.fullmatch(a) for a in argtypes) and bool(re.match(r'extern "C"\s+void\s+kernel\(', text))


class Kernels:
    """The kernels of one graph, compiled together when the first of them is wanted."""

    def __init__(self, load: Callable[[list[str], str], Callable[..., None]]) -> None:
        self._load = load
        self._added: list[tuple[Sequence[str], str]] = []
        self._run: Callable[..., None] | None = None

    def add(self, argtypes: Sequence[str], source: str) -> Callable[[], Callable[..., None]]:
        """Takes a kernel. What is returned gives its function, once all were added."""
        if self._run is not None:  # a graph's kernels come before any is wanted
            return lambda: self._load(list(argtypes), source)
        self._added.append((argtypes, source))
        return partial(self._function, len(self._added) - 1)

    def _function(self, place: int) -> Callable[..., None]:
        width = max(len(argtypes) for argtypes, _ in self._added)
        if self._run is None:
            self._run = self._load(["int64_t", *["void*"] * width], joined(self._added))
        missing = [torch.empty(0)] * (width - len(self._added[place][0]))
        run = partial(self._run, place)
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
