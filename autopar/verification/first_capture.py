"""Imported by the process that ranks are forked from: captures a small model, for what PyTorch sets up at the first
capture to be there in each of them, which saves it some 0.3 s."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph

with torch.random.fork_rng(devices=[]):
    _model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
training_graph(_model, flatten((torch.ones(2, 2), torch.ones(2, 2))), F.mse_loss)
