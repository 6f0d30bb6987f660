"""Models of PyTorch Geometric: nodes, graphs, molecules and edges are classified, on random graphs of one size.

A batch is several graphs joined into one, as its loader joins them: nodes (`x`), edges as pairs of nodes
(`edge_index`), and the graph of each node (`batch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, classes, generator
from benchmarks.zoo.entry import Batch, Entry, LossFn
from benchmarks.zoo.libraries.geometric_models import (
    ATOMS,
    EDGE_TYPES,
    FEATURES,
    Autoencoder,
    Dense,
    Hetero,
    Layers,
    OfGraphs,
    PerGraph,
    all_pairs,
)

NODES = 8
"""Of a graph."""
EDGES = 20
"""Of a graph, in one direction; each is there in both."""
WIDTH = 16


def joined(n: int, seed: int, *also: str) -> tuple[dict[str, torch.Tensor], torch.Generator]:
    """`n` random graphs as one, with what is asked for `also`."""
    g = generator(seed)
    one = torch.randint(NODES, (n, EDGES), generator=g)
    other = (one + torch.randint(1, NODES, (n, EDGES), generator=g)) % NODES
    first = NODES * torch.arange(n)[:, None]
    edges = torch.stack([(one + first).flatten(), (other + first).flatten()])
    inputs = {
        "x": torch.randn(n * NODES, FEATURES, generator=g),
        "edge_index": torch.cat([edges, edges.flip(0)], 1),
        "edge_attr": torch.randn(2 * n * EDGES, FEATURES, generator=g),
        "edge_type": torch.randint(EDGE_TYPES, (2 * n * EDGES,), generator=g),
        "batch": torch.arange(n).repeat_interleave(NODES),
        "z": torch.randint(1, ATOMS, (n * NODES,), generator=g),
        "pos": torch.randn(n * NODES, 3, generator=g),
    }
    return {name: inputs[name] for name in also}, g


def of_nodes(*names: str) -> Callable[[int, int], Batch]:
    def make(n: int, seed: int) -> Batch:
        inputs, g = joined(n, seed, "x", "edge_index", *names)
        return inputs, classes(g, n * NODES)

    return make


def of_graphs(*names: str) -> Callable[[int, int], Batch]:
    def make(n: int, seed: int) -> Batch:
        inputs, g = joined(n, seed, "x", "edge_index", *names, "batch")
        return inputs, classes(g, n)

    return make


def of_molecules(n: int, seed: int) -> Batch:
    """Atoms and where they are, with an energy for each molecule."""
    inputs, g = joined(n, seed, "z", "pos", "batch")
    return inputs, torch.randn(n, 1, generator=g)


def of_links(n: int, seed: int) -> Batch:
    """Half of the pairs are linked."""
    inputs, g = joined(n, seed, "x", "edge_index")
    pairs = torch.randint(NODES * n, (2, 2 * n * EDGES), generator=g)
    there = inputs["edge_index"]
    target = torch.cat([torch.ones(there.shape[1]), torch.zeros(pairs.shape[1])])
    return inputs | {"edge_label_index": torch.cat([there, pairs], 1)}, target


def of_users(n: int, seed: int) -> Batch:
    """Links of LightGCN's fixed set of users and things."""
    g = generator(seed)
    edges = torch.randint(LIGHT_NODES, (2, n * EDGES), generator=g)
    pairs = torch.randint(LIGHT_NODES, (2, 2 * n * EDGES), generator=g)
    return {"edge_index": edges, "edge_label_index": pairs}, torch.randint(2, (2 * n * EDGES,), generator=g).float()


def of_kinds(n: int, seed: int) -> Batch:
    """Papers and their authors, with what leads from one to the other, in both directions."""
    g = generator(seed)
    papers, authors = n * NODES, n * NODES // 2
    wrote = torch.stack([torch.arange(papers) % authors, torch.arange(papers)])
    cites = torch.randint(papers, (2, n * EDGES), generator=g)
    inputs = {
        "paper": torch.randn(papers, FEATURES, generator=g),
        "author": torch.randn(authors, FEATURES, generator=g),
        "wrote": wrote,
        "written": wrote.flip(0),
        "cites": cites,
    }
    return inputs, classes(g, papers)


def of_dense_graphs(n: int, seed: int) -> Batch:
    """Graphs as matrices, one beside the other."""
    g = generator(seed)
    adjacency = (torch.rand(n, NODES, NODES, generator=g) < 0.4).float()
    return {"x": torch.randn(n, NODES, FEATURES, generator=g), "adj": adjacency}, classes(g, n)


LIGHT_NODES = 64


