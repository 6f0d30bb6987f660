"""A MODEL argument as ranks train it: what `autopar.lab.trial.RealCompute` names, imported by each rank."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

import torch
from torch import nn

from autopar.cli.model_argument import chosen_optimizer, load_model
from autopar.cli.precision import autocasting
from autopar.errors import SpecError
from autopar.ir.batch import example_batch
from autopar.ir.build import named_parameters


class Trained:
    """The model, its optimizer and its example batch, which every rank trains on in every step."""

    def __init__(
        self, argument: str, optimizer: str = "", dtype: str = "", autocast: str = "", on_processors: str = ""
    ) -> None:
        """Arguments are those of `autopar search`; empty where they were not given. The model stands under autocast for
        as long as this process lives. `on_processors`: the ranks that compute on processors, as in `0,1`, whatever else
        their machines have."""
        torch.manual_seed(0)
        self._made = load_model(argument, dtype=dtype or None)
        chosen = chosen_optimizer(self._made, optimizer or None)
        if chosen is None:
            raise SpecError("trials run whole steps, which takes an optimizer: leave --optimizer none out")
        self._optimizer = chosen
        self.loss_fn = self._made.loss_fn
        example = self._made.example_inputs
        self._batch = example_batch(self._made.model) if example is None else example
        self._modes = contextlib.ExitStack()
        self._modes.enter_context(autocasting(self._made.model, autocast or None))
        if torch.cuda.is_available() and os.environ.get("RANK", "0") not in on_processors.split(","):
            device = torch.device("cuda", torch.cuda.current_device())
            self._made.model.to(device)
            self._batch = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), self._batch)

    def model(self) -> nn.Module:
        return self._made.model

    def batch(self, step: int, rank: int) -> Any:
        return self._batch

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A copy of the optimizer, of another copy of the model."""
        own, theirs = (named_parameters(of, self.loss_fn) for of in (self._made.model, model))
        return copy.deepcopy(self._optimizer, {id(p): theirs[name] for name, p in own.items()})
