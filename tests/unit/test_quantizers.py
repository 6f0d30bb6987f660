"""Quantizers: what they lose is what they say, on ordinary and on nasty blocks."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.ops.quantizers import Quantizer
from autopar.ops.step_count import generator_of
from autopar.testing.mean import Mean

CONTRACTIVE = {
    "int8": Quantizer(8, 64),
    "int4": Quantizer(4, 64),
    "int4, rotated": Quantizer(4, 64, rotated=True),
    "ternary": Quantizer(2, 64),
    "signs": Quantizer(1, 64, scale="mean"),
}
UNBIASED = {
    "int8": Quantizer(8, 64, stochastic=True),
    "int4, rotated": Quantizer(4, 64, stochastic=True, rotated=True),
    "qsgd": Quantizer(4, 64, scale="norm", stochastic=True),
    "terngrad": Quantizer(2, 64, stochastic=True),
}


def numbers() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    spike = torch.zeros(64)
    spike[5] = 1e6
    return {
        "random": torch.randn(1000, generator=draw),
        "heavy tails": torch.randn(200, generator=draw) / torch.rand(200, generator=draw).clamp(1e-3),
        "a spike": spike + torch.randn(64, generator=draw),
        "a spike alone": spike,
        "constant": torch.full((130,), -0.3),
        "one": torch.tensor([2.5]),
        "tiny": 1e-30 * torch.randn(70, generator=draw),
        "zeros": torch.zeros(100),
    }


def received(q: Quantizer, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    blocks = q.blocks(len(x))
    padded = torch.nn.functional.pad(x, (0, blocks * q.block - len(x))).view(blocks, q.block)
    message = q.encode(padded, len(x), torch.Generator().manual_seed(seed))
    assert message.dtype == torch.uint8 and len(message) == blocks * q.row_bytes
    return q.decode(message, x.dtype).view(-1)[: len(x)]


@pytest.mark.parametrize("q", CONTRACTIVE.values(), ids=CONTRACTIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_lost_is_less_than_what_there_was(q: Quantizer, dtype: torch.dtype) -> None:
    assert q.is_contractive and not q.is_unbiased
    for name, x in numbers().items():
        wide = x.to(dtype)
        lost = wide - received(q, wide)
        assert float(lost.norm()) <= (1 - 1e-4) * float(wide.norm()), name
    nothing = torch.zeros(0, dtype=dtype)
    assert len(received(q, nothing)) == 0


@pytest.mark.parametrize("q", UNBIASED.values(), ids=UNBIASED)
def test_the_mean_of_what_is_received_is_what_was_sent(q: Quantizer) -> None:
    assert q.is_unbiased and not q.is_contractive
    for name, x in numbers().items():
        if name == "a spike":  # beside it, numbers are rounded up too seldom to be seen
            continue
        wide, mean = x.double(), Mean()
        for seed in range(400):
            mean.add(received(q, wide, seed), wide)
        assert mean.biased() is None, name


def test_a_mean_that_is_off_is_seen() -> None:
    mean = Mean()
    for seed in range(400):
        mean.add(
            received(Quantizer(2, 64, stochastic=True, clip=1.0), numbers()["random"].double(), seed),
            numbers()["random"],
        )
    assert "not the gradient in the mean" in str(mean.biased())


def test_clipping_is_neither() -> None:
    q = Quantizer(2, 64, stochastic=True, clip=2.5)
    assert not q.is_contractive and not q.is_unbiased
    assert float(received(q, numbers()["a spike"]).max()) < 0.5e6


@pytest.mark.parametrize("q", [*CONTRACTIVE.values(), *UNBIASED.values()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives(q: Quantizer, bad: float) -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(1))
    x[70] = bad
    found = received(q, x)
    assert not found[64:128].isfinite().any() and found[:64].isfinite().all() and found[128:].isfinite().all()


def test_bytes_of_a_block() -> None:
    assert [Quantizer(bits, 64).row_bytes for bits in (8, 4, 2, 1)] == [68, 36, 20, 12]


@pytest.mark.parametrize("count", [1, 2, 10, 64])
def test_what_is_cut_off_does_not_depend_on_the_padding(count: int) -> None:
    """One number, or numbers that are alike, are no outliers."""
    q = Quantizer(2, 64, stochastic=True, clip=2.5)
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, :count] = 3.0
    received = q.decode(q.encode(x, count, torch.Generator().manual_seed(0)), torch.float64)
    assert received[0, :count].tolist() == [3.0] * count


def test_groups_ranks_and_steps_draw_other_numbers() -> None:
    """A generator on a CPU takes the lower half of its seed alone."""
    cpu, draws = torch.device("cpu"), set()
    for step in range(3):
        for group in range(3):
            for rank in range(3):
                stream = (group << 32) + (rank << 1)
                draws.add(float(torch.rand(1, generator=generator_of(torch.tensor(step), stream, cpu))))
    assert len(draws) == 27
