"""Hugging Face architectures with tiny configurations and random weights, from their configuration classes.

Each is trained as users train it. Some are listed although they cannot be captured as one graph: the capture
benchmark says why not.
"""

from __future__ import annotations

from benchmarks.zoo import perception, text
from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.entry import Entry, Kind

_TABLES: tuple[tuple[Kind, tuple[Architecture, ...]], ...] = (
    ("encoder", text.ENCODERS),
    ("decoder", text.DECODERS),
    ("encoder-decoder", text.ENCODER_DECODERS),
    ("mixture of experts", text.MIXTURES_OF_EXPERTS),
    ("state space", text.STATE_SPACES),
    ("vision", perception.VISION),
    ("audio", perception.AUDIO),
    ("detection", perception.DETECTION),
    ("multimodal", perception.MULTIMODAL),
    ("time series", perception.TIME_SERIES),
)

ENTRIES: tuple[Entry, ...] = tuple(
    architecture.entry(kind) for kind, architectures in _TABLES for architecture in architectures
)
