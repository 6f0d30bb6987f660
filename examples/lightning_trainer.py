"""Lightning, synchronized by autopar's plans: two processes on this machine, which Lightning starts.

    python examples/lightning_trainer.py

What is autopar's is one import, and `strategy="autopar"`.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar.integrations.lightning


class Autoencoder(pl.LightningModule):
    """Its two halves are called by the step, and captured and planned each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 16))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 4) @ torch.randn(4, 16))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="autopar",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Autoencoder(), DataLoader(data, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        name = autopar.integrations.lightning.AutoparStrategy.strategy_name
        print(f"loss {trainer.callback_metrics['loss']:.3f} under {name}")


if __name__ == "__main__":
    main()
