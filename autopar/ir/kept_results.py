"""Functions whose results `functools.lru_cache` keeps: TorchDynamo traces them as if nothing were kept.

That is the same unless they draw random numbers: run as it is, such a function draws once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from autopar.errors import CaptureError


@contextmanager
def seen_kept_results() -> Iterator[set[CodeType]]:
    """Within it, the code of functions that are traced, and whose results are kept, is added to the set."""
    found: set[CodeType] = set()
    original = WrapperUserFunctionVariable.call_function

    def call_function(self: Any, *args: Any, **settings: Any) -> Any:
        code = getattr(getattr(self.wrapper_obj, self.attr_to_trace, None), "__code__", None)
        if code is not None and hasattr(self.wrapper_obj, "cache_info"):
            found.add(code)
        return original(self, *args, **settings)

    WrapperUserFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    try:
        yield found
    finally:
        WrapperUserFunctionVariable.call_function = original  # type: ignore[method-assign]


def refuse_kept_draws(graph: torch.fx.Graph, kept: Iterable[CodeType]) -> None:
    """Raises `CaptureError` where the graph draws random numbers in one of these functions."""
    lines = {f'File "{c.co_filename}", line {{}}, in {c.co_name}'.partition("{}"): c for c in kept}
    if not lines:
        return
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        for line in (node.stack_trace or "").splitlines():
            for (start, _, end), code in lines.items():
                if line.strip().startswith(start) and line.endswith(end):
                    raise CaptureError(
                        f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno}) draws random numbers, and "
                        "functools.lru_cache keeps what it returns, which a captured step would draw anew: hold what "
                        "it returns in a buffer, or draw without lru_cache"
                    )
