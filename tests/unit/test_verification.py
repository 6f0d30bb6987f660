"""What differences a verification takes for rounding, and what it reads off a model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autopar.verification.differences import TOLERANCE, Measure, buffer_difference, coarsest
from autopar.verification.reference import SeenDtypes

BF16 = Measure(TOLERANCE[torch.bfloat16], torch.bfloat16)
FLOAT64 = Measure(TOLERANCE[torch.float64], torch.float64)


def test_a_parameter_is_measured_by_how_far_it_has_moved() -> None:
    start, moved = torch.full((4,), 0.5).bfloat16(), torch.tensor([0.4, 0.5, 0.5, 0.5]).bfloat16()
    unmoved = BF16.value(start, moved, start, 1, 0.0, 0.0)
    assert unmoved > BF16.tolerance >= BF16.value(torch.nextafter(moved, start), moved, start, 1, 0.0, 0.0)
    assert BF16.value(start, moved, start, 1, 0.0, moves=0.1) <= BF16.tolerance, "rounding moves it as far"


@pytest.mark.parametrize(("off", "passes"), [(1e-9, False), (1e-15, True)])
def test_a_small_gradient_is_compared_with_the_rounding_of_large_ones(off: float, passes: bool) -> None:
    mine, reference = torch.tensor([off], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert (FLOAT64.gradient(mine, reference, 1.0, 0.0) <= FLOAT64.tolerance) is passes


def test_what_is_not_a_number_differs_in_gradients_and_equals_itself_in_buffers() -> None:
    odd = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    assert FLOAT64.gradient(odd, odd, 1.0, 0.0) == math.inf
    assert buffer_difference(FLOAT64, odd, odd.clone(), odd, 1, 0.0) == 0
    assert buffer_difference(FLOAT64, torch.ones(3, dtype=torch.float64), odd, odd, 1, 0.0) == math.inf


def test_counters_must_be_equal_however_large() -> None:
    counted = torch.tensor(10**9)
    assert buffer_difference(BF16, counted + 1, counted, counted, 1, 0.0) == 1
    assert buffer_difference(BF16, torch.tensor(True), torch.tensor(False), torch.tensor(False), 1, 0.0) == 1
    assert buffer_difference(BF16, counted.float(), counted, counted, 1, 0.0) == math.inf


def test_the_dtype_that_counts_is_one_that_a_gradient_flows_through() -> None:
    model, x = nn.Linear(4, 4).double(), torch.randn(2, 4, dtype=torch.float64)
    with SeenDtypes() as dtypes:
        mask = (x.float() > 0).bfloat16()
        loss = (model(x) * mask).sum()
    assert coarsest(dtypes.seen) == torch.float64
    with SeenDtypes() as dtypes:
        loss = model(x).float().logsumexp(1).mean()
    assert loss.dtype == coarsest(dtypes.seen) == torch.float32
