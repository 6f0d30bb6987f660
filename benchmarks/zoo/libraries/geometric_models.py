"""What users write around PyTorch Geometric's layers: models of some layers, readings of whole graphs, a decoder of
links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES

FEATURES = 8
"""Of a node, and of an edge."""
EDGE_TYPES = 3
ATOMS = 10

_KINDS = ["paper", "author"]
_RELATIONS = [("author", "wrote", "paper"), ("paper", "written", "author"), ("paper", "cites", "paper")]


class Layers(nn.Module):
    """Layers of one kind, with what is usual between them; classes of nodes."""

    def __init__(self, layers: Sequence[nn.Module], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x, edge_index, **inputs).relu()
            x = F.dropout(x, self.dropout, self.training)
        found: torch.Tensor = self.layers[-1](x, edge_index, **inputs)
        return found


class OfGraphs(nn.Module):
    """A layer that keeps its width and looks at whole graphs, and one that changes it."""

    def __init__(self, layer: nn.Module, before: int, behind: int) -> None:
        super().__init__()
        self.layer = layer
        self.out = nn.Linear(before, behind)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layer(x, edge_index, batch))
        return found


class PerGraph(nn.Module):
    """A class of each graph, from the mean over its nodes."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        found: torch.Tensor = self.out(global_mean_pool(self.model(x, edge_index), batch))
        return found


class Hetero(nn.Module):
    """Two layers on papers and authors; classes of papers."""

    def __init__(self, layer: str, width: int) -> None:
        super().__init__()
        import torch_geometric.nn as nn_

        if layer == "HeteroConv":
            self.layers = nn.ModuleList(
                nn_.HeteroConv({kinds: nn_.SAGEConv((size, size), width) for kinds in _RELATIONS})
                for size in (FEATURES, width)
            )
        else:
            make = getattr(nn_, layer)
            self.layers = nn.ModuleList(make(s, width, (_KINDS, _RELATIONS), heads=2) for s in (FEATURES, width))
        self.out = nn.Linear(width, CLASSES)

    def forward(
        self,
        paper: torch.Tensor,
        author: torch.Tensor,
        wrote: torch.Tensor,
        written: torch.Tensor,
        cites: torch.Tensor,
    ) -> torch.Tensor:
        x = {"paper": paper, "author": author}
        edges = dict(zip(_RELATIONS, (wrote, written, cites), strict=True))
        for layer in self.layers:
            x = {kind: value.relu() for kind, value in layer(x, edges).items()}
        found: torch.Tensor = self.out(x["paper"])
        return found


class Dense(nn.Module):
    """Two layers on graphs that are matrices; classes of graphs."""

    def __init__(self, layer: str, width: int) -> None:
        super().__init__()
        import torch_geometric.nn as nn_

        self.layers = nn.ModuleList(getattr(nn_, layer)(size, width) for size in (FEATURES, width))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, adj).relu()
        found: torch.Tensor = self.out(x.mean(1))
        return found


class Autoencoder(nn.Module):
    """GAE (Kipf and Welling, 2016): how likely pairs of nodes are linked, from their values' products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        import torch_geometric.nn as nn_

        self.model = nn_.GAE(nn_.GCN(FEATURES, width, 2))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_label_index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.decode(self.model.encode(x, edge_index), edge_label_index, sigmoid=False)
        return found


def all_pairs(pos: torch.Tensor, batch: torch.Tensor) -> tuple[Any, Any]:
    """Every two atoms of a molecule, and their distance: for SchNet, whose own search needs another package."""
    same = (batch[:, None] == batch[None, :]) & ~torch.eye(len(batch), dtype=torch.bool, device=batch.device)
    edges = same.nonzero().T
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)
