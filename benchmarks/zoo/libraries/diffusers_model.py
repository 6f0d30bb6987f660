"""One class of diffusers, and how it is trained: denoisers predict noise (or a velocity) with a mean squared error, as
in diffusers' example scripts, autoencoders give back what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import generator
from benchmarks.zoo.entry import Batch, Entry, LossFn
from benchmarks.zoo.libraries.draws import Draw, normal

WIDTH = 32
TEXT = 6
"""Tokens of a prompt."""
LATENT = normal(4, 16, 16)
PROMPT = normal(TEXT, WIDTH)
STAGES: Mapping[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
HEADS: Mapping[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
PATCHES: Mapping[str, Any] = {**HEADS, "sample_size": 16, "patch_size": 2, "in_channels": 4}


def denoised(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.sample, target)


def quantized(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The loss of VQ-VAE: what is given back, and how far codes are from their book."""
    reconstruction = F.mse_loss(output.sample, target)
    return reconstruction + output.commit_loss  # type: ignore[no-any-return]


def embedded(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.predicted_image_embedding, target)


def worded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the codes of a picture, (n, codes, height, width)."""
    return F.cross_entropy(output, target)


class Tiny(nn.Module):
    """An autoencoder without the rounding to bytes that its own forward pass has between its halves."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: torch.Tensor) -> Any:
        return self.model.decode(self.model.encode(sample).latents)  # type: ignore[operator]


class Variational(nn.Module):
    """An autoencoder with the loss of a VAE: the squared error, and a little of the divergence from N(0, 1)."""

    WEIGHT = 1e-6

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        posterior = self.model.encode(sample).latent_dist  # type: ignore[operator]
        found = self.model.decode(posterior.mode()).sample  # type: ignore[operator]
        return {"loss": F.mse_loss(found, sample) + self.WEIGHT * posterior.kl().mean()}


class Frames(nn.Module):
    """Gives a model how many frames a sample has, which is a number of the call, not of the batch."""

    def __init__(self, model: nn.Module, **numbers: Any) -> None:
        super().__init__()
        self.model = model
        self.numbers = numbers

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**inputs, **self.numbers)


def copied(model: nn.Module) -> nn.Module:
    """Weights that `torch.nn.utils.weight_norm` has computed are made anew in each forward pass; until then, they keep
    a model from being copied."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "weight_g") and isinstance(weight, torch.Tensor):
            module.weight = weight.detach()
    return model


class PromptOfEachFrame(nn.Module):
    """Repeats a video's prompt for its frames, as AnimateDiff's pipeline does before it calls the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        return self.model(sample, timestep, encoder_hidden_states.repeat_interleave(sample.shape[2], dim=0))


class Controlled(nn.Module):
    """A ControlNet that is trained beside a frozen denoiser, as diffusers' `train_controlnet.py` does."""

    def __init__(self, denoiser: nn.Module, control: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser.requires_grad_(False)
        self.control = control

    def forward(self, controlnet_cond: torch.Tensor, **inputs: torch.Tensor) -> Any:
        added = self.control(**inputs, controlnet_cond=controlnet_cond)
        if hasattr(added, "mid_block_res_sample"):
            return self.denoiser(
                **inputs,
                down_block_additional_residuals=added.down_block_res_samples,
                mid_block_additional_residual=added.mid_block_res_sample,
            )
        samples = {"block_controlnet_hidden_states": added.controlnet_block_samples}
        return self.denoiser(**inputs, **samples)


@dataclass(frozen=True)
class Model:
    """One class of diffusers."""

    name: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Draw]
    target: Draw | str
    """An input's name where that is what is to be given back."""
    loss: LossFn | None = denoised
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    control: tuple[str, Mapping[str, Any]] | None = None
    """The class and configuration of a ControlNet that is trained in the model's place."""

    def entry(self) -> Entry:
        trained = self.control[0] if self.control else self.name
        return Entry(f"diffusers/{trained}", "diffusion", self._make, self._batch, self.loss)

    def _make(self, dropout: float) -> nn.Module:
        import diffusers

        model = getattr(diffusers, self.name)(**self.config)
        if self.control is not None:
            model = Controlled(model, getattr(diffusers, self.control[0])(**self.control[1]))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
            if hasattr(module, "dropout_prob"):  # of class labels, at a rate of its own
                module.dropout_prob = dropout
        return self.wrap(model)

    def _batch(self, n: int, seed: int) -> Batch:
        g = generator(seed)
        inputs = {name: draw(g, n) for name, draw in self.inputs.items()}
        if self.loss is None:
            return inputs
        return inputs, inputs[self.target] if isinstance(self.target, str) else self.target(g, n)