def labelled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def energetic(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def linked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


_NODES_ALONE = of_nodes()


@dataclass(frozen=True)
class Model:
    """A model of torch_geometric.nn, made when it is asked for."""

    name: str
    make: Callable[[Any, float], nn.Module]
    """Of the module `torch_geometric.nn`, and a dropout probability."""
    batch: Callable[[int, int], Batch] = _NODES_ALONE
    loss: LossFn = labelled

    def entry(self) -> Entry:
        return Entry(f"geometric/{self.name}", "graph", self._make, self.batch, self.loss)

    def _make(self, dropout: float) -> nn.Module:
        import torch_geometric.nn

        return self.make(torch_geometric.nn, dropout)


def _nodes(name: str, **fields: Any) -> Model:
    """One of the models that all take the same arguments."""
    return Model(name, lambda nn_, p: getattr(nn_, name)(FEATURES, WIDTH, 2, CLASSES, dropout=p, **fields))


def _graphs(name: str, **fields: Any) -> Model:
    """The same, whose nodes' values are averaged over each graph."""

    def make(nn_: Any, dropout: float) -> nn.Module:
        return PerGraph(getattr(nn_, name)(FEATURES, WIDTH, 2, dropout=dropout, **fields), WIDTH)

    return Model(f"{name} of graphs", make, of_graphs())


def _layers(name: str, *names: str, make: Callable[[Any, int, int], Any] | None = None, **fields: Any) -> Model:
    """Two layers of a kind; `names` are inputs of the layers beside nodes and edges."""

    def layer(nn_: Any, before: int, behind: int) -> Any:
        return make(nn_, before, behind) if make is not None else getattr(nn_, name)(before, behind, **fields)

    sizes = ((FEATURES, WIDTH), (WIDTH, CLASSES))
    return Model(name, lambda nn_, p: Layers([layer(nn_, *size) for size in sizes], p), of_nodes(*names))


def _mlp(before: int, behind: int) -> nn.Module:
    return nn.Sequential(nn.Linear(before, WIDTH), nn.ReLU(), nn.Linear(WIDTH, behind))


def _pna(**fields: Any) -> dict[str, Any]:
    scalers = ["identity", "amplification", "attenuation"]
    degrees = torch.tensor([0, 4, 8, 8, 4, 2])
    return {"aggregators": ["mean", "min", "max", "std"], "scalers": scalers, "deg": degrees, **fields}


MODELS: tuple[Model, ...] = (
    *(_nodes(name) for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")),
    Model("PNA", lambda nn_, p: nn_.PNA(FEATURES, WIDTH, 2, CLASSES, dropout=p, **_pna())),
    *(_graphs(name) for name in ("GCN", "GraphSAGE", "GIN", "GAT")),
    _layers("GATv2Conv", "edge_attr", edge_dim=FEATURES),
    _layers("TransformerConv", "edge_attr", edge_dim=FEATURES),
    _layers("GINEConv", "edge_attr", make=lambda nn_, a, b: nn_.GINEConv(_mlp(a, b), edge_dim=FEATURES)),
    _layers("NNConv", "edge_attr", make=lambda nn_, a, b: nn_.NNConv(a, b, nn.Linear(FEATURES, a * b))),
    _layers("ResGatedGraphConv", "edge_attr", edge_dim=FEATURES),
    _layers("GENConv", "edge_attr", edge_dim=FEATURES),
    _layers("RGCNConv", "edge_type", num_relations=EDGE_TYPES, num_bases=2),
    _layers("FastRGCNConv", "edge_type", num_relations=EDGE_TYPES),
    _layers("ChebConv", K=3),
    _layers("TAGConv"),
    _layers("ARMAConv"),
    _layers("SGConv", K=2),
    _layers("GraphConv"),
    _layers("GPSConv", "batch", make=lambda nn_, a, b: OfGraphs(nn_.GPSConv(a, nn_.SAGEConv(a, a), heads=2), a, b)),
    _layers("EdgeConv", make=lambda nn_, a, b: nn_.EdgeConv(_mlp(2 * a, b))),
    Model("HGTConv", lambda nn_, p: Hetero("HGTConv", WIDTH), of_kinds),
    Model("HANConv", lambda nn_, p: Hetero("HANConv", WIDTH), of_kinds),
    Model("HeteroConv", lambda nn_, p: Hetero("HeteroConv", WIDTH), of_kinds),
    Model("GraphUNet", lambda nn_, p: nn_.GraphUNet(FEATURES, WIDTH, CLASSES, depth=2)),
    Model("DenseSAGEConv", lambda nn_, p: Dense("DenseSAGEConv", WIDTH), of_dense_graphs),
    Model("DenseGCNConv", lambda nn_, p: Dense("DenseGCNConv", WIDTH), of_dense_graphs),
    Model(
        "AttentiveFP",
        lambda nn_, p: nn_.AttentiveFP(FEATURES, WIDTH, CLASSES, FEATURES, 2, 2, dropout=p),
        of_graphs("edge_attr"),
    ),
    Model("NeuralFingerprint", lambda nn_, p: nn_.NeuralFingerprint(FEATURES, WIDTH, CLASSES, 2), of_graphs()),
    Model(
        "SGFormer",
        lambda nn_, p: nn_.SGFormer(FEATURES, WIDTH, CLASSES, trans_dropout=p, gnn_dropout=p),
        of_nodes("batch"),
    ),
    Model(
        "Polynormer",
        lambda nn_, p: nn_.Polynormer(FEATURES, WIDTH, CLASSES, 2, 1, p, p, p),
        of_nodes("batch"),
    ),
    Model("PMLP", lambda nn_, p: nn_.PMLP(FEATURES, WIDTH, CLASSES, 2, dropout=p)),
    Model(
        "SchNet",
        lambda nn_, p: nn_.SchNet(WIDTH, WIDTH, 2, 10, interaction_graph=all_pairs),
        of_molecules,
        energetic,
    ),
    Model("GAE", lambda nn_, p: Autoencoder(WIDTH), of_links, linked),
    Model("LightGCN", lambda nn_, p: nn_.LightGCN(LIGHT_NODES, WIDTH, 2), of_users, linked),
)

ENTRIES: tuple[Entry, ...] = tuple(model.entry() for model in MODELS)
