"""Classes of transformers that are made tiny by rules: some of each kind train, and their configurations are small."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import find
from benchmarks.zoo.huggingface import ENTRIES as ARCHITECTURES
from benchmarks.zoo.libraries.huggingface import ENTRIES

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SOME = (
    "Gemma2ForCausalLM",
    "GraniteMoeForCausalLM",
    "ErnieForTokenClassification",
    "MBartForConditionalGeneration",
    "ConvNextV2ForImageClassification",
    "SEWForSequenceClassification",
    "LlavaForConditionalGeneration",
    "AltCLIPModel",
)


def test_names_are_those_of_classes_and_occur_once() -> None:
    transformers = pytest.importorskip("transformers", "5.23")
    names = [e.name for e in ENTRIES]
    assert len(set(names)) == len(names)
    assert all(hasattr(transformers, name.removeprefix("huggingface/")) for name in names)


def test_there_are_two_hundred_with_those_that_have_configurations_of_their_own() -> None:
    assert len(ENTRIES) + len(ARCHITECTURES) >= 200


@pytest.mark.parametrize("name", SOME)
def test_trains_and_without_dropout_is_deterministic(name: str) -> None:
    entry = find(ENTRIES, f"huggingface/{name}")
    model = entry.build()
    assert sum(p.numel() for p in model.parameters()) < 200_000
    loss = entry.loss(model, entry.batch(2, 0))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert sum(int(g.count_nonzero()) for g in gradients) > 0
    assert all(g.isfinite().all() for g in gradients)
    assert torch.equal(entry.loss(entry.build(), entry.batch(2, 0)), loss)
    assert not torch.equal(entry.loss(entry.build(), entry.batch(2, 1)), loss)
