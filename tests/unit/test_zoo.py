"""Every model of the zoo trains: a finite scalar loss, and finite gradients for what its loss reaches."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.zoo import Entry, Kind, find, sizes
from benchmarks.zoo.huggingface import ENTRIES as HUGGING_FACE
from benchmarks.zoo.plain import ENTRIES as PLAIN

ENTRIES = (*HUGGING_FACE, *PLAIN)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def all_entries(names: tuple[Entry, ...] = ENTRIES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", names, ids=lambda e: e.name)


@all_entries()
def test_trains_and_without_dropout_is_deterministic(entry: Entry) -> None:
    model, batch = entry.build(), entry.batch(2, 0)
    torch.manual_seed(1)
    loss = entry.loss(model, batch)
    assert model.training
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert sum(int(g.count_nonzero()) for g in gradients) > 0
    assert all(g.isfinite().all() for g in gradients)

    torch.manual_seed(2)
    assert torch.equal(entry.loss(entry.build(), entry.batch(2, 0)), loss)


@all_entries()
def test_batches_have_the_size_asked_for_and_follow_the_seed(entry: Entry) -> None:
    three, again, other = (_tensors(entry.batch(n, seed)) for n, seed in ((3, 0), (3, 0), (3, 1)))
    assert all(torch.equal(a, b) for a, b in zip(three, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(three, other, strict=True))
    assert any(t.shape[0] == 3 for t in three)


@all_entries(tuple(e for e in ENTRIES if e.name in ("bert", "gpt2", "t5", "llama", "vit", "whisper", "lstm", "vgg")))
def test_dropout_is_a_parameter(entry: Entry) -> None:
    model, batch = entry.build(dropout=0.3), entry.batch(2, 0)
    torch.manual_seed(1)
    first = entry.loss(model, batch)
    torch.manual_seed(2)
    assert not torch.equal(entry.loss(model, batch), first)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    entry = find(PLAIN, "cnn")
    state = torch.get_rng_state()
    one, same, other = (list(entry.build(seed=s).parameters()) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


def test_every_kind_is_there_and_names_are_unique() -> None:
    assert len(HUGGING_FACE) >= 36
    assert {e.kind for e in ENTRIES} <= set(get_args(Kind))
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)


def test_find_names_the_nearest() -> None:
    with pytest.raises(KeyError, match="no model 'mixtrall' in the zoo; did you mean 'mixtral'"):
        find(HUGGING_FACE, "mixtrall")


def test_real_sizes_have_the_published_numbers_of_parameters() -> None:
    """BERT-base with its language model head 109.5 M, GPT-2 small 124.4 M, ResNet-50 25.6 M."""
    with torch.device("meta"):
        counts = {e.name: sum(p.numel() for p in e.build(0.1).parameters()) for e in sizes.entries()}
    assert counts == {"bert-base": 109_514_298, "gpt2-small": 124_439_808, "resnet-50": 25_557_032}


@all_entries(sizes.entries(scaled=True))
def test_scaled_sizes_train(entry: Entry) -> None:
    loss = entry.loss(entry.build(0.1), entry.batch(2, 0))
    loss.backward()
    assert loss.isfinite()


def _tensors(batch: object) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
