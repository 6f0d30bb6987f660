"""Dropout of models whose libraries set it in many ways."""

from __future__ import annotations

from typing import Any

from torch import nn

_ELEMENTS = ("drop_rate", "attention_dropout")
_PATHS = ("drop_prob", "drop_path_rate")
"""Probabilities of leaving out a whole path, which is drawn for each sample."""


def with_dropout(model: Any, probability: float) -> nn.Module:
    """The model with that probability of dropout, and none of leaving out whole paths."""
    assert isinstance(model, nn.Module)
    for module in model.modules():
        values: dict[str, float] = dict.fromkeys(_ELEMENTS, probability) | dict.fromkeys(_PATHS, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            values["p"] = probability
        elif isinstance(module, nn.MultiheadAttention):
            values["dropout"] = probability
        elif type(module).__name__ == "StochasticDepth":
            values["p"] = 0.0
        for name, value in values.items():
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, value)
    return model
