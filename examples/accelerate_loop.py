"""A loop of one's own with Hugging Face accelerate, synchronized by autopar's plans: two processes on this machine.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

The line that is autopar's is `use(Accelerator(...))`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.accelerate import use


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    accelerator = use(Accelerator(cpu=True, gradient_accumulation_steps=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    total = accelerator.gather(loss.detach()[None]).mean()
    if accelerator.is_main_process:
        plan = getattr(model, "plan", None)  # with one process, there is none
        print(f"loss {total:.3f} under {plan.name if plan else 'no plan'}")


if __name__ == "__main__":
    main()
