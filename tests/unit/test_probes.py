"""What is seen of a gradient's parts adds up to what is seen of all of it."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.fragments import Fragment
from autopar.runtime.proofs.probes import Probe
from autopar.runtime.proofs.rows import Row
from autopar.spec.plan import ParameterSlice

PIECE = ParameterSlice(name="weight")


def _parts(gradient: torch.Tensor, cuts: list[int]) -> list[Fragment]:
    flat = gradient.reshape(-1)
    ends = zip([0, *cuts], [*cuts, len(flat)], strict=True)
    return [Fragment("weight", False, flat[a:b], PIECE, a, 0) for a, b in ends]


def _rows(gradient: torch.Tensor, ranks: int) -> list[Fragment]:
    of_ranks = [slice(r, len(gradient), ranks) for r in range(ranks)]
    return [Fragment("weight", False, gradient[r], PIECE, 0, 0, r) for r in of_ranks]


@pytest.mark.parametrize(
    "shape", [(0,), (1,), (7,), (3, 0), (1, 8), (8, 1), (1, 1, 5), (5, 4), (30, 70), (8, 3, 3, 3), (2, 3, 50, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_parts_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    probe, gradient = Probe(PIECE, shape), torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_complex:
        gradient = gradient * (1 + 2j)
    whole, n = probe.see(gradient), gradient.numel()
    ways = [_parts(gradient, [n // 3, n // 3 + 1, n - n // 4]), _rows(gradient, 3), _rows(gradient, 1)]
    for parts in ways:
        row = Row(len(probe.indices))
        for part in parts:
            row.add(part, *probe.of_fragment(part, part.tensor.clone()))
        assert row.held == n
        for mine, theirs in ((row.elements, whole.elements), (row.projections, whole.projections)):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), theirs, rtol=1e-5, atol=1e-5)
        assert row.square == pytest.approx(float(whole.norm) ** 2, rel=1e-5)


def test_the_layout_in_memory_does_not_matter() -> None:
    probe, gradient = Probe(PIECE, (30, 70)), torch.randn(70, 30, dtype=torch.float64).T
    torch.testing.assert_close(probe.see(gradient).flat, probe.see(gradient.contiguous()).flat)


@pytest.mark.parametrize("at", [(0, 0), (17, 33), (63, 575)])
def test_one_wrong_element_is_seen(at: tuple[int, int]) -> None:
    probe, gradient = Probe(PIECE, (64, 576)), torch.randn(64, 576, dtype=torch.float64)
    before = probe.see(gradient).projections
    gradient[at] += 1.0
    assert bool((probe.see(gradient).projections - before).abs().min() > 1e-6)
