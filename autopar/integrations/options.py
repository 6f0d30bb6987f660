"""What a framework's script hands on to `autopar.optimize`: looked at where it is written, not with the first batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from autopar.api import optimize
from autopar.errors import SpecError, did_you_mean
from autopar.planning import check_choices
from autopar.search.builders import builder_named

_OF_FRAMEWORK = {
    "optimizer": "the framework runs it",
    "example_inputs": "the first batch is the example",
    "loss_fn": "the framework computes the loss",
    "loss_scale": "the framework scales the loss",
    "clip_grad_norm": "the framework clips, once gradients of several micro-batches are added up",
    "budget": "choosing under a budget needs the loss and the optimizer",
    "late_parameters": "the framework runs the optimizer, and reads parameters between steps",
    "optimizer_acts_on": "the framework runs the optimizer",
    "pad": "the framework collates batches",
}
_CHECKED = ("fidelity", "unused_parameters", "capture")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `SpecError` where one is none of `autopar.optimize`'s, none of a framework's script, or not one of its
    choices, and `PlanError` where `strategy` is the name of no plan."""
    known = [n for n in inspect.signature(optimize).parameters if n not in ("model", "cluster_spec", *_OF_FRAMEWORK)]
    for name in options:
        if name in _OF_FRAMEWORK:
            raise SpecError(f"leave {name} out: {_OF_FRAMEWORK[name]}")
        if name not in known:
            raise SpecError(f"autopar.optimize has no option '{name}'{did_you_mean(name, known)}")
    check_choices(**{name: options[name] for name in _CHECKED if name in options})
    if options.get("strategy") is not None:
        builder_named(options["strategy"])
