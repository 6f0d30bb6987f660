"""The zoo's models of PEFT train, in steps that are repeatable to the last bit."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import Entry, find
from benchmarks.zoo.libraries.peft import ENTRIES

pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")


def _step(entry: Entry) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = entry.build()
    torch.manual_seed(1)
    loss = entry.loss(model, entry.batch(2, 0))
    loss.backward()
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "name", ["peft/LoRA llama", "peft/AdaLora llama", "peft/PrefixTuning gpt2", "peft/DoRA resnet"]
)
def test_a_model_trains_and_its_step_is_repeatable(name: str) -> None:
    entry = find(ENTRIES, name)
    loss, gradients = _step(entry)
    again, same = _step(entry)
    assert loss.shape == () and loss.isfinite()
    assert any(int(g.count_nonzero()) for g in gradients)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


def test_names_are_unique() -> None:
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)
