"""Makes any configuration of `transformers` tiny, by the names of its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.zoo.batches import VOCABULARY

WIDTH = 32
LAYERS = 2
HEADS = 4
IMAGE_TOKEN = 3
"""Stands in a text where features of the image go."""

Fields = dict[str, Any]
Rule = Callable[[Any], Any]


def _at_most(small: int) -> Rule:
    """A number, or each number of a list, that is at most `small`."""

    def shrink(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(shrink(v) for v in value)
        return min(small, value) if isinstance(value, (int, float)) else value

    return shrink


def _widths(value: Any) -> Any:
    """A width; of a list, one for each stage, of which the first is the smallest."""
    if isinstance(value, (list, tuple)):
        return type(value)(WIDTH * (1 if i == 0 else 2) for i in range(len(value)))
    return WIDTH


def _vocabulary(value: Any) -> Any:
    return VOCABULARY if isinstance(value, int) else value


def _token(value: Any) -> Any:
    """Ids of special tokens that the small vocabulary has, none of which a batch's text holds."""
    if isinstance(value, (list, tuple)):
        return type(value)(_token(v) for v in value)
    return 2 if value >= VOCABULARY else value


def _rotary(value: Any) -> Any:
    """Rotary embeddings, whose sections (time, height, width) add up to half of a head."""
    sections = {"mrope_section": [2, 1, 1]} if "mrope_section" in value else {}
    return {k: _rotary(v) if isinstance(v, dict) else v for k, v in value.items()} | sections


_IDS: Fields = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}

_RULES: tuple[tuple[str, Rule], ...] = (
    ("vocab_size *_vocab_size vocab_size_* num_embeddings codebook_size", _vocabulary),
    ("image_token_id image_token_index media_token_id image_token", lambda value: IMAGE_TOKEN),
    ("*token_id *token_index *_id *token_ids", _token),
    ("hidden_sizes *_hidden_sizes embed_dim embed_dims dims", _widths),
    ("hidden_size *_hidden_size *_hidden_size_* hidden_dim *_hidden_dim *_hidden_dim_*", _at_most(WIDTH)),
    ("d_model n_embd dim embedding_size *_embedding_size embedding_dim *_embedding_dim emb_dim", _at_most(WIDTH)),
    ("projection_dim *_projection_dim proj_dim *_proj_dim *_proj_size d_embed lru_width", _at_most(WIDTH)),
    ("output_dim *_output_dim *_output_size hidden_channels base_channels initial_hidden_size", _at_most(WIDTH)),
    ("*intermediate_size intermediate_size_* *ffn_dim *ffn_dim_* *ffn_hidden_size ffw_size", _at_most(2 * WIDTH)),
    ("*mlp_dim d_inner *d_ff n_inner dff ff_dim", _at_most(2 * WIDTH)),
    ("*num_heads *num_attention_heads *attention_heads n_head n_heads *_n_heads *_heads", _at_most(HEADS)),
    ("num_key_value_heads num_kv_heads n_head_kv num_query_groups heads", _at_most(HEADS)),
    ("mamba_d_head mamba_head_dim mamba_headdim", _at_most(2 * WIDTH // HEADS)),
    ("rotary_dim", _at_most(4)),
    ("head_dim *_head_dim head_size *_head_size", _at_most(WIDTH // HEADS)),
    ("dim_head d_kv *_d_kv kv_channels d_head *_d_head", _at_most(WIDTH // HEADS)),
    ("num_hidden_layers *_num_hidden_layers num_layers *_num_layers n_layer n_layers *_n_layers", _at_most(LAYERS)),
    ("*encoder_layers *decoder_layers depth *_depth num_blocks num_hidden_groups", _at_most(LAYERS)),
    ("depths *_depths layers_per_stage", _at_most(1)),
    ("num_local_experts *num_experts *_routed_experts", _at_most(4)),
    ("*experts_per_tok *experts_per_token num_selected_experts moe_k moe_topk top_k *_top_k", _at_most(2)),
    ("n_group num_group num_groups topk_group", _at_most(1)),
    ("*lora_rank *low_rank_dim *lora_dim", _at_most(8)),
    ("*max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length", _at_most(64)),
    ("*max_target_positions *max_source_positions", _at_most(64)),
    ("sliding_window *_sliding_window window_size *_window_size chunk_size *_chunk_size attention_window", _at_most(8)),
    ("block_size buckets local_attention", _at_most(8)),
    ("image_size *_image_size img_size input_size crop_size video_size", _at_most(32)),
    ("patch_size", _at_most(8)),
    ("num_frames", _at_most(4)),
    ("num_mel_bins feature_size input_feat_per_channel n_mels", _at_most(16)),
    ("conv_dim tdnn_dim neck_hidden_sizes num_conv_pos_embeddings", _at_most(16)),
    ("num_conv_pos_embedding_groups", _at_most(2)),
    ("mask_time_prob mask_feature_prob", _at_most(0)),
    ("*rope_parameters *rope_scaling", _rotary),
    ("num_queries num_query_tokens", _at_most(6)),
    ("state_size *_state_size d_state *_d_state *_conv_kernel_dim", _at_most(8)),
)  # fmt: skip
"""What names of fields, in which * stands for anything, say of their values."""


def shrunk(config: type, fields: Mapping[str, Any] | None = None) -> Any:
    """A small configuration of the class `config`.

    `fields` go before the rules; a dict in them under the name of a configuration within is for that one.
    """
    fields = dict(fields or {})
    default = vars(config())
    small: Fields = {}
    for key, value in default.items():
        if hasattr(value, "to_dict"):
            small[key] = shrunk(type(value), fields.pop(key, None))
        elif key == "head_dim" and value is None:
            small[key] = WIDTH // HEADS
        elif value is not None and not isinstance(value, (bool, str)):
            rule = _rule(key)
            small |= {key: rule(value)} if rule else {}
    small |= {k: v for k, v in _IDS.items() if k in default}
    if "apply_spec_augment" in default:
        small["apply_spec_augment"] = False  # masks are drawn with numpy, outside of any graph
    if _shares_keys(default):
        small["num_key_value_heads"] = HEADS // 2
    return config(**(small | _layers(default) | fields))


def _rule(key: str) -> Rule | None:
    return next((rule for names, rule in _RULES if any(fnmatchcase(key, name) for name in names.split())), None)


def _shares_keys(default: Fields) -> bool:
    """Whether several heads share a key and a value, and neither is made from a common factor."""
    heads, shared = default.get("num_attention_heads"), default.get("num_key_value_heads")
    return isinstance(heads, int) and isinstance(shared, int) and shared < heads and "kv_lora_rank" not in default


def _layers(default: Fields) -> Fields:
    """Lists with something for each layer: kept are the first layers of each kind, three at most, so that the small
    model has what the large one has."""
    name = next((k for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(default.get(k), int)), "")
    count = default.get(name, 0)
    lists = {k: v for k, v in default.items() if isinstance(v, (list, tuple)) and len(v) == count and k[0] != "_"}
    if count <= 4 or not lists:
        return {}
    kinds = list(zip(*(map(str, v) for v in lists.values()), strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds})[:3]
    kept = sorted([*kept, *(i for i in range(count) if i not in kept)][: max(LAYERS, len(kept))])
    return {name: len(kept)} | {k: type(v)(v[i] for i in kept) for k, v in lists.items()}
