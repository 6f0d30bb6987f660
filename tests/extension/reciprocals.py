"""A pass of our own, in one file: divisions by powers of two become products, which are as exact and cheaper."""

from __future__ import annotations

import math

import torch

from autopar import Pass
from autopar.ir.capture import JointGraph
from autopar.ir.passes import Capture

aten = torch.ops.aten


def multiply(joint: JointGraph, capture: Capture) -> JointGraph:
    for target, instead in ((aten.div.Tensor, aten.mul.Tensor), (aten.div.Scalar, aten.mul.Scalar)):
        for node in joint.module.graph.find_nodes(op="call_function", target=target):
            divisor = node.args[1]
            if isinstance(divisor, int | float) and divisor and math.frexp(divisor)[0] in (0.5, -0.5):
                node.target, node.args = instead, (node.args[0], 1 / divisor)
    return joint


RECIPROCALS = Pass("reciprocals", "multiplies where it divided by a power of two", multiply)
