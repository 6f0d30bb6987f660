"""A recommendation model: most of its parameters are rows of tables, and a batch reads few of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.plain import DLRM
from benchmarks.zoo.workload import SEED, Workload, seeded, sgd
from benchmarks.zoo.zipf import EXPONENT, zipf

SAMPLES = 1024
"""Of a rank's batch."""
DENSE_FEATURES = 13
ROWS = (1_000_000, 150_000, 50_000, 10_000, 2_000, 500, 50, 5)
WIDTH = 16


def clicks(step: int, rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One id of every table a sample, dense features from N(0, 1), and clicks whose odds are linear in those."""
    random = np.random.default_rng([SEED, step, rank])
    ids = np.stack([zipf(random, rows, SAMPLES) for rows in ROWS], 1)
    dense = random.standard_normal((SAMPLES, DENSE_FEATURES), dtype=np.float32)
    odds = dense @ np.random.default_rng(SEED).standard_normal(DENSE_FEATURES)
    clicked = random.random(SAMPLES) < 1 / (1 + np.exp(-odds))
    inputs = {"dense": torch.from_numpy(dense), "categories": torch.from_numpy(ids)}
    return inputs, torch.from_numpy(clicked.astype(np.float32))


def _dlrm(sparse: bool) -> nn.Module:
    return DLRM(
        width=WIDTH,
        rows=ROWS,
        features=DENSE_FEATURES,
        bottom=(512, 256, 64),
        top=(512, 256),
        bags=False,
        sparse=sparse,
    )


RECOMMENDATION = Workload(
    name="dlrm",
    about="DLRM (Naumov et al. 2019) with the MLPs, the 13 dense features and the row width of 16 of its Criteo Kaggle "
    "benchmark, and 8 tables of 5 to 1,000,000 rows in place of its 26. Generated samples: ids by Zipf's law with "
    f"exponent {EXPONENT}, features from N(0, 1).",
    model=seeded(lambda: _dlrm(sparse=False)),
    batch=clicks,
    loss_fn=F.binary_cross_entropy_with_logits,
    optimizer=sgd(0.1),
    sparse_model=seeded(lambda: _dlrm(sparse=True)),
)
