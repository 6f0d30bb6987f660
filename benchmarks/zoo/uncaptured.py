"""Workloads that no graph shows: what a step does is decided by the values in its batch, in Python."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo.convolutional import Critic, Detector
from benchmarks.zoo.workload import Workload, adamw, drawn, seeded

Loss = dict[str, torch.Tensor]


class _Layer(nn.Module):
    """A layer of a transformer, whose feed-forward part is given."""

    def __init__(self, width: int, forward: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        found: torch.Tensor = x + self.feed(self.norms[1](x))
        return found


def _feed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class _Experts(nn.Module):
    """Sends each sequence to one expert, and calls only the experts that have been sent any."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList([_feed(width) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.gate(x.mean(1)).softmax(-1)
        weight, choice = chances.max(-1)
        found = torch.zeros_like(x)
        for i in sorted(set(choice.tolist())):
            mine = (choice == i).nonzero()[:, 0]
            found = found.index_add(0, mine, self.experts[i](x[mine]) * weight[mine, None, None])
        return found


class Mixture(nn.Module):
    """A language model with a mixture of experts in each of its layers."""

    def __init__(self, words: int = 1000, width: int = 160, layers: int = 2, experts: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([_Layer(width, _Experts(width, experts)) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> Loss:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())}


class EarlyExit(nn.Module):
    """A classifier of sequences that leaves behind the layer from which on its input is no longer difficult."""

    def __init__(self, words: int = 1000, width: int = 192, layers: int = 6, classes: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([_Layer(width, _feed(width)) for _ in range(layers)])
        self.exits = nn.ModuleList([nn.Linear(width, classes) for _ in range(layers)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Loss:
        x, losses = self.embed(ids), []
        rare = (ids >= self.embed.num_embeddings // 2).double().mean().item()  # the more rare words, the deeper
        for i, (layer, leave) in enumerate(zip(self.layers, self.exits, strict=True)):
            x = layer(x)
            losses.append(F.cross_entropy(leave(x.mean(1)), labels))
            if rare < (i + 1) / len(self.layers):
                break
        return {"loss": torch.stack(losses).mean()}


class Trees(nn.Module):
    """A tree LSTM that composes each sentence along a tree of its own, leaf by leaf (Tai et al., 2015)."""

    def __init__(self, words: int = 3000, width: int = 256, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.leaf = nn.Linear(width, 2 * width)
        self.inner = nn.Linear(2 * width, 5 * width)
        self.out = nn.Linear(width, classes)

    def forward(self, ids: torch.Tensor, cuts: torch.Tensor, labels: torch.Tensor) -> Loss:
        leaves = self.leaf(self.embed(ids))
        tops = [self._top(leaves[i], ids[i].count_nonzero().item(), c, 0)[0] for i, c in enumerate(cuts.tolist())]
        return {"loss": F.cross_entropy(self.out(torch.stack(tops)), labels)}

    def _top(self, leaves: torch.Tensor, count: Any, cuts: list[float], at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden state and cell of the tree over `count` leaves, from the one `at` on."""
        if count == 1:
            cell, gate = leaves[at].chunk(2)
            return gate.sigmoid() * cell.tanh(), cell
        left = 1 + int(cuts[at] * (count - 1))
        h, c = self._top(leaves, left, cuts, at)
        h2, c2 = self._top(leaves, count - left, cuts, at + left)
        i, f, f2, o, g = self.inner(torch.cat([h, h2])).chunk(5)
        cell = i.sigmoid() * g.tanh() + f.sigmoid() * c + f2.sigmoid() * c2
        return o.sigmoid() * cell.tanh(), cell


class Speech(nn.Module):
    """Listens to packed sequences of frames, and is trained with CTC."""

    def __init__(self, frames: int = 80, width: int = 192, layers: int = 3, letters: int = 30) -> None:
        super().__init__()
        self.lstm = nn.LSTM(frames, width, layers, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, letters)

    def forward(
        self, frames: torch.Tensor, lengths: torch.Tensor, text: torch.Tensor, text_lengths: torch.Tensor
    ) -> Loss:
        packed = nn.utils.rnn.pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        heard, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        chances = self.out(heard).log_softmax(-1).transpose(0, 1)
        each = F.ctc_loss(chances, text, lengths, text_lengths, reduction="none", zero_infinity=True)
        return {"loss": (each / text_lengths).mean()}


def _text(g: torch.Generator) -> Any:
    return {"ids": torch.randint(0, 1000, (6, 64), generator=g)}


def _sentences(g: torch.Generator) -> Any:
    rare = torch.rand((), generator=g) < torch.rand(8, 48, generator=g)
    ids = torch.randint(0, 500, (8, 48), generator=g) + 500 * rare
    return {"ids": ids, "labels": ids.sum(1) % 20}


def _trees(g: torch.Generator) -> Any:
    ids = torch.randint(1, 3000, (8, 16), generator=g)
    lengths = torch.randint(8, 17, (8, 1), generator=g)
    ids = ids * (torch.arange(16) < lengths)
    return {"ids": ids, "cuts": torch.rand(8, 16, generator=g), "labels": ids.sum(1) % 5}


def _speech(g: torch.Generator) -> Any:
    return {
        "frames": torch.randn(4, 60, 80, generator=g),
        "lengths": torch.randint(30, 61, (4,), generator=g),
        "text": torch.randint(1, 30, (4, 15), generator=g),
        "text_lengths": torch.randint(5, 16, (4,), generator=g),
    }


def _boxes(g: torch.Generator) -> Any:
    corner = torch.rand(4, 5, 2, generator=g) * 0.7
    boxes = torch.cat([corner, corner + 0.05 + 0.25 * torch.rand(4, 5, 2, generator=g)], -1)
    return {
        "images": torch.randn(4, 3, 96, 96, generator=g),
        "boxes": boxes,
        "labels": torch.randint(0, 10, (4, 5), generator=g),
    }


def _pictures(g: torch.Generator) -> Any:
    mix = torch.rand(6, 1, 1, 1, generator=g)
    return {"real": torch.rand(6, 3, 32, 32, generator=g), "made": torch.randn(6, 3, 32, 32, generator=g), "mix": mix}


UNCAPTURED: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            name="experts",
            about="A language model with six experts in each of two layers, of which Python calls those that a "
            "sequence was sent to.",
            model=seeded(Mixture),
            batch=drawn(_text),
            optimizer=adamw(3e-4),
            eager=True,
            leaves_unused=True,
        ),
        Workload(
            name="early exit",
            about="A transformer of six layers that leaves behind the layer that a batch's words ask for.",
            model=seeded(EarlyExit),
            batch=drawn(_sentences),
            optimizer=adamw(3e-4),
            eager=True,
            leaves_unused=True,
        ),
        Workload(
            name="trees",
            about="A tree LSTM, recursive in Python, on sentences of 8 to 16 words.",
            model=seeded(Trees),
            batch=drawn(_trees),
            optimizer=adamw(3e-4),
            eager=True,
        ),
        Workload(
            name="speech",
            about="A bidirectional LSTM of three layers on packed sequences of 30 to 60 frames, trained with CTC.",
            model=seeded(Speech),
            batch=drawn(_speech),
            optimizer=adamw(3e-4),
            eager=True,
        ),
        Workload(
            name="detector",
            about="A convolutional detector, whose boxes are compared where a mask says that there are any.",
            model=seeded(Detector),
            batch=drawn(_boxes),
            optimizer=adamw(3e-4),
            eager=True,
        ),
        Workload(
            name="critic",
            about="The critic of a WGAN-GP: a small ResNet, whose loss holds the norm of its own gradient.",
            model=seeded(Critic),
            batch=drawn(_pictures),
            optimizer=adamw(1e-4),
            eager=True,
        ),
    )
}
"""Each computes its loss in its model, for what is decided there is nobody else's business."""
