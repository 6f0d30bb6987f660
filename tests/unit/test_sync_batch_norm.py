"""Batch normalization over all ranks, where it runs on one rank alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.runtime.sync_batch_norm import SyncedBatchNorm


@pytest.mark.parametrize("tracks", [False, True])
def test_evaluation_mode_is_pytorchs_and_asks_no_other_rank(tracks: bool) -> None:
    plain = nn.BatchNorm2d(3, track_running_stats=tracks).eval()
    synced = SyncedBatchNorm(3, track_running_stats=tracks).eval()  # of no process group, so that a sum would fail
    x = torch.randn(4, 3, 2, 2) + 2
    assert torch.equal(synced(x), plain(x))
