"""Models of the size that people train, for the overhead benchmark: BERT-base, GPT-2 small, ResNet-50.

`scaled` gives the same architectures with few and narrow layers, to try a benchmark out in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.batches import causal, generator, masked
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.plain import cross_entropy
from benchmarks.zoo.resnet import RESNET50, ResNet

_BERT_VOCABULARY = 30522
_GPT2_VOCABULARY = 50257


def entries(scaled: bool = False) -> tuple[Entry, ...]:
    """BERT-base at 8 x 128 tokens, GPT-2 small at 4 x 128, ResNet-50 at 8 images of 224 x 224; or all `scaled` down."""
    return _bert(scaled), _gpt2(scaled), _resnet(scaled)


def _bert(scaled: bool) -> Entry:
    fields = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    batch = masked(128, _BERT_VOCABULARY, padded=False)
    name = "bert-base, scaled down" if scaled else "bert-base"
    architecture = Architecture(name, "BertConfig", "BertForMaskedLM", batch, fields if scaled else {})
    return replace(architecture.entry("encoder"), batch_size=8)


def _gpt2(scaled: bool) -> Entry:
    fields = {"n_layer": 2, "n_embd": 128, "n_head": 4}
    batch = causal(128, _GPT2_VOCABULARY)
    name = "gpt2-small, scaled down" if scaled else "gpt2-small"
    architecture = Architecture(name, "GPT2Config", "GPT2LMHeadModel", batch, fields if scaled else {})
    return replace(architecture.entry("decoder"), batch_size=4)


def _resnet(scaled: bool) -> Entry:
    size, width = (64, 16) if scaled else (224, 64)

    def make(dropout: float) -> nn.Module:
        return ResNet(RESNET50, width=width, expansion=4, dropout=dropout)

    def batch(n: int, seed: int) -> Any:
        g = generator(seed)
        return torch.randn(n, 3, size, size, generator=g), torch.randint(1000, (n,), generator=g)

    name = "resnet-50, scaled down" if scaled else "resnet-50"
    return Entry(name, "vision", make, batch, cross_entropy, 8)
