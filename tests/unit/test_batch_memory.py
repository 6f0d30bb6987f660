"""Which tensors of a batch are in one memory, and copies of them."""

from __future__ import annotations

import random

import torch
from torch import nn

import autopar
from autopar.ir.batch import flatten
from autopar.ir.batch_memory import copies_of, overlap


def _window(data: torch.Tensor, draw: random.Random) -> torch.Tensor:
    rows, columns = (sorted(draw.sample(range(size + 1), 2)) for size in data.shape)
    found = data[rows[0] : rows[1] : draw.choice([1, 1, 2]), columns[0] : columns[1]]
    return found.t() if draw.random() < 0.2 else found


def test_windows_of_one_tensor_overlap_where_an_element_is_in_both() -> None:
    """But that of some in another order it is only asked whether they lie between one another."""
    draw, data = random.Random(0), torch.arange(48.0).view(6, 8)
    seen = set()
    for _ in range(500):
        a, b = _window(data, draw), _window(data, draw)
        expected = not set(a.flatten().tolist()).isdisjoint(b.flatten().tolist())
        said = overlap([a, b])
        assert said or not expected
        if a.stride() == b.stride():
            assert said == expected
            seen.add(said)
        one, other = copies_of([a, b])
        assert torch.equal(one, a) and torch.equal(other, b)
        one.fill_(-1.0)
        assert expected or torch.equal(other, b)
    assert seen == {True, False}


def test_copies_of_windows_of_a_data_set_are_no_copies_of_the_data_set() -> None:
    data = torch.zeros(64, 10_000)
    copied = copies_of([data[:, 3:7], data[:, 4:8]])
    assert all(t.untyped_storage().nbytes() == 64 * 4 * 4 for t in copied)


def test_batches_made_in_inference_mode_may_be_in_one_memory() -> None:
    with torch.inference_mode():
        ids = torch.randn(4, 6)
    model = nn.Linear(5, 5)
    batch = ids[:, :-1], ids[:, 1:]
    assert not flatten(batch).given
    program = autopar.optimize(
        model,
        example_inputs=batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        capture="never",
    )
    assert program.step(batch).isfinite()
