"""The models that are tried, by the library that they are from."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from difflib import get_close_matches

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.huggingface import ENTRIES as ARCHITECTURES

_LIBRARIES = {
    "huggingface": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
    "geometric": "torch_geometric",
    "audio": "torchaudio",
    "peft": "peft",
}
"""What has to be installed for a family of `benchmarks.zoo.libraries`."""


def families() -> dict[str, tuple[Entry, ...]]:
    """All models, by their family."""
    found = {n: _entries(n) for n in _LIBRARIES}
    return found | {"huggingface": (*ARCHITECTURES, *found["huggingface"])}


def _entries(family: str) -> tuple[Entry, ...]:
    entries: tuple[Entry, ...] = importlib.import_module(f"benchmarks.zoo.libraries.{family}").ENTRIES
    return entries


def missing() -> dict[str, str]:
    """The families whose library is not installed, with its name."""
    return {family: name for family, name in _LIBRARIES.items() if importlib.util.find_spec(name) is None}


def family_of(name: str) -> str:
    """The family of a model, by its name."""
    family, slash, _ = name.partition("/")
    return family if slash else "huggingface"


def chosen(only: Sequence[str]) -> list[Entry]:
    """The models that `only` names, by themselves or by family; all of them where it is empty. Raises `KeyError` with
    the nearest right name."""
    by_family = families()
    if not only:
        return [e for entries in by_family.values() for e in entries]
    by_name = {e.name: e for entries in by_family.values() for e in entries}
    found: dict[str, Entry] = {}
    for name in only:
        if name in by_family:
            found |= {e.name: e for e in by_family[name]}
        elif name in by_name:
            found[name] = by_name[name]
        else:
            near = get_close_matches(name, [*by_family, *by_name], 1)
            raise KeyError(f"no model or family '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    return list(found.values())
