"""Plain torch modules, small: they return logits, and their entries have a `loss_fn`. Batches are (inputs, target)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, VOCABULARY, classes, generator, tokens
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.resnet import RESNET18, RESNET50, ResNet

FEATURES = 16
"""Dense features of a sample, where it has any."""
FIELDS = 4
"""Categorical features of a sample of the recommendation model."""


class TiedMLP(nn.Module):
    """An autoencoder whose decoder is its encoder transposed, and a middle layer used twice: two kinds of ties."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, width)
        self.middle = nn.Linear(width, width)
        self.again = self.middle
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.encoder(x))
        x = self.again(self.dropout(torch.tanh(self.middle(x))))
        return F.linear(x, self.encoder.weight.t(), self.bias)


class CNN(nn.Module):
    """Two convolutions without batch statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, CLASSES)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


class VGG(nn.Module):
    """Few convolutions and wide linear layers (Simonyan and Zisserman 2015): most bytes in few parameters."""

    def __init__(
        self, dropout: float = 0.0, channels: Sequence[int] = (8, 16), width: int = 64, classes: int = CLASSES
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in channels:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            inputs = outputs
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        self.classifier = nn.Sequential(
            *(nn.Linear(inputs * 49, width), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(width, classes),
        )
        for module in self.modules():  # without normalization, PyTorch's own initialization lets signals die away
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(x))
        return logits


class LSTM(nn.Module):
    """A language model of two recurrent layers: token ids (n, t) to logits (n, t, vocabulary)."""

    def __init__(
        self, dropout: float = 0.0, width: int = 32, vocabulary: int = VOCABULARY, sparse: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.recurrent = nn.LSTM(width, width, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(ids))
        logits: torch.Tensor = self.head(hidden)
        return logits


class BagOfWords(nn.Module):
    """fastText's classifier (Joulin et al. 2016): ragged texts, as one run of token ids and where each begins."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(VOCABULARY, width, mode="mean")
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(self.bags(ids, offsets)))
        return logits


class DLRM(nn.Module):
    """A recommendation model (Naumov et al. 2019): tables of embeddings, their pairwise products, two MLPs.

    Categories are ids (n, tables), or with `bags` sums of several rows: (n, tables, ids).
    """

    def __init__(
        self,
        dropout: float = 0.0,
        width: int = 8,
        rows: Sequence[int] = (1000, 300, 50, 7),
        features: int = FEATURES,
        bottom: Sequence[int] = (32,),
        top: Sequence[int] = (32,),
        bags: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(n, width, mode="sum", sparse=sparse) if bags else nn.Embedding(n, width, sparse=sparse)
            for n in rows
        )
        vectors = len(rows) + 1
        pairs = vectors * (vectors - 1) // 2
        self.bottom = nn.Sequential(*_relu_layers((features, *bottom, width)))
        inner = _relu_layers((width + pairs, *top))
        self.top = nn.Sequential(*inner, nn.Dropout(dropout), nn.Linear(top[-1], 1))
        self._initialize()
        self.register_buffer("_pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def _initialize(self) -> None:
        """As the authors' code does."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                outputs, inputs = module.weight.shape
                nn.init.normal_(module.weight, std=(2 / (inputs + outputs)) ** 0.5)
                nn.init.normal_(module.bias, std=outputs**-0.5)
            elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                bound = module.num_embeddings**-0.5
                nn.init.uniform_(module.weight, -bound, bound)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        v = torch.stack(vectors, 1)
        products = torch.bmm(v, v.transpose(1, 2))
        pairs = self._pairs
        assert isinstance(pairs, torch.Tensor)
        logit: torch.Tensor = self.top(torch.cat([x, products[:, pairs[0], pairs[1]]], 1))
        return logit.squeeze(1)


def _relu_layers(widths: Sequence[int]) -> list[nn.Module]:
    return [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all targets; logits have the classes last."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _images(size: int) -> Callable[[int, int], Any]:
    def make(n: int, seed: int) -> Any:
        g = generator(seed)
        return torch.randn(n, 3, size, size, generator=g), classes(g, n)

    return make


def _vectors(n: int, seed: int) -> Any:
    x = torch.randn(n, FEATURES, generator=generator(seed))
    return x, x.roll(1, 1)


def _next_tokens(n: int, seed: int) -> Any:
    ids = tokens(generator(seed), n, 7)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _bags(n: int, seed: int) -> Any:
    g = generator(seed)
    inputs = {"ids": tokens(g, 1, 5 * n)[0], "offsets": torch.arange(n) * 5 - (torch.arange(n) % 2)}
    return inputs, classes(g, n)


def _clicks(n: int, seed: int) -> Any:
    """Each of `FIELDS` categories holds a bag of 3 ids: (n, FIELDS, 3)."""
    g = generator(seed)
    categories = torch.stack([torch.randint(rows, (n, 3), generator=g) for rows in (1000, 300, 50, 7)], 1)
    inputs = {"dense": torch.randn(n, FEATURES, generator=g), "categories": categories}
    return inputs, torch.randint(2, (n,), generator=g).float()


ENTRIES: tuple[Entry, ...] = (
    Entry("tied-mlp", "plain", TiedMLP, _vectors, F.mse_loss),
    Entry("cnn", "plain", CNN, _images(16), cross_entropy),
    Entry(
        "resnet18",
        "plain",
        lambda dropout: ResNet(RESNET18, width=8, classes=CLASSES, dropout=dropout),
        _images(32),
        cross_entropy,
    ),
    Entry(
        "resnet50",
        "plain",
        lambda dropout: ResNet(RESNET50, width=4, expansion=4, classes=CLASSES, dropout=dropout),
        _images(32),
        cross_entropy,
    ),
    Entry("vgg", "plain", VGG, _images(16), cross_entropy),
    Entry("lstm", "plain", LSTM, _next_tokens, cross_entropy),
    Entry("bag-of-words", "plain", BagOfWords, _bags, cross_entropy),
    Entry("dlrm", "plain", DLRM, _clicks, F.binary_cross_entropy_with_logits),
)
