"""Tiny configurations of architectures that take text."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.batches import CLASSES, VOCABULARY, causal, masked, text_classes, translation

Fields = dict[str, Any]

SPECIAL: Fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

BERT: Fields = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LLAMA: Fields = BERT | SPECIAL | {"num_key_value_heads": 2}
GPT: Fields = SPECIAL | {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BART: Fields = SPECIAL | {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: Fields = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
EXPERTS: Fields = {"num_experts_per_tok": 2}
MAMBA: Fields = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def _encoder(name: str, prefix: str, head: str = "ForMaskedLM", **fields: Any) -> Architecture:
    batch = masked() if head == "ForMaskedLM" else text_classes()
    labels = {} if head == "ForMaskedLM" else {"num_labels": CLASSES}
    return Architecture(name, f"{prefix}Config", f"{prefix}{head}", batch, BERT | labels | fields)


def _decoder(name: str, prefix: str, base: Fields, model: str = "", **fields: Any) -> Architecture:
    return Architecture(name, f"{prefix}Config", model or f"{prefix}ForCausalLM", causal(), base | fields)


def _encoder_decoder(name: str, prefix: str, base: Fields, model: str = "", **fields: Any) -> Architecture:
    model = model or f"{prefix}ForConditionalGeneration"
    return Architecture(name, f"{prefix}Config", model, translation(), base | fields)


ENCODERS = (
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    Architecture(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        masked(),
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 64,
        },
    ),
    _encoder("albert", "Albert", embedding_size=16),
    _encoder("electra", "Electra", "ForSequenceClassification", embedding_size=16),
    _encoder(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _encoder("mpnet", "MPNet"),
    _encoder(
        "mobilebert",
        "MobileBert",
        embedding_size=16,
        true_hidden_size=32,
        intra_bottleneck_size=32,
        num_feedforward_networks=2,
    ),
    _encoder("convbert", "ConvBert", embedding_size=32, head_ratio=2),
    Architecture("fnet", "FNetConfig", "FNetForMaskedLM", masked(padded=False), BERT),
    _encoder("roformer", "RoFormer", embedding_size=32),
    _encoder("rembert", "RemBert", **SPECIAL, input_embedding_size=16, output_embedding_size=16),
    _encoder("modernbert", "ModernBert", **SPECIAL, cls_token_id=1, sep_token_id=2),
    Architecture(
        "xlnet",
        "XLNetConfig",
        "XLNetForSequenceClassification",
        text_classes(),
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": CLASSES},
    ),
    _encoder("longformer", "Longformer", attention_window=[8, 8]),
)

DECODERS = (
    _decoder("gpt2", "GPT2", GPT, "GPT2LMHeadModel"),
    _decoder(
        "gpt-neo",
        "GPTNeo",
        SPECIAL
        | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64},
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    _decoder("gpt-neox", "GPTNeoX", BERT),
    _decoder("gpt-j", "GPTJ", GPT, rotary_dim=4),
    _decoder("opt", "OPT", BERT | SPECIAL, ffn_dim=64, word_embed_proj_dim=32),
    _decoder("bloom", "Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    _decoder("mpt", "Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    _decoder("falcon", "Falcon", {k: v for k, v in BERT.items() if k != "intermediate_size"}),
    _decoder("llama", "Llama", LLAMA),
    _decoder("mistral", "Mistral", LLAMA, sliding_window=8),
    _decoder("qwen2", "Qwen2", LLAMA),
    _decoder("qwen3", "Qwen3", LLAMA, head_dim=8),
    _decoder("gemma", "Gemma", LLAMA, head_dim=8),
    _decoder("gemma3", "Gemma3Text", LLAMA, "Gemma3ForCausalLM", head_dim=8, sliding_window=8),
    _decoder("phi", "Phi", LLAMA),
    _decoder("olmo2", "Olmo2", LLAMA),
    _decoder("cohere", "Cohere", LLAMA),
    _decoder("ctrl", "CTRL", GPT, "CTRLLMHeadModel", dff=64),
)

ENCODER_DECODERS = (
    _encoder_decoder("t5", "T5", T5),
    _encoder_decoder("mt5", "MT5", T5),
    _encoder_decoder("longt5", "LongT5", T5, local_radius=4),
    _encoder_decoder("bart", "Bart", BART),
    _encoder_decoder("pegasus", "Pegasus", BART),
    _encoder_decoder("marian", "Marian", BART, "MarianMTModel"),
)

MIXTURES_OF_EXPERTS = (
    _decoder("mixtral", "Mixtral", LLAMA | EXPERTS, num_local_experts=4, output_router_logits=True),
    _decoder(
        "qwen2-moe",
        "Qwen2Moe",
        LLAMA | EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        output_router_logits=True,
    ),
    _decoder("olmoe", "Olmoe", LLAMA | EXPERTS, num_experts=4),
    _decoder(
        "gpt-oss",
        "GptOss",
        LLAMA | EXPERTS,
        num_local_experts=4,
        head_dim=8,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    _decoder(
        "deepseek-v3",
        "DeepseekV3",
        LLAMA | EXPERTS | {"num_key_value_heads": 4},
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    _decoder("jetmoe", "JetMoe", LLAMA | EXPERTS, kv_channels=8, num_local_experts=4),
    _encoder_decoder(
        "switch-transformers",
        "SwitchTransformers",
        T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=32,
        router_jitter_noise=0.0,
    ),
)

STATE_SPACES = (
    _decoder("mamba", "Mamba", MAMBA, time_step_rank=4),
    _decoder("mamba2", "Mamba2", MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    _decoder(
        "recurrent-gemma",
        "RecurrentGemma",
        LLAMA,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    _decoder(
        "zamba2",
        "Zamba2",
        LLAMA | {"num_key_value_heads": 4},
        layers_block_type=["mamba", "hybrid"],
        num_mem_blocks=1,
        use_mem_rope=False,
        mamba_d_state=8,
        mamba_headdim=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        attention_hidden_size=64,
        attention_head_dim=16,
        chunk_size=8,
    ),
)
