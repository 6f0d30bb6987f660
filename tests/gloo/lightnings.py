"""What the tests of Lightning run, in one process and on two ranks."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gloo.frameworks import EVEN, UNEVEN, Sizes, flat, loader, quiet, said


class Handing(nn.Sequential):
    """Takes what it is given by position, and more by keyword."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args) * kwargs["scale"]


class Lit(pl.LightningModule):
    """Trained in one of several ways: with a forward, with parts, with parameters of its own, by hand, with a buffer
    that the step itself writes."""

    def __init__(self, way: str, dropout: float = 0.0, normalizes: bool = False) -> None:
        super().__init__()
        self.way = way
        middle = nn.BatchNorm1d(5, affine=False) if normalizes else nn.Tanh()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.Dropout(dropout), middle, nn.Linear(5, 5))
        self.decoder = nn.Linear(5, 1)
        self.handing = Handing(self.encoder, self.decoder) if way == "both kinds" else None
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.center = nn.Buffer(torch.zeros(1, dtype=torch.float64))
        self.automatic_optimization = way not in ("by hand", "penalty")
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.decoder(self.encoder(x))
        return y

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        if self.way in ("parts", "evaluating"):
            output = self.decoder(self.encoder(x)) * self.scale
        elif self.way == "layers":  # one of which has no parameters
            for layer in (*self.encoder, self.decoder):
                x = layer(x)
            output = x
        elif self.way == "turns":  # a synchronizing backward pass comes to the decoder alone
            output = self.decoder(x[:, :5]) if index % 2 else self.encoder(x).mean(1, keepdim=True)
        elif self.way == "both kinds":  # of arguments, which no graph can be made for
            output = self.handing(x, scale=2.0)  # type: ignore[misc]
        elif self.way == "checkpoint":
            output = self.decoder(checkpoint(self.encoder, x, use_reentrant=False))
        elif self.way == "beside":
            output = self(x) + F.linear(self.encoder(x), self.decoder.weight)
        else:
            output = self(x) * self.scale
        if self.way == "center":
            output = output - self.center
            self.center.lerp_(output.detach().mean(0), 0.5)
        loss = F.mse_loss(output, y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(loss))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.way == "penalty":  # which no module computes
                self.manual_backward(x.mean() * self.decoder.weight.norm())
            optimizer.step()
        return loss

    def on_train_epoch_start(self) -> None:
        if self.way == "evaluating" and self.current_epoch:
            self.encoder.eval()

    def validation_step(self, batch: Any, index: int) -> None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("validation", loss, sync_dist=True)
        self.validated.append(float(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Lora(Lit):
    """PEFT within a LightningModule."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__("forward")
        config = LoraConfig(r=2, target_modules=["0", "3"], init_lora_weights=False)
        self.encoder = get_peft_model(self.encoder, config)  # type: ignore[assignment]


class Headless(pl.LightningModule):
    """One without a forward of its own."""

    def training_step(self, batch: Any, index: int) -> None:
        return None


def trained(strategy: Any, way: str, sizes: Sizes, n: int, rank: int, accumulates: int = 1, **given: Any) -> Any:
    """The Trainer and the LightningModule, trained."""
    torch.manual_seed(rank)  # ranks begin unequal: they take rank 0's values
    module = (Lora() if way == "LoRA" else Lit(way, given.pop("dropout", 0.0), given.pop("normalizes", False))).double()
    torch.manual_seed(5)
    path, epochs = given.pop("ckpt_path", None), given.pop("max_epochs", 2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=n,
        strategy=strategy,
        max_epochs=epochs,
        precision="64-true",
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulates,
        gradient_clip_val=0.3 if module.automatic_optimization else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
        **given,
    )
    trainer.fit(module, loader(sizes, rank, n), loader(EVEN[:1], rank, n), ckpt_path=path)
    return trainer, module


def resumed(rank: int, n: int) -> bool:
    """Whether a run that goes on from a checkpoint of one epoch ends as one of two epochs does."""
    folder = [tempfile.mkdtemp(prefix="autopar-test-") if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = folder[0] + "/half.ckpt"
    whole = trained("autopar", "forward", EVEN, n, rank)[1]
    trained("autopar", "forward", EVEN, n, rank, max_epochs=1)[0].save_checkpoint(path)
    rest = trained("autopar", "forward", EVEN, n, rank, ckpt_path=path)[1]
    return flat(whole) == flat(rest)


def says(rank: int, n: int) -> dict[str, str]:
    """What is refused, and how."""
    import autopar
    from autopar.integrations.lightning import AutoparStrategy

    compiled = Lit("parts")
    compiled.encoder.compile()

    def fit(module: Any) -> None:
        trainer = pl.Trainer(accelerator="cpu", devices=n, strategy="autopar", logger=False, enable_checkpointing=False)
        trainer.fit(module, loader(EVEN, rank, n))

    return {
        "compiled": said(lambda: fit(compiled)),
        "a module without a forward": said(lambda: autopar.optimize(Headless())),
        "a trainer": said(lambda: autopar.optimize(pl.Trainer(logger=False))),  # type: ignore[call-overload]
        "hook": said(lambda: AutoparStrategy(ddp_comm_hook=print)),
        "misspelt": said(lambda: AutoparStrategy(fidelty="rounded")),
    }


def everything(rank: int, n: int) -> dict[str, Any]:
    importlib.import_module("autopar.integrations.lightning")  # registers "autopar"
    quiet()
    one = n == 1
    strategy = "auto" if one else "autopar"
    ways = {"forward": 1, "parts": 2, "by hand": 1, "beside": 2, "LoRA": 2}
    ways |= {"evaluating": 1, "turns": 2, "penalty": 1, "checkpoint": 1, "both kinds": 1}
    found: dict[str, Any] = {w: flat(trained(strategy, w, UNEVEN, n, rank, k)[1]) for w, k in ways.items()}
    if one:
        return found
    for kind in ("ddp_find_unused_parameters_true", "autopar"):
        trainer, module = trained(kind, "forward", EVEN, n, rank, 2, dropout=0.2)
        logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
        beside = [trained(kind, way, EVEN, n, rank, normalizes=True)[1] for way in ("forward", "layers", "center")]
        averages: Any = [EMAWeightAveraging(decay=0.7)]
        beside.append(trained(kind, "forward", EVEN, n, rank, normalizes=True, callbacks=averages)[1])
        found[f"validated {kind[:3]}"] = [x for m in beside for x in (*flat(m), *m.losses, *m.validated)]
        found[f"even {kind[:3]}"] = [*flat(module), *module.losses, logged["loss"], logged["validation"]]
    found["plans"] = list(trainer.strategy.plans)
    return found | {"resumed": resumed(rank, n), "says": says(rank, n)}
