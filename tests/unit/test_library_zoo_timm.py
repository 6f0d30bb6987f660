"""A handful of timm's models in the zoo build and train."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import find
from benchmarks.zoo.libraries.timm import ENTRIES

try:  # with a torchvision that does not fit PyTorch, importing timm raises a RuntimeError
    import timm as timm
except Exception as e:
    pytest.skip(f"timm cannot be imported: {e}", allow_module_level=True)


@pytest.mark.parametrize("name", ["test_convnext", "mobilevit_xxs", "swin_tiny_patch4_window7_224", "MultiScaleVit"])
def test_trains_and_is_deterministic(name: str) -> None:
    entry = find(ENTRIES, f"timm/{name}")
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = entry.build()
        loss = entry.loss(model, entry.batch(2, 0))
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.detach())
    assert torch.equal(*losses)


def test_dropout_is_a_parameter() -> None:
    entry = find(ENTRIES, "timm/test_vit")
    model, batch = entry.build(dropout=0.5), entry.batch(2, 0)
    torch.manual_seed(0)
    assert not torch.equal(entry.loss(model, batch), entry.loss(model, batch))
