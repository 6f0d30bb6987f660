"""CTC (Graves et al., 2006), whose operator saves a table as wide as the batch's longest text: a size that only the
values in the batch tell, which no graph can have.

It is captured with a table for texts as long as the targets are wide, and what is saved is padded to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

aten = torch.ops.aten

_FORWARD = (aten._ctc_loss.default, aten._ctc_loss.Tensor)
_BACKWARD = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)


@contextlib.contextmanager
def sized_alignments() -> Iterator[None]:
    """While it is open, CTC can be traced."""
    from torch._subclasses.fake_impls import op_implementations_dict as rules

    mine = dict.fromkeys(_FORWARD, _saved) | dict.fromkeys(_BACKWARD, _gradient)
    before = {op: rules[op] for op in mine if op in rules}
    rules.update(mine)
    try:
        yield
    finally:
        for op in mine:
            rules.pop(op)
        rules.update(before)


def _width(targets: torch.Tensor) -> int:
    """Of the table: a place for each letter, and for the blanks around it. Targets are (texts, letters), or all texts
    one after the other."""
    return 2 * targets.shape[-1] + 1


def _saved(mode: Any, op: Any, scores: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The losses, (texts), and the table, (texts, frames, width), of scores (frames, texts, classes)."""
    frames, texts = scores.shape[:2]
    with mode:
        return scores.new_empty(texts), scores.new_empty(texts, frames, _width(targets))


def _gradient(mode: Any, op: Any, gradient: torch.Tensor, scores: torch.Tensor, *_: Any, **__: Any) -> Any:
    with mode:
        return torch.empty_like(scores, memory_format=torch.contiguous_format)


def keep_alignments(graph: torch.fx.Graph) -> None:
    """Has CTC save tables of the size that they were traced with."""
    for op in _FORWARD:
        for node in graph.find_nodes(op="call_function", target=op):
            node.target = alignments
            node.args = (op, *node.args)


def alignments(op: Any, scores: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, and its table padded."""
    losses, table = op(scores, targets, *rest)
    return losses, F.pad(table, (0, _width(targets) - table.shape[-1]))
