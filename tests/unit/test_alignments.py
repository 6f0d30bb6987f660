"""CTC is captured, and trains as in eager PyTorch, also with texts that are shorter than the targets are wide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar

FRAMES, LETTERS = 9, 6


class Recognizer(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, LETTERS)
        self.settings = settings

    def forward(
        self, frames: torch.Tensor, text: torch.Tensor, lengths: torch.Tensor, text_lengths: torch.Tensor
    ) -> torch.Tensor:
        scores = self.layer(frames).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, text, lengths, text_lengths, **self.settings)
        return loss if loss.dim() == 0 else (loss / text_lengths).mean()


def batch(seed: int, texts: int = 3, width: int = 4, flat: bool = False, longest: int = 3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (texts,), generator=g)
    text = torch.randint(1, LETTERS, (int(lengths.sum()),) if flat else (texts, width), generator=g)
    frames = torch.randn(texts, FRAMES, 5, generator=g, dtype=torch.float64)
    return {
        "frames": frames,
        "text": text,
        "lengths": torch.randint(7, FRAMES + 1, (texts,), generator=g),
        "text_lengths": lengths,
    }


@pytest.mark.filterwarnings("ignore:the loss is a sum")
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"zero_infinity": True}])
def test_ctc_is_captured(settings: dict[str, Any]) -> None:
    _train(Recognizer(**settings), [batch(0), batch(1), batch(2, texts=2, width=6), batch(3, longest=1)])


def test_texts_one_after_the_other_are_captured() -> None:
    _train(Recognizer(), [batch(seed, flat=True) for seed in range(3)])


def test_a_text_that_does_not_fit_its_frames_has_no_gradient_where_that_is_asked_for() -> None:
    impossible = batch(0, width=8)
    impossible["lengths"][0], impossible["text_lengths"][0] = 2, 8
    _train(Recognizer(zero_infinity=True), [impossible, batch(1, width=8)])


def _train(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
    model = model.double()
    eager = copy.deepcopy(model)
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    program = autopar.optimize(model, optimizer=optimizer, example_inputs=batches[0], capture="always")
    for one in batches:
        loss = program.step(one)
        alone.zero_grad()
        expected = eager(**one)
        expected.backward()
        alone.step()
        assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
