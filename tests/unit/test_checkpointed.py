"""Parts of a model that run under `torch.utils.checkpoint`."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar

Batch = tuple[torch.Tensor, torch.Tensor]


class Part(nn.Module):
    def __init__(self, layer: nn.Module, counts: bool = False) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 8), layer
        self.counts = counts
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.seen[0].add_(1)
        h: torch.Tensor = self.layer(self.first(x)).relu_()
        return h


class Checkpointed(nn.Module):
    def __init__(self, part: Part, reentrant: bool) -> None:
        super().__init__()
        self.before, self.part, self.head = nn.Linear(4, 4), part, nn.Linear(8, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(checkpoint(self.part, self.before(x), use_reentrant=self.reentrant))
        return found


PARTS = {
    "batch normalization": lambda: Part(nn.BatchNorm1d(8)),
    "a counter": lambda: Part(nn.Identity(), counts=True),
    "batch normalization that is frozen": lambda: Part(nn.BatchNorm1d(8).eval()),
    "batch normalization without statistics": lambda: Part(nn.BatchNorm1d(8, track_running_stats=False)),
    "layer normalization": lambda: Part(nn.LayerNorm(8)),
}
WRITE = ("batch normalization", "a counter")


def batch(seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=g), torch.randn(6, 2, generator=g)


@pytest.mark.parametrize(("name", "reentrant"), [*((n, False) for n in PARTS), ("batch normalization", True)])
def test_trains_as_eager_pytorch_does_which_runs_a_part_twice(name: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(PARTS[name](), reentrant)
    mine, eager = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, eager)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = autopar.optimize(
            mine, example_inputs=batch(0), loss_fn=nn.functional.mse_loss, optimizer=optimizers[0], strategy="ddp"
        )
    words = [str(w.message) for w in said if "runs eagerly" in str(w.message)]
    assert len(words) == (name in WRITE)
    if name in WRITE:
        assert "under torch.utils.checkpoint writes to buffers" in words[0] and "test_checkpointed.py:" in words[0]
    for step in range(2):
        program.step(batch(step))
        optimizers[1].zero_grad()
        x, y = batch(step)
        nn.functional.mse_loss(eager(x), y).backward()
        optimizers[1].step()
    for (key, value), expected in zip(mine.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, msg=lambda text, key=key: f"{key}: {text}")  # type: ignore[misc]


def test_a_drop_in_module_holds_reentrant_checkpoints() -> None:
    torch.manual_seed(0)
    model = Checkpointed(PARTS["layer normalization"](), reentrant=True)
    eager = copy.deepcopy(model)
    x, y = batch(0)
    module = autopar.optimize(model, example_inputs=(x,), capture="always")
    for one in (module, eager):
        nn.functional.mse_loss(one(x), y).backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
