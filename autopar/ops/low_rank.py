"""Gradients as products of two thin factors, of which one is summed over ranks (`autopar.ops.power_iteration`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.dtypes import DTYPE_BYTES, wide_dtype
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.gradients import MEMBER_START
from autopar.ops.group import Group
from autopar.ops.layouts import unsummed
from autopar.ops.power_iteration import Matrices, PowerIteration, matrices
from autopar.ops.values import Bytes, Setting, Value, Work

ORTHONORMAL_KERNELS = 8
"""Kernels that orthonormalise all factors of one length."""


@dataclass(frozen=True, slots=True)
class _LowRank(Operation):
    """What both ends share."""

    rank: int
    """Columns of a factor."""
    min_compression: float
    """Members whose factors are not so many times smaller are sent whole."""

    def of(self, group: Group) -> Matrices:
        return matrices(tuple(m.shape for m in group.members), self.rank, self.min_compression)

    def module(self, site: Site, group: Group) -> Any:
        """What both ends of the group share where they run."""

        def make() -> PowerIteration:
            return PowerIteration(self.of(group), getattr(torch, wide_dtype(group.dtype)), site.device)

        return site.module_of(f"low_rank_{group.index}", make)

    def product_flops(self, group: Group) -> float:
        """Of one product of each matrix with a factor."""
        return 2.0 * self.rank * self.of(group).approximated_elements


@dataclass(frozen=True, slots=True)
class EncodeFactors(_LowRank):
    """This rank's factors and what is sent whole, from its gradients, and from the states `residual`, `factors` and
    `turns`, in this order; the residual is overwritten with what is lost, the factors with orthonormal ones. The
    reconstruction is a projection, so that it is contractive: the residual is never larger than its input."""

    name = "encode_factors"

    def value(self, at: Emission) -> Value:
        of = self.of(at.group)
        return Value(of.factor_elements + of.whole_elements, wide_dtype(at.group.dtype), unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        """The residual is read and written as the gradient is added, read by a product, and read and written by the one
        that is taken off. Orthonormalising goes over a factor twice for each of its columns, there and back."""
        group, of = call.owner_group, self.of(call.owner_group)
        gradient, residual, factors, _ = call.inputs
        lengths = len({f.length for f in of.factors[0]}) + len({f.length for f in of.factors[1]})
        return Work(
            flops=2 * self.product_flops(group),
            moved_bytes=gradient.bytes + 5 * residual.bytes + (4 * self.rank + 6) * factors.bytes + call.bytes,
            kernels=1 + 2 * len(of.approximated) + MEMBER_START * 2 * len(of.whole) + ORTHONORMAL_KERNELS * lengths / 2,
        )

    def keeps(self, call: Call, setting: Setting) -> Bytes:
        """The matrix that factors begin with."""
        of = self.of(call.owner_group)
        longest = max(f.length for factors in of.factors for f in factors)
        return longest * self.rank * DTYPE_BYTES[call.dtype]

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """A few copies of the factors of one length; and the gradient's, where it is of another dtype."""
        gradient, residual, factors, _ = call.inputs
        return 4 * factors.bytes + (residual.bytes if gradient.dtype != residual.dtype else 0)

    def write(self, site: Site, call: Call) -> Any:
        module = self.module(site, call.owner_group)
        return site.call_method("encode", (module, *map(site.value_of, call.inputs)))


@dataclass(frozen=True, slots=True)
class DecodeFactors(_LowRank):
    """The products of the given factors with the summed ones, and what was sent whole. Inputs: the sum, and the states
    `factors` and `turns`: the summed factors are given next time."""

    name = "decode_factors"

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        group, of = call.owner_group, self.of(call.owner_group)
        summed, factors, _ = call.inputs
        narrow = call.dtype != summed.dtype
        return Work(
            flops=self.product_flops(group),
            moved_bytes=(2 * call.elements * DTYPE_BYTES[summed.dtype] if narrow else 0)
            + call.bytes
            + 2 * summed.bytes
            + 2 * factors.bytes,
            kernels=2 + (2 if narrow else 1) * len(of.approximated) + MEMBER_START * len(of.whole),
        )

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """A product, where it is of another dtype than its sum."""
        summed = call.inputs[0]
        if call.dtype == summed.dtype:
            return 0
        return max(m.stop - m.start for m in self.of(call.owner_group).approximated) * DTYPE_BYTES[summed.dtype]

    def write(self, site: Site, call: Call) -> Any:
        module = self.module(site, call.owner_group)
        return site.call_method("decode", (module, *map(site.value_of, call.inputs), call.torch_dtype))
