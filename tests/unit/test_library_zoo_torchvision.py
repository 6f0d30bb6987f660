"""A handful of torchvision's models in the zoo build and train."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import find
from benchmarks.zoo.libraries.torchvision import ENTRIES

try:  # one that does not fit PyTorch raises a RuntimeError
    import torchvision as torchvision
except Exception as e:
    pytest.skip(f"torchvision cannot be imported: {e}", allow_module_level=True)


@pytest.mark.parametrize("name", ["resnet", "googlenet", "lraspp_mobilenet_v3_large", "mvit_v2", "fasterrcnn"])
def test_trains_and_is_deterministic(name: str) -> None:
    entry = find(ENTRIES, f"torchvision/{name}")
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = entry.build()
        loss = entry.loss(model, entry.batch(2, 0))
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.detach())
    assert torch.equal(*losses)
