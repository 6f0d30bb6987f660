"""What the writers of strategies' own works have in common."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
import torch.fx

if TYPE_CHECKING:
    from autopar.runtime.writer import Writer


def count(w: Writer, samples: int) -> torch.fx.Node:
    """This rank's samples, for all to know; negative where more micro-batches follow."""
    return w.call(torch.full, ((1,), samples if w.is_last else -samples), {"dtype": torch.int64, "device": w.device})


def message(w: Writer, node: torch.fx.Node) -> list[torch.fx.Node]:
    """A message of unequal parts: its values, and how many of them go to and come from each rank."""
    return [w.call(operator.getitem, (node, i)) for i in range(3)]


def hand_back(w: Writer, node: str, values: torch.fx.Node, rows: int, width: int) -> torch.fx.Node:
    """Puts the first `rows` of flat `values`, which may be padded, in the place of a node of the graph."""
    own = w.call(torch.narrow, (values, 0, 0, rows * width))
    w.copies[w.nodes[node]] = value = w.call(torch.reshape, (own, (rows, width)))
    return value
