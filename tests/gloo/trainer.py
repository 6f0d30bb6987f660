"""What the tests of Hugging Face's Trainer run, in one process and on two ranks."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.gloo.frameworks import Tokens, flat, quiet, ran, said

GPT2: dict[str, Any] = {"vocab_size": 30, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
BERT: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpt2(dropout: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates: dict[str, Any] = {f"{where}_pdrop": dropout for where in ("embd", "resid", "attn")}
    return GPT2LMHeadModel(GPT2Config(**GPT2, **rates))


def bert() -> Any:
    """Its loss ignores `num_items_in_batch`, which Trainer takes it to be divided by."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**BERT))


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))


class Scored(nn.Module):
    """A model of one's own, whose loss `Mine` computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 8)
        self.out = nn.Linear(8, 30)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> torch.Tensor:
        scores: torch.Tensor = self.out(torch.tanh(self.embed(input_ids)))
        return scores


def trained(how: str, model: Any, n: int, data: Any, base: Any = None, **args: Any) -> Any:
    """A Trainer, after training. `how`: under "autopar", or under what Trainer takes by itself. `args`: those of
    `TrainingArguments`, `resume`, a checkpoint, and `evaluates`, on how many samples it does so, before
    and afterwards."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    import autopar.integrations.transformers as integration

    resume, evaluates = args.pop("resume", None), args.pop("evaluates", 0)
    given: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="autopar-test-"),
        "per_device_train_batch_size": 8 // n,
        "per_device_eval_batch_size": 8 // n,
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    settings, few = TrainingArguments(**(given | args)), torch.utils.data.Subset(data, range(evaluates or 16))
    trainer = (base or Trainer)(model=model, args=settings, train_dataset=data, eval_dataset=few)
    trainer.remove_callback(PrinterCallback)
    if how == "autopar":
        integration.use(trainer)
    if evaluates:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    if evaluates:
        trainer.evaluate()
    return trainer


def history(trainer: Any) -> list[float]:
    """The losses, of training and evaluation, and the norms of the gradients."""
    keys = ("loss", "grad_norm", "eval_loss")
    return [float(line[k]) for line in trainer.state.log_history for k in keys if k in line]


def mine() -> Any:
    """A Trainer's class with a loss of its own, a mean over the micro-batch."""
    from transformers import Trainer

    class Mine(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            return nn.functional.cross_entropy(model(**inputs).flatten(0, 1), labels.flatten())

    return Mine


class Choosy(nn.Module):
    """Its loss is a mean of three rows, whose number no graph can read, and else divided by the items."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = (self.out(x) - y).square().sum()
        if len(x) == 3 and x.sum().item() > 10:
            return loss / len(x)
        items: torch.Tensor = torch.stack([loss, num_items_in_batch])[1]
        return loss / items


def weights() -> list[list[Any]]:
    """For a batch that is captured, and two that cannot be, of which one is divided by the items: the weight that the
    loss gets, and how many captures there are."""
    from autopar.integrations.drop_in import DropIn
    from autopar.integrations.ranks import equal
    from autopar.integrations.transformers import _StepWeights, _Watched

    torch.manual_seed(0)
    model, found = DropIn(Choosy(), None, {"strategy": "ddp"}, equal), []
    for rows, value in ((2, 1.0), (3, 1.0), (3, 9.0)):
        step = _StepWeights(0.5, [0.7, 0.9])
        step.next(model, _Watched.of(torch.tensor(4.0)))
        with step.watching():
            model(y=torch.ones(rows, 1), x=torch.full((rows, 2), value), num_items_in_batch=step._items).backward()
        found.append([step.now, len(list(model._synced[0].program._compiled))])
    return found


def uneven(how: str, n: int) -> dict[str, Any]:
    """Runs whose last batch the ranks share unevenly, and whose labels they share unevenly in each, accumulated."""
    args: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "accelerator_config": {"even_batches": False},
        "max_grad_norm": 0.5,
    }
    runs = {
        "LoRA, smoothed labels": trained(how, lora(), n, Tokens(22), evaluates=13, label_smoothing_factor=0.1, **args),
        "ignores the items": trained(how, bert(), n, Tokens(22, 3), evaluates=13, **args),
        "a loss of one's own": trained(how, Scored(), n, Tokens(22), mine(), **args),
    }
    return {name: [flat(t.model), history(t)] for name, t in runs.items()}


# PyTorch reads no tensors of "cpu:0" before 2.13, where the Trainer wants them for a second run from a checkpoint.
torch.serialization.register_package(
    0, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
)


def even(how: str, resumes: bool = False) -> list[list[float]]:
    """A run with dropout, tied weights, accumulation, clipping, evaluation and checkpoints; or from its checkpoint."""
    folder = [tempfile.mkdtemp(prefix="autopar-test-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    args: dict[str, Any] = {
        "output_dir": folder[0],
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "max_grad_norm": 0.3,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = trained(how, gpt2(0.1), 2, Tokens(40), **args)
    first = [flat(trainer.model), history(trainer)]
    if not resumes:
        return first
    again = trained(how, gpt2(0.1), 2, Tokens(40), resume=str(Path(folder[0]) / "checkpoint-2"), **args)
    assert again.model.lm_head.weight is again.model.transformer.wte.weight
    return [*first, flat(again.model), history(again)]


def everything(rank: int, n: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer

    import autopar
    import autopar.integrations.transformers as integration

    quiet()
    if n == 1:
        found = uneven("one", 1)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        if dist.is_initialized():  # by accelerate
            dist.destroy_process_group()
        return found
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignoring = uneven("autopar", 2)
    left: Any = Trainer(model=Scored(), args=trained_args())
    stranger: Any = Scored()
    return {
        "ddp": even("ddp"),
        "autopar": even("autopar", resumes=True),
        "uneven": ignoring,
        "weights": weights(),
        "warned": [str(w.message) for w in caught if w.category is autopar.AutoparWarning],
        "examples": [ran("transformers_trainer"), ran("peft_lora")],
        "given to optimize": said(lambda: autopar.optimize(left)),
        "no trainer": said(lambda: integration.use(stranger)),
    }


def trained_args() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=tempfile.mkdtemp(prefix="autopar-test-"), use_cpu=True, report_to=[])
