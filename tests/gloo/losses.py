"""What the tests of losses run on each rank: one step of a small model on uneven batches, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import autopar

CLASSES = 5
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Words(nn.Module):
    """Scores of the classes for every word; rows of a table are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.table(words)))
        return scores


class Tagged(torch.Tensor):
    """A kind of tensor of the user's."""


def model() -> Words:
    torch.manual_seed(5)
    return Words().double()


def batch(rank: int, size: int) -> Batch:
    g = torch.Generator().manual_seed(rank)
    return torch.randint(0, 11, (size, 3), generator=g), torch.randint(0, CLASSES, (size, 3), generator=g)


def entropy(s: torch.Tensor, t: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(s.reshape(-1, CLASSES), t.reshape(-1), **settings)


def masked(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (entropy(s, t, reduction="none") * (t.reshape(-1) > 1)).sum() / (t > 1).sum()


def contrastive(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = F.normalize(s.mean(1), dim=-1)
    return F.cross_entropy(10 * h @ h.T, torch.arange(len(h)))


def labelled(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Negatives within the batch, whose place in it the batch says: it cannot be taken apart."""
    h = F.normalize(s.mean(1), dim=-1)
    return F.cross_entropy(10 * h @ h.T, t[:, 0])


def squares(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(s[..., 0], t.double())


def squeezed(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Of one sample, its graph shows a mean over elements."""
    return (s[..., 0] - t.double()).squeeze().square().mean(-1).mean()


CASES: dict[str, tuple[Loss, tuple[int, int]]] = {
    "its mean": (lambda s, t: entropy(s, t).mean(), (2, 6)),
    "masked": (masked, (2, 6)),
    "sum": (lambda s, t: entropy(s, t, reduction="sum"), (2, 6)),
    "divided by what one rank's size is": (lambda s, t: entropy(s, t, reduction="sum") / 6, (2, 6)),
    "divided by the size": (lambda s, t: entropy(s, t, reduction="sum") / len(s), (1, 6)),
    "nothing counts on one rank": (masked, (2, 6)),
    "empty, cross-entropy": (entropy, (4, 0)),
    "empty, mse": (squares, (0, 3)),
    "empty, bounded": (lambda s, t: entropy(s, t).clamp(max=10), (4, 0)),
    "contrastive": (contrastive, (2, 6)),
    "labelled": (labelled, (2, 6)),
    "units differ": (squeezed, (1, 5)),
    "sum, of one sample each, eager": (lambda s, t: entropy(s, t, reduction="sum"), (1, 1)),
    "mean, of one sample each, eager": (squares, (1, 1)),
    "contrastive, of one sample each": (contrastive, (1, 1)),
    "pairs, of one sample each, eager": (lambda s, t: squares(s, t) + (s[:, None] - s).square().mean(), (1, 1)),
    "two counts": (lambda s, t: entropy(s, t) + entropy(s, t, ignore_index=3), (2, 6)),
}


def one_step(rank: int, name: str) -> tuple[float, float, list[str]]:
    """How far parameters and loss are from those of one process after a step; what was warned of."""
    loss, sizes = CASES[name]
    batches = [batch(r, size) for r, size in enumerate(sizes)]
    if name.startswith("nothing"):
        batches[0][1].zero_()
    if name.startswith("pairs"):
        batches = [(words, targets.as_subclass(Tagged)) for words, targets in batches]
    if name == "labelled":
        for _, t in batches:
            t[:, 0] = torch.arange(len(t))
    mine, eager = model(), model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        program = autopar.optimize(
            mine,
            example_inputs=batches[rank],
            loss_fn=loss,
            strategy="ddp",
            optimizer=torch.optim.SGD(mine.parameters(), lr=0.1),
            capture="never" if name.endswith("eager") else "auto",
        )
        found = float(program.step(batches[rank]))
    words, targets = (torch.cat([b[i] for b in batches]) for i in range(2))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected = loss(eager(words), targets)
    expected.backward()
    optimizer.step()
    distance = max(
        float((a - b).detach().abs().max()) for a, b in zip(mine.parameters(), eager.parameters(), strict=True)
    )
    texts = [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]
    return distance, abs(found - expected.item()), texts


def micro_batches(rank: int, loss: Loss, sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
    """How far parameters are from those of one process after a step on several micro-batches, some of them empty."""
    parts = [[batch(10 * k + r, size) for k, size in enumerate(own)] for r, own in enumerate(sizes)]
    mine, eager = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, eager)]
    program = autopar.optimize(
        mine, example_inputs=parts[rank][0], loss_fn=loss, strategy="ddp", optimizer=optimizers[0]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        program.step(micro_batches=parts[rank])
    words, targets = (torch.cat([b[i] for own in parts for b in own]) for i in range(2))
    loss(eager(words), targets).backward()
    optimizers[1].step()
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine.parameters(), eager.parameters(), strict=True))


def drop_in_module(rank: int, dtype: torch.dtype) -> float:
    """How far an accumulated gradient is from that of one process, relative to its largest element, where the last of
    rank 1's batches is empty."""
    parts = [[batch(10 * k + r, size) for k, size in enumerate(own)] for r, own in enumerate(((2, 3), (6, 0)))]
    mine, eager = model().to(dtype), model()
    module = autopar.optimize(mine, example_inputs=parts[rank][0][0])
    with module.no_sync():
        (entropy(module(parts[rank][0][0]), parts[rank][0][1]) / 2).backward()
    (entropy(module(parts[rank][1][0]), parts[rank][1][1]) / 2).backward()
    words, targets = (torch.cat([b[i] for own in parts for b in own]) for i in range(2))
    entropy(eager(words), targets).backward()
    apart = []
    for a, b in zip(mine.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        apart.append(float((a.grad.double() - b.grad).abs().max() / b.grad.abs().max()))
    return max(apart)


class Switches:
    """A mean over all words, and later over some."""

    masked = False

    def __call__(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return masked(s, t) if self.masked else entropy(s, t)


def switched(rank: int, ranks: tuple[int, ...], sizes: tuple[int, int]) -> list[str]:
    """What is said where the loss becomes another one on these ranks, in a step in which batches have these sizes."""
    mine, loss = model(), Switches()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        program = autopar.optimize(
            mine, example_inputs=batch(rank, 6), loss_fn=loss, strategy="ddp", optimizer=optimizer
        )
        for step in range(4):
            loss.masked = step >= 1 and rank in ranks
            program.step(batch(rank, sizes[rank] if step == 1 else 6))
    return [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]


class Grows:
    """A mean over all words, to which a term across samples comes later."""

    factor = 0.0

    def __call__(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return entropy(s, t) + self.factor * contrastive(s, t) if self.factor else entropy(s, t)


def grown(
    rank: int, strategy: str, capture: Literal["auto", "never"], step_when: int, sizes: tuple[int, int] = (6, 7)
) -> list[str]:
    """What is said where the loss compares samples from this step on."""
    mine, loss = model(), Grows()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        program = autopar.optimize(
            mine,
            example_inputs=batch(rank, sizes[0]),
            loss_fn=loss,
            strategy=strategy,
            optimizer=optimizer,
            capture=capture,
        )
        for step in range(8):
            loss.factor = 1.0 if step >= step_when else 0.0
            program.step(batch(rank, sizes[rank]))
    return [str(w.message) for w in said if str(w.message).startswith("the loss")]


def looked_at(rank: int) -> list[str]:
    """What an eager model does in its eighth step: `forward`, or `gradients`, or `other values` where a forward pass
    has others than the step's first one."""
    mine, done, values = model(), list[str](), list[torch.Tensor]()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)

    def forward(module: torch.nn.Module, _: Any) -> None:
        if module is mine:
            values.append(torch.cat([p.detach().flatten() for p in mine.parameters()]))
            done.append("forward" if torch.equal(values[0], values[-1]) else "other values")

    def gradient(_: torch.Tensor) -> None:
        if done[-1] != "gradients":
            done.append("gradients")

    program = autopar.optimize(
        mine, example_inputs=batch(rank, 6), loss_fn=entropy, strategy="ddp", optimizer=optimizer, capture="never"
    )
    for _ in range(7):
        program.step(batch(rank, 6))
    for p in mine.parameters():
        p.register_hook(gradient)
    with register_module_forward_pre_hook(forward):  # not the model's, which is as before behind a look
        program.step(batch(rank, 6))
    return done


def nothing_counts_in_16_bits(rank: int) -> bool:
    """Whether all parameters are finite after a step in bfloat16 to which one rank has nothing to add."""
    mine = model().bfloat16()
    data = batch(rank, 6)
    if rank == 0:
        data[1].zero_()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    program = autopar.optimize(mine, example_inputs=data, loss_fn=masked, strategy="ddp", optimizer=optimizer)
    program.step(data)
    return all(bool(p.isfinite().all()) for p in mine.parameters())


def everything(rank: int, n: int) -> dict[str, Any]:
    """All cases, on this rank."""
    return {
        **{name: one_step(rank, name) for name in CASES},
        "micro-batches": [
            micro_batches(rank, entropy, ((2, 0), (3,))),
            micro_batches(rank, lambda s, t: entropy(s, t, reduction="sum"), ((2, 1), (3, 4))),
        ],
        "module": [drop_in_module(rank, torch.float64), drop_in_module(rank, torch.bfloat16)],
        "grown": [grown(rank, *of) for of in (("sharded", "auto", 0), ("sharded", "auto", 5), ("ddp", "never", 5))],
        "grown, of one sample each": grown(rank, "ddp", "never", 5, (1, 1)),
        "looked at": looked_at(rank),
        "16 bits": nothing_counts_in_16_bits(rank),
        "switched": [switched(rank, (0,), (6, 6)), switched(rank, (0, 1), (6, 6)), switched(rank, (0, 1), (0, 6))],
    }
