"""Finds tables: parameters of which rows are looked up, and that nothing else reads but, where it is tied, a head.

Read off the joint graph. Rows of such a table can live on one rank each, for nobody needs more of it than the rows
that its batch names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from autopar.ir.structure import looked_up
from autopar.ir.training_graph import Lookup, Parts, Table

aten = torch.ops.aten

_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
LOOKUPS = (aten.embedding.default, *_BAGS)
"""The operators that look rows of a table up; their next arguments are the indices and, of bags, the offsets."""
_BAG_PADDING = 8
"""Which argument of an embedding bag names the row that its sums pass over."""


def is_lookup(node: torch.fx.Node, table: torch.fx.Node) -> bool:
    """Whether a node looks rows of a table up, and would find the same in a table of those rows alone."""
    if node.target not in LOOKUPS or node.args[0] is not table or table in node.args[1:]:
        return False
    # A bag's padding is told by its index, which another table would have another row for.
    return node.target not in _BAGS or len(node.args) <= _BAG_PADDING or node.args[_BAG_PADDING] in (None, -1)


def find_table(
    parameter: torch.fx.Node,
    parts: Parts | None,
    height: int,
    position: Mapping[torch.fx.Node, int],
    batch: Mapping[torch.fx.Node, Any],
    readers: Sequence[torch.fx.Node] = (),
) -> Table | None:
    """The table, so many rows high, that a parameter is; `None` where it is read otherwise, too.

    `parts`: what its gradient is made of, less a head's part; `readers`: the nodes of that head.
    """
    users = [n for n in parameter.users if n not in readers]
    if not users or not all(is_lookup(n, parameter) for n in users):
        return None
    if parts is None or parts.kind != "rows":
        return None
    lookups = tuple(_lookup(n, height, position, batch) for n in sorted(users, key=position.__getitem__))
    if not {t.left for t in parts.terms} <= {k.indices for k in lookups}:
        return None
    return Table(lookups, parts)


def _lookup(
    node: torch.fx.Node, height: int, position: Mapping[torch.fx.Node, int], batch: Mapping[torch.fx.Node, Any]
) -> Lookup:
    indices = node.args[1]
    assert isinstance(indices, torch.fx.Node)
    known = max(position.get(n, -1) for n in node.all_input_nodes[1:])
    return Lookup(node.name, indices.name, known, position[node], *looked_up([indices], height, batch))
