"""Quantizers: numbers in few bits, in blocks of which each has a scale of its own.

A block is sent as its codes, packed into bytes, and its scale, a float32. Sources: QSGD (Alistarh et al., NeurIPS
2017), TernGrad (Wen et al., NeurIPS 2017), EF-signSGD (Karimireddy et al., ICML 2019); blocks as in Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization" (ICLR 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

SCALE_BYTES = 4
_SEED = 0x5E1F
"""Of the signs that a rotation begins with, the same on all ranks and in all steps."""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How a block of numbers is sent."""

    bits: Literal[1, 2, 4, 8]
    """Of each number. 1: signs; more: whole numbers from -(2^(bits-1) - 1) to 2^(bits-1) - 1, times the scale."""
    block: int = 256
    """Numbers that share a scale; a multiple of 8, and a power of 4 where they are rotated."""
    scale: Literal["largest", "mean", "norm"] = "largest"
    """What the largest code stands for: the largest magnitude of the block, the mean magnitude, or the Euclidean
    norm."""
    stochastic: bool = False
    """Whether a number is rounded up as often as it is near the upper one, so that the mean is right; or to the
    nearest."""
    rotated: bool = False
    """Whether a block is multiplied with a random rotation first, which spreads an outlier over all of it: signs, and
    the Walsh-Hadamard matrix."""
    clip: float = 0.0
    """Magnitudes are cut off at so many root mean squares of the block; 0 for not at all. (TernGrad has standard
    deviations, which is the same of gradients whose mean is near zero, and cuts numbers that are alike to nothing.)"""

    @property
    def is_contractive(self) -> bool:
        """Whether what is lost is always less than the block itself, as error feedback needs: a number that is rounded
        to the nearest never moves by more than its own magnitude."""
        return not self.stochastic and self.scale != "norm" and not self.clip

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of what is received is what was sent."""
        return self.stochastic and not self.clip

    @property
    def levels(self) -> int:
        """The largest code."""
        return max(1, (1 << (self.bits - 1)) - 1)

    @property
    def row_bytes(self) -> int:
        """Of a block, as it is sent."""
        return self.block * self.bits // 8 + SCALE_BYTES

    def blocks(self, elements: int) -> int:
        """How many blocks so many numbers are; the last one is filled up with zeros."""
        return -(-elements // self.block)

    def encode(
        self,
        x: torch.Tensor,
        elements: int,
        generator: torch.Generator | None = None,
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """uint8 [blocks * row_bytes], from x [blocks, block] in 32 bits or more, of which the first `elements` count.
        What is not finite comes back as a block of which nothing is finite. `generator`: for stochastic rounding.
        `counted`, [blocks]: how many numbers of each block a mean is of, where others are zeros that do not count."""
        if counted is None:
            counted = elements - torch.arange(0, x.numel(), self.block, device=x.device)
        counted = counted.clamp(1, self.block)
        if self.rotated:
            x = _rotated(x)
        if self.clip:
            most = self.clip * (x.square().sum(1) / counted).sqrt()[:, None]
            x = torch.clamp(x, -most, most)
        scale = self._scales(x, counted)
        if self.bits == 1:
            codes = (x >= 0).to(torch.uint8)
        else:
            factor = torch.where(scale > 0, self.levels / scale, 0).to(x.dtype)
            scaled = x * factor[:, None]
            if self.stochastic:
                scaled += torch.rand(x.shape, dtype=torch.float32, device=x.device, generator=generator)
                scaled.floor_()
            else:
                scaled.round_()
            codes = scaled.clamp_(-self.levels, self.levels).add_(self.levels).to(torch.uint8)
        return torch.cat([_packed(codes, self.bits), scale[:, None].view(torch.uint8)], 1).view(-1)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[blocks, block], from the blocks that `encode` has sent."""
        rows = message.view(-1, self.row_bytes)
        scale = rows[:, -SCALE_BYTES:].reshape(-1).clone().view(torch.float32)[:, None].to(dtype)
        codes = _unpacked(rows[:, :-SCALE_BYTES], self.bits).to(dtype)
        if self.bits == 1:
            codes.mul_(2).sub_(1).mul_(scale)
        else:
            codes.sub_(self.levels).mul_(scale / self.levels)
        return _rotated(codes, back=True) if self.rotated else codes

    def _scales(self, x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """float32 [blocks]"""
        if self.scale == "largest":
            return x.abs().amax(1).float()
        if self.scale == "norm":
            norms: torch.Tensor = torch.linalg.vector_norm(x, dim=1)
            return norms.float()
        mean: torch.Tensor = x.abs().sum(1) / counted
        return mean.float()

    def passing_bytes(self, blocks: int, width: int) -> int:
        """What `encode` and `decode` take on their way, of numbers `width` bytes wide; at most."""
        numbers = blocks * self.block
        wide = 3 if self.rotated or self.clip else 2
        return numbers * (wide * width + (4 if self.stochastic else 0) + 2) + blocks * 4 * width

    def moved_bytes(self, blocks: int, width: int) -> float:
        """Read and written by `encode`, or by `decode`."""
        passes = 6 + 2 * self.stochastic + 4 * self.rotated + 4 * bool(self.clip)
        return blocks * self.block * (passes * width + 4)

    def flops(self, blocks: int) -> float:
        """Of products, by `encode` or by `decode`."""
        return blocks * self.block * 4 * math.isqrt(self.block) if self.rotated else 0.0


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [blocks, bytes], from codes, uint8 [blocks, block]."""
    each = 8 // bits
    if each == 1:
        return codes
    codes = codes.view(len(codes), codes.shape[1] // each, each)
    found = codes[:, :, 0].clone()
    for i in range(1, each):
        found |= codes[:, :, i] << (i * bits)
    return found


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [blocks, block]"""
    each = 8 // bits
    if each == 1:
        return packed
    parts = [(packed >> (i * bits)) & ((1 << bits) - 1) for i in range(each)]
    return torch.stack(parts, 2).flatten(1)


def _rotated(x: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Each block [block] times an orthonormal matrix, H (x) H after random signs; `back`: times its transpose."""
    side = math.isqrt(x.shape[1])
    h, signs = (t.to(x.device, x.dtype) for t in _rotation(side))
    if not back:
        x = x * signs
    found = (h @ x.view(-1, side, side) @ h).view(x.shape)
    return found.mul_(signs) if back else found


@lru_cache(maxsize=4)
def _rotation(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The orthonormal Walsh-Hadamard matrix of so many rows, which is symmetric, and signs for side * side numbers."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < side:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    drawn = torch.randint(0, 2, (side * side,), generator=torch.Generator().manual_seed(_SEED))
    return h / math.sqrt(side), drawn.double() * 2 - 1
