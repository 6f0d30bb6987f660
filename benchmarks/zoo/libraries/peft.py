"""Adapters of PEFT on small models of transformers: what is frozen and what is trained is as PEFT makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from benchmarks.zoo import perception, text
from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.batches import CLASSES, causal, images, text_classes, translation
from benchmarks.zoo.entry import Entry, Kind

_LLAMA = Architecture("llama", "LlamaConfig", "LlamaForCausalLM", causal(), text.LLAMA)
_GPT2 = Architecture("gpt2", "GPT2Config", "GPT2LMHeadModel", causal(), text.GPT)
_BERT = Architecture(
    "bert", "BertConfig", "BertForSequenceClassification", text_classes(), text.BERT | {"num_labels": CLASSES}
)
_T5 = Architecture("t5", "T5Config", "T5ForConditionalGeneration", translation(), text.T5)
_VIT = Architecture("vit", "ViTConfig", "ViTForImageClassification", images(), perception.VIT)
_RESNET = Architecture("resnet", "ResNetConfig", "ResNetForImageClassification", images(), perception.RESNET)
_MIXTRAL = Architecture(
    "mixtral", "MixtralConfig", "MixtralForCausalLM", causal(), text.LLAMA | text.EXPERTS | {"num_local_experts": 4}
)

_KINDS: Mapping[str, Kind] = {
    "llama": "decoder",
    "gpt2": "decoder",
    "bert": "encoder",
    "t5": "encoder-decoder",
    "vit": "vision",
    "resnet": "vision",
    "mixtral": "mixture of experts",
}


@dataclass(frozen=True)
class Adapter:
    """One configuration class of PEFT, on one model."""

    config: str
    base: Architecture
    fields: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    """What tells entries of one class apart."""
    task: str | None = "CAUSAL_LM"

    def entry(self) -> Entry:
        name = f"peft/{(self.variant or self.config.removesuffix('Config'))} {self.base.name}"
        return replace(self.base.entry(_KINDS[self.base.name]), name=name, make=self._make)

    def _make(self, dropout: float) -> nn.Module:
        import peft

        settings = getattr(peft, self.config)(task_type=self.task, **self.fields)
        adapted = peft.get_peft_model(self.base.entry("plain").make(dropout), settings)
        for module in adapted.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        assert isinstance(adapted, nn.Module)
        return adapted


def _on_llama(config: str, variant: str = "", **fields: Any) -> Adapter:
    return Adapter(config, _LLAMA, {"target_modules": ["q_proj", "v_proj"], **fields}, variant)


_CLASSIFIER: Mapping[str, Any] = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
_CONVOLUTIONS: Mapping[str, Any] = {"target_modules": ["convolution"], "modules_to_save": ["classifier"], "r": 4}
_VIRTUAL: Mapping[str, Any] = {"num_virtual_tokens": 4}

ADAPTERS: tuple[Adapter, ...] = (
    _on_llama("LoraConfig", "LoRA", r=4),
    _on_llama("LoraConfig", "DoRA", r=4, use_dora=True),
    _on_llama("LoraConfig", "rsLoRA", r=4, use_rslora=True),
    _on_llama("LoraConfig", "LoRA and bias", r=4, bias="lora_only", lora_bias=True),
    _on_llama("LoraConfig", "LoRA on all layers", r=4, target_modules="all-linear"),
    _on_llama("LoraConfig", "LoRA and embeddings", r=4, target_modules=["q_proj", "embed_tokens"]),
    _on_llama("LoraConfig", "LoRA and tokens", r=4, trainable_token_indices=[4, 5]),
    _on_llama("LoraConfig", "LoRA and a head", r=4, modules_to_save=["lm_head"]),
    _on_llama("AdaLoraConfig", r=4, init_r=6, total_step=100, tinit=5, tfinal=5),
    _on_llama("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    _on_llama("LoHaConfig", r=4),
    _on_llama("LoKrConfig", r=4),
    _on_llama("VeraConfig", r=8),
    _on_llama("OFTConfig", oft_block_size=8),
    _on_llama("BOFTConfig", boft_block_size=8),
    _on_llama("FourierFTConfig", n_frequency=20),
    _on_llama("HRAConfig", r=4),
    _on_llama("VBLoRAConfig", r=4, num_vectors=16, vector_length=8, topk=2),
    _on_llama("RandLoraConfig", r=4),
    _on_llama("MissConfig", r=4),
    _on_llama("ShiraConfig", r=4),
    _on_llama("C3AConfig", block_size=8),
    _on_llama("RoadConfig", group_size=8),
    _on_llama("DeloraConfig", r=4),
    _on_llama("LNTuningConfig", target_modules=["input_layernorm", "post_attention_layernorm", "norm"]),
    Adapter("TrainableTokensConfig", _LLAMA, {"token_indices": [4, 5, 6], "target_modules": ["embed_tokens"]}),
    Adapter("PrefixTuningConfig", _LLAMA, _VIRTUAL),
    Adapter("PromptTuningConfig", _LLAMA, _VIRTUAL),
    Adapter("PromptEncoderConfig", _LLAMA, {**_VIRTUAL, "encoder_hidden_size": 16}),
    Adapter("AdaptionPromptConfig", _LLAMA, {"adapter_len": 4, "adapter_layers": 2}),
    Adapter("LoraConfig", _GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "r": 4}, "LoRA"),
    Adapter("PrefixTuningConfig", _GPT2, _VIRTUAL),
    Adapter("IA3Config", _GPT2, {"target_modules": ["c_attn"], "feedforward_modules": [], "fan_in_fan_out": True}),
    Adapter("LoraConfig", _MIXTRAL, {"target_modules": ["q_proj", "v_proj"], "r": 4}, "LoRA"),
    Adapter("LoraConfig", _BERT, {**_CLASSIFIER, "r": 4}, "LoRA", "SEQ_CLS"),
    Adapter("VeraConfig", _BERT, {**_CLASSIFIER, "r": 8}, task="SEQ_CLS"),
    Adapter("PromptTuningConfig", _BERT, _VIRTUAL, task="SEQ_CLS"),
    Adapter("LoraConfig", _T5, {"target_modules": ["q", "v"], "r": 4}, "LoRA", "SEQ_2_SEQ_LM"),
    Adapter("IA3Config", _T5, {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]}, task="SEQ_2_SEQ_LM"),
    Adapter("PrefixTuningConfig", _T5, _VIRTUAL, task="SEQ_2_SEQ_LM"),
    Adapter("LoraConfig", _VIT, {"target_modules": ["q_proj", "v_proj"], "r": 4}, "LoRA", None),
    Adapter("LoraConfig", _RESNET, _CONVOLUTIONS, "LoRA", None),
    Adapter("LoraConfig", _RESNET, {**_CONVOLUTIONS, "use_dora": True}, "DoRA", None),
    Adapter("LoHaConfig", _RESNET, {**_CONVOLUTIONS, "use_effective_conv2d": True}, task=None),
    Adapter("LoKrConfig", _RESNET, _CONVOLUTIONS, task=None),
)
"""Most on a Llama; then the models on which the more usual ones differ: `Conv1D`, classifiers, encoders with decoders,
convolutions."""

ENTRIES: tuple[Entry, ...] = tuple(adapter.entry() for adapter in ADAPTERS)
