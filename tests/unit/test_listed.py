"""Batches that list their samples: how many there are, and parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ir.batch import flatten
from autopar.ir.listed import chosen

IMAGE, OBJECTS = torch.zeros(3, 4, 4), {"boxes": torch.zeros(2, 4)}

LISTED = {
    "by name": {"images": [IMAGE] * 2, "targets": [OBJECTS] * 2},
    "by place": ([IMAGE] * 2, [OBJECTS] * 2),
    "as a loader's zip has it": ((IMAGE,) * 2, (OBJECTS,) * 2),
    "with a target": (([IMAGE] * 2, [OBJECTS] * 2), torch.zeros(2)),
    "beside one tensor": {"pixel_values": torch.zeros(2, 3, 4, 4), "labels": [OBJECTS] * 2},
    "alone": {"inputs": [{"image": IMAGE}] * 2},
}
NOT_LISTED = {
    "inputs and target": ({"x": torch.zeros(5, 2)}, {"y": torch.zeros(5)}),
    "two arguments that are dicts": (({"x": torch.zeros(5, 2)}, {"y": torch.zeros(5)}), torch.zeros(5)),
    "features of several scales": [torch.zeros(5, 8, 8), torch.zeros(5, 4, 4)],
}


@pytest.mark.parametrize("batch", LISTED.values(), ids=list(LISTED))
def test_a_list_of_dicts_has_a_sample_in_each(batch: Any) -> None:
    assert flatten(batch).size == 2
    one = chosen(batch, 2, [1])
    assert flatten(one).size == 1 and flatten(chosen(batch, 2, [1, 0, 1])).size == 3
    assert len(flatten(one).tensors) <= len(flatten(batch).tensors)


@pytest.mark.parametrize("batch", NOT_LISTED.values(), ids=list(NOT_LISTED))
def test_other_batches_have_their_samples_side_by_side(batch: Any) -> None:
    assert flatten(batch).size == 5
