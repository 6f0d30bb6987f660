"""Buffers under frameworks: ranks take rank 0's, of those that have changed on some rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.integrations.buffers import SharedBuffers
from tests.gloo.ranks import run_ranks


def _model() -> nn.Module:
    model = nn.BatchNorm1d(3)
    model.small, model.large = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.zeros(1 << 19))
    model.mask, model.wide = nn.Buffer(torch.zeros(2, dtype=torch.bool)), nn.Buffer(torch.zeros(1).expand(3, 2))
    model.sparse = nn.Buffer(torch.zeros(2, 2).to_sparse())
    return model


def _sums(model: Any) -> list[float]:
    return [float(b.sum()) for b in (model.small, model.large, model.mask, model.wide, model.running_mean)]


def _changed(model: Any, shared: SharedBuffers) -> list[str]:
    """Names of the buffers of which ranks know that they change."""
    return sorted({name for name, b in model.named_buffers() if b.layout is torch.strided} - {*shared._unchanged})


def _run(rank: int, n: int) -> dict[str, Any]:
    model: Any = _model()
    shared = SharedBuffers(model, are_alike=True)
    found: dict[str, Any] = {}
    shared.share()
    found["nothing"] = _changed(model, shared)
    with torch.no_grad():
        if rank == 0:
            model.small.data.fill_(1.0)  # which PyTorch does not count
        else:
            model.large.fill_(2.0)
        model.mask = torch.tensor([rank == 0, True])
        model.wide[0, 0] = 3.0 + rank
    shared.share()
    found["changed"], found["then"] = _sums(model), _changed(model, shared)
    model(torch.full((2, 3), float(rank)))
    shared.note_trained(["running_mean"])
    if rank == 0:  # evaluates alone
        shared.share_changing()
        found["alone"] = _sums(model)
    shared.share()
    found["at last"] = _sums(model)
    SharedBuffers(nn.Linear(2, 2), are_alike=False).share()  # nothing is sent
    dist.barrier()
    return found


def test_what_changed_on_any_rank_is_rank_0s() -> None:
    first, second = run_ranks(2, _run)
    assert first["nothing"] == second["nothing"] == []
    assert first["changed"] == second["changed"] == [4.0, 0.0, 2.0, 18.0, 0.0]
    assert first["then"] == second["then"] == ["large", "mask", "small", "wide"]
    assert first["at last"] == second["at last"] == first["alone"] == [4.0, 0.0, 2.0, 18.0, 0.0]
