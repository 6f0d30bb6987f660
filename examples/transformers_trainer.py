"""Hugging Face's Trainer, synchronized by autopar's plans: a tiny GPT-2, two processes on this machine.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

The line that is autopar's is `use(trainer)`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from autopar.integrations.transformers import use


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on from a number, of 32."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + i) % 32
        return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_steps=10,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Counting())
    use(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        plan = getattr(trainer.model_wrapped, "plan", None)  # one process needs none
        print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f} under {plan.name if plan else 'no plan'}")


if __name__ == "__main__":
    main()
