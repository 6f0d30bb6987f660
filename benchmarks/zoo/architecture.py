"""One Hugging Face architecture: class names and a configuration, from which a model with random weights is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.zoo.batches import Make
from benchmarks.zoo.entry import Entry, Kind


@dataclass(frozen=True)
class Architecture:
    """`config` and `model` are names of classes in `transformers`, which is imported when the model is made."""

    name: str
    config: str
    model: str
    batch: Make
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    backbone: Mapping[str, Any] | None = None
    """Fields of a ResNet's configuration, for the detectors that stand on one."""
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    """What the usual recipe does to the fresh model: freezes a part, or puts its loss around it."""

    def entry(self, kind: Kind) -> Entry:
        return Entry(name=self.name, kind=kind, make=self._make, batch=self.batch)

    def _make(self, dropout: float) -> nn.Module:
        return self.prepare(from_config(self.config, self.model, self.fields, self.backbone, dropout))


def from_config(
    config: str,
    model: str,
    fields: Mapping[str, Any],
    backbone: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
) -> nn.Module:
    """A model with random weights; `config` and `model` are names of classes in `transformers`."""
    import transformers

    fields = dict(fields)
    if backbone is not None:
        fields["backbone_config"] = transformers.ResNetConfig(**backbone)
    settings = getattr(transformers, config)(**fields)
    set_dropout(settings, dropout)
    built = getattr(transformers, model)(settings)
    assert isinstance(built, nn.Module)
    return built


def set_dropout(config: Any, probability: float) -> None:
    """Sets every dropout probability of a configuration and of those within it.

    Whole layers are never dropped (`layerdrop`): that is decided in Python, outside of any graph.
    """
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            set_dropout(value, probability)
        elif key == "classifier_dropout" and value is None:  # some heads take 0.1 then
            config.classifier_dropout = probability
        elif (
            "drop" in key
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
            and not _integral(config, key)
        ):
            setattr(config, key, 0.0 if "layerdrop" in key else probability)


def _integral(config: Any, key: str) -> bool:
    """Whether the field is declared to hold no fraction: a flag, or (MPT's `attn_pdrop`) a whole number."""
    return getattr(type(config), "__annotations__", {}).get(key) in (bool, int, "bool", "int")
