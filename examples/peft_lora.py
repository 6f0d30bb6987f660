"""LoRA with PEFT, trained by Hugging Face's Trainer and synchronized by autopar's plans: two processes on this machine.

    torchrun --nproc-per-node 2 examples/peft_lora.py

The adapters alone are planned and sent. The line that is autopar's is `use(trainer)`.
"""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    folder = tempfile.mkdtemp()
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        max_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Counting())
    use(trainer)
    trainer.train()
    trainer.save_model(folder)  # the adapter, as PEFT saves it
    if trainer.is_world_process_zero():
        plan = getattr(trainer.model_wrapped, "plan", None)  # one process needs none
        sent = sum(1 for p in model.parameters() if p.requires_grad)
        name = plan.name if plan else "no plan"
        print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f}, {sent} parameters under {name}")


if __name__ == "__main__":
    main()
