"""Plans that tests begin with."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.build import model_fingerprint

_MADE: dict[tuple[int, str], autopar.Plan] = {}


def ddp_plan(model: nn.Module, n: int, example: Any) -> autopar.Plan:
    """The plan of `ddp` for a classifier on `n` ranks of this machine: captured and priced once a process for all
    models with the same parameters, as most of a short training's time goes there."""
    key = n, model_fingerprint(model, F.cross_entropy).model_dump_json()
    if key not in _MADE:
        cluster = autopar.ClusterSpec.local(n)
        _MADE[key] = autopar.plan(model, cluster, strategy="ddp", example_inputs=example, loss_fn=F.cross_entropy)
    return _MADE[key]
