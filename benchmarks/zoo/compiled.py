"""Models of a few equal layers, wide enough that a step takes a tenth of a second: for compiled compute.

Dropout is left to the caller: the compilers that are compared draw random numbers in ways of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.batches import CLASSES, causal, images, masked
from benchmarks.zoo.entry import Entry, Kind

_VOCABULARY = 4096
_IMAGE: dict[str, Any] = {"image_size": 64, "num_labels": CLASSES}
_TEXT: dict[str, Any] = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
_WIDTH: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}


def entries() -> tuple[Entry, ...]:
    """Transformers of 6 layers of 256, on 512 tokens; a ConvNeXt and a ResNet on 8 images of 64 x 64."""
    words, blanks = causal(128, _VOCABULARY), masked(128, _VOCABULARY, padded=False)
    gpt2 = _TEXT | {"n_layer": 6, "n_embd": 256, "n_head": 4}
    llama = _TEXT | _WIDTH | {"num_key_value_heads": 4, "intermediate_size": 688}
    bert = {"vocab_size": _VOCABULARY} | _WIDTH | {"intermediate_size": 1024}
    vit = _IMAGE | _WIDTH | {"intermediate_size": 1024, "patch_size": 8}
    stages = {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 6, 2], "num_labels": CLASSES}
    return (
        _sized("gpt2", "GPT2Config", "GPT2LMHeadModel", words, gpt2, "decoder", 4),
        _sized("llama", "LlamaConfig", "LlamaForCausalLM", words, llama, "decoder", 4),
        _sized("qwen2", "Qwen2Config", "Qwen2ForCausalLM", words, llama, "decoder", 4),
        _sized("bert", "BertConfig", "BertForMaskedLM", blanks, bert, "encoder", 4),
        _sized("vit", "ViTConfig", "ViTForImageClassification", images(64), vit, "vision", 8),
        _sized("convnext", "ConvNextConfig", "ConvNextForImageClassification", images(64), stages, "vision", 8),
    )


def _sized(name: str, config: str, model: str, batch: Any, fields: dict[str, Any], kind: Kind, size: int) -> Entry:
    return replace(Architecture(name, config, model, batch, fields).entry(kind), batch_size=size)
