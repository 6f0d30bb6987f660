"""Matrix products of compiled compute by oneDNN, on processors on which MKL, which PyTorch calls, is slow.

MKL uses AVX-512 on Intel's processors alone; oneDNN, which PyTorch brings along for convolutions, anywhere.
Measured on an AMD EPYC with AVX-512, float32, one thread: 240 GFLOP/s by oneDNN, 107 by MKL.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten

LEAST_FLOPS = 4e6
"""Of a product that oneDNN computes: each of its calls takes some 10 us longer than one of MKL."""


def is_onednn_faster() -> bool:
    """Whether products are oneDNN's on this machine: it follows from the machine, and from whether the user has PyTorch
    use oneDNN, and not from a measurement, lest ranks that are to compute the same round differently."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch._C._get_mkldnn_enabled()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _vendor() not in ("GenuineIntel", "")
    )


def _vendor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the processor; empty where Linux does not say so."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def products_by_onednn(graph: torch.fx.Graph) -> None:
    """Has oneDNN compute the graph's larger float32 products on a CPU: other rounding, and no other change."""
    for node in [*graph.find_nodes(op="call_function", target=aten.mm.default)]:
        if _is_large(*node.args):
            _replace(node, node.args[0], node.args[1], None)
    for node in [*graph.find_nodes(op="call_function", target=aten.addmm.default)]:
        bias, a, b = node.args
        if _is_large(a, b) and not node.kwargs and _value(bias).shape == (_value(b).shape[1],):
            _replace(node, a, b, bias)


def _replace(node: torch.fx.Node, a: Any, b: Any, bias: Any) -> None:
    """Makes `node` oneDNN's `a @ b + bias`.

    oneDNN takes `a` row by row. Where `a` lies otherwise, as in each gradient of a weight, the graph copies it first:
    inductor's kernel copies in a quarter to a half of the time that PyTorch's own takes, and in less where the same
    kernel forms `a`.
    """
    if not _value(a).is_contiguous():
        with node.graph.inserting_before(node):
            rows = node.graph.call_function(aten.clone.default, (a,), {"memory_format": torch.contiguous_format})
        rows.meta["val"] = _value(a).clone(memory_format=torch.contiguous_format)
        a = rows
    node.target, node.args = product(), (a, b, bias)


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _is_large(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    one, other = _value(a), _value(b)
    if not all(
        isinstance(t, torch.Tensor) and t.dtype == torch.float32 and t.device.type == "cpu" for t in (one, other)
    ):
        return False
    sizes = (*one.shape, other.shape[1])
    return all(isinstance(s, int) for s in sizes) and 2 * sizes[0] * sizes[1] * sizes[2] >= LEAST_FLOPS


@cache
def product() -> Any:
    """The operator `autopar::product(a, b, bias)`, as compilers know it: `a @ b + bias`."""
    library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")
    library.impl("product", _product, "CPU")
    torch.library.register_fake("autopar::product", _like_product, lib=library)
    _kept.append(library)
    return torch.ops.autopar.product.default


_kept: list[Any] = []
"""A library's operators go when it does."""


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # The operator refuses factors whose elements share memory, and reads a bias as if its elements lay side by side.
    b = b if _is_apart(b) else b.contiguous()
    row = None if bias is None else bias.contiguous()
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), row, "none", [], "")
    return found


def _is_apart(matrix: torch.Tensor) -> bool:
    """Whether each of its elements has memory of its own, row by row or column by column."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return down >= columns * right > 0 or right >= rows * down > 0


def _like_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
