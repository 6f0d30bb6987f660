"""What is trained: a GPT-2 of the standard library's tokens, the same on every system from the same seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.demo.text import VOCABULARY, load
from benchmarks.zoo.architecture import from_config
from benchmarks.zoo.workload import Workload, adamw, seeded

NAME = "demo"
BATCH_SIZE, SEQUENCE_LENGTH = 4, 64
"""Sequences a rank and step, and their tokens."""
WIDTH = 384
FIELDS = {
    "vocab_size": VOCABULARY,
    "n_positions": SEQUENCE_LENGTH,
    "n_embd": WIDTH,
    "n_layer": 4,
    "n_head": WIDTH // 64,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def workload(tokens: Path, seed: int) -> Workload:
    """The training job on a file of token ids; ranks make it again by its name."""

    def make() -> nn.Module:
        return from_config("GPT2Config", "GPT2LMHeadModel", FIELDS)

    def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
        """Sequences from places that the seed, the step and the rank decide."""
        ids = load(tokens)
        random = np.random.default_rng([seed, step, rank])
        starts = random.integers(0, len(ids) - SEQUENCE_LENGTH, size=BATCH_SIZE)
        rows = torch.from_numpy(np.stack([ids[s : s + SEQUENCE_LENGTH] for s in starts]).astype(np.int64))
        return {"input_ids": rows, "labels": rows}

    return Workload(
        name=f"{NAME} {seed} {tokens.resolve()}",
        about="GPT-2 (Radford et al. 2019) with 4 layers of width 384, on the sources of Python's standard library.",
        model=seeded(make, seed),
        batch=batch,
        optimizer=adamw(3e-4),
    )


def named(name: str) -> Workload:
    """The job of that name, which holds its seed and the file of its tokens."""
    _, seed, tokens = name.split(" ", 2)
    return workload(Path(tokens), int(seed))
