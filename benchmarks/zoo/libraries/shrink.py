"""Makes any configuration of `transformers` tiny, by the names of its fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.zoo.batches import CLASSES, VOCABULARY

WIDTH = 32
LAYERS = 2
HEADS = 4

Fields = dict[str, Any]


def _stages(first: int) -> Callable[[Any], Any]:
    """`first` for a number; for a list, one that grows with each stage, as widths of stages do."""

    def shrink(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(first * (1 if i == 0 else 2) for i in range(len(value)))
        return first

    return shrink


def _each(small: int) -> Callable[[Any], Any]:
    """`small` for a number, and for each number of a list; what is smaller already stays."""

    def shrink(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(shrink(v) for v in value)
        return min(small, value) if isinstance(value, (int, float)) else value

    return shrink


def _token(value: Any) -> Any:
    """Ids of special tokens that the small vocabulary has, none of which a batch's text holds."""
    if isinstance(value, (list, tuple)):
        return type(value)(_token(v) for v in value)
    return 2 if value >= VOCABULARY else value


def _rope(value: Any) -> Any:
    """Rotary embeddings, whose sections (time, height, width) add up to half of a head."""
    sections = {"mrope_section": [2, 1, 1]} if "mrope_section" in value else {}
    return {k: _rope(v) if isinstance(v, dict) else v for k, v in value.items()} | sections


_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "cls_token_id": 1}

RULES: tuple[tuple[str, Callable[[Any], Any]], ...] = tuple(
    (pattern, rule)
    for pattern, rule in (
        (r"(.*_)?vocab_size(_.*)?|num_embeddings|codebook_size", lambda v: VOCABULARY if isinstance(v, int) else v),
        (r"image_token_(id|index)|media_token_id|image_token", lambda v: 3),
        (r"(pad|bos|eos|decoder_start|cls)_token_id", lambda v: v),
        (r".*(token_id|token_index|_id|token_ids)|(bo|eo)[a-z]_token_index", _token),
        (r"num_labels", lambda v: CLASSES),
        (r"(.*_)?hidden_sizes|embed_dims?|dims|encoder_hidden_sizes|(encoder_)?in_channels|.*_channels_list", _stages(WIDTH)),
        (
            r"(.*_)?(hidden_size|hidden_dim|embedding_size|embedding_dim|projection_dim|proj_dim|output_dim)|d_model"
            r"|n_embd|dim|emb_dim|word_embed_proj_dim|lru_width|d_embed|.*_proj_size|.*_output_size|.*embedding_hidden_size"
            r"|fusion_hidden_size|hidden_channels|base_channels|initial_hidden_size|.*_hidden_(dim|size)_.*",
            _each(WIDTH),
        ),
        (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|ffw_size|mlp_dim|d_inner|d_ff|n_inner|dff|ff_dim)(_.*)?", _each(2 * WIDTH)),
        (r"(.*_)?(num_key_value_heads|num_kv_heads|multi_query_group_num|n_head_kv|num_query_groups)", _each(2)),
        (r"(.*_)?(num_heads|num_attention_heads|n_heads?|attention_heads)(_.*)?|(.*_)?heads", _each(HEADS)),
        (r"(.*_)?(head_dim|head_size|dim_head|d_kv|kv_channels|d_head|key_dim|key_head_dim|value_head_dim|headdim)", _each(WIDTH // HEADS)),
        (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim", _each(4)),
        (
            r"(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_blocks"
            r"|num_encoder_layers|num_decoder_layers|.*_num_layers|num_hidden_groups|resampler_depth|num_stages_layers)",
            _each(LAYERS),
        ),
        (r"(.*_)?depths|layers_per_stage|num_hidden_blocks|num_conv_blocks", _each(1)),
        (r"(.*_)?(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed_experts)", _each(4)),
        (r"(.*_)?(num_experts_per_tok(en)?|experts_per_token|num_selected_experts|moe_k|moe_topk|top_k|num_experts_per_topk)", _each(2)),
        (r"n_group", lambda v: 1),
        (r"topk_group", lambda v: 1),
        (r"(.*_)?lora_rank|.*_low_rank_dim|(.*_)?lora_dim", _each(8)),
        (r"(.*_)?(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_target_positions|max_source_positions)", _each(64)),
        (r"(.*_)?(sliding_window|window_size|chunk_size|attention_window|attention_chunk_size|local_attention|block_size|buckets)(_size)?", _each(8)),
        (r"(.*_)?image_size|img_size|input_size|crop_size|video_size", _each(32)),
        (r"patch_size", _each(8)),
        (r"num_frames", _each(4)),
        (r"num_mel_bins|feature_size|input_feat_per_channel|n_mels", _each(16)),
        (r".*rope_(parameters|scaling)", _rope),
        (r"num_queries|num_query_tokens", _each(6)),
        (r"(.*_)?(state_size|d_state|conv_kernel_dim)", _each(8)),
    )
)  # fmt: skip


def shrunk(config: type, fields: Mapping[str, Any] | None = None) -> Any:
    """A small configuration of the class `config`. `fields` go before the rules; a dict in them is for the
    configuration within that has this name."""
    fields = dict(fields or {})
    default = config()
    small: Fields = {}
    for key, value in vars(default).items():
        if hasattr(value, "to_dict"):
            small[key] = shrunk(type(value), fields.pop(key, None))
        elif value is not None and not isinstance(value, (bool, str)):
            for pattern, rule in RULES:
                if re.fullmatch(pattern, key):
                    small[key] = rule(value)
                    break
    small |= {k: v for k, v in _IDS.items() if k in vars(default) and k not in fields}
    small |= _layers(vars(default), small)
    small.pop("num_labels", None)
    return config(**(small | fields))


def _layers(default: Mapping[str, Any], small: Fields) -> Fields:
    """Lists with something for each layer: kept are the first layers of each kind, so that a small model has all."""
    count = next((default[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(default.get(k), int)), 0)
    name = next((k for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(default.get(k), int)), "")
    lists = {k: v for k, v in default.items() if isinstance(v, (list, tuple)) and len(v) == count > 4 and not k.startswith("_")}
    if not lists:
        return {}
    kinds = list(zip(*(map(str, v) for v in lists.values()), strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds})[:3]
    kept += [i for i in range(count) if i not in kept][: max(0, LAYERS - len(kept))]
    kept.sort()
    return {name: len(kept)} | {k: type(v)(v[i] for i in kept) for k, v in lists.items()}
