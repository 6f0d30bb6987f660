"""What is trained: a GPT-2 of the standard library's tokens, the same on every system from the same seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.demo.text import VOCABULARY, load


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer. Plain values, so that it travels to the ranks as JSON."""

    tokens: str
    """File of token ids."""
    seed: int = 0
    layers: int = 4
    width: int = 384
    batch_size: int = 4
    """Sequences a rank and step."""
    sequence_length: int = 64
    learning_rate: float = 3e-4

    def model(self) -> nn.Module:
        """A fresh model, the same one each time. Without dropout, whose random stream would differ between systems."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=self.sequence_length,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.width // 64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = GPT2LMHeadModel(config).train()
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def batch(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        """The batch of one rank in one step: sequences from places that the seed, the step and the rank decide."""
        tokens = load(Path(self.tokens))
        random = np.random.default_rng([self.seed, step, rank])
        starts = random.integers(0, len(tokens) - self.sequence_length, size=self.batch_size)
        rows = np.stack([tokens[s : s + self.sequence_length] for s in starts])
        ids = torch.from_numpy(rows.astype(np.int64))
        return {"input_ids": ids, "labels": ids}
