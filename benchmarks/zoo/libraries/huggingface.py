"""Classes of `transformers`, each with a tiny configuration that `shrink` makes, and random weights.

A class is here for its model type, as the heads of one type are nearly alike. `benchmarks.zoo.huggingface` has further
ones, with configurations of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.architecture import set_dropout
from benchmarks.zoo.batches import (
    CLASSES,
    captioned_images,
    causal,
    features,
    images,
    masked,
    segmentation,
    series,
    text_classes,
    transcription,
    translation,
)
from benchmarks.zoo.entry import Entry, Kind, LossFn
from benchmarks.zoo.libraries.shrink import shrunk
from benchmarks.zoo.libraries.tasks import (
    boxed,
    choices,
    depth,
    grids_of_patches,
    masked_patches,
    next_sentences,
    questions,
    questions_about_images,
    tagged,
)
from benchmarks.zoo.recipes import Contrastive

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """Classes that are trained alike."""

    kind: Kind
    batch: Any
    classes: str
    """Names of classes in `transformers`."""
    loss_fn: LossFn | None = None
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    """What the usual recipe does to the fresh model."""

    def entries(self) -> Iterator[Entry]:
        for name in self.classes.split():
            batch = _BATCHES.get(name, self.batch)
            yield Entry(f"huggingface/{name}", self.kind, partial(_make, name, self.prepare), batch, self.loss_fn)


def _make(name: str, prepare: Callable[[nn.Module], nn.Module], dropout: float) -> nn.Module:
    import transformers

    model = getattr(transformers, name)
    config = shrunk(model.config_class, _FIELDS.get(name, {}))
    config.num_labels = CLASSES
    set_dropout(config, dropout)
    made = model(config)
    return prepare(made)


def _depth_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of models whose own loss is not there yet: the squared difference of depths."""
    return F.mse_loss(output.predicted_depth, target)


_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_SWIN = {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}

_FIELDS: Mapping[str, Fields] = {
    "BambaForCausalLM": _HYBRID | {"attn_layer_indices": [1]},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "BitForImageClassification": {"num_groups": 4},
    "DeepseekV2ForCausalLM": _ROUTED,
    "DeiTForMaskedImageModeling": {"encoder_stride": 8},
    "Dots1ForCausalLM": _ROUTED | {"n_shared_experts": 1},
    "FalconH1ForCausalLM": _HYBRID | {"mamba_d_ssm": 64},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "GraniteMoeHybridForCausalLM": _HYBRID | {"layer_types": ["mamba", "attention"]},
    "HubertForCTC": {"ctc_loss_reduction": "mean"},
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "LayoutLMv3ForSequenceClassification": {"coordinate_size": 5, "shape_size": 6, "visual_embed": False},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LiltForTokenClassification": {"hidden_size": 48},
    "LongcatFlashForCausalLM": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8},
    "NemotronForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},
    "PatchTSMixerForPrediction": {"context_length": 32, "prediction_length": 8, "num_input_channels": 3},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": _MROPE,
        "vision_config": {"window_size": 32, "fullatt_block_indexes": [1]},
    },
    "ReformerModelWithLMHead": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "is_decoder": True,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "Wav2Vec2BertForSequenceClassification": {"feature_projection_input_dim": 16},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "DonutSwinForImageClassification": _SWIN,
    "EfficientNetForImageClassification": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "FocalNetForImageClassification": {"embed_dim": 16},
    "HieraForImageClassification": {"embed_dim": 16},
    "HGNetV2ForImageClassification": {
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 16, 32, 32],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 32, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "EsmForMaskedLM": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "FSMTForConditionalGeneration": {"src_vocab_size": 128, "tgt_vocab_size": 128},
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
    "MobileViTV2ForImageClassification": {"width_multiplier": 0.25},
    "Glm4vForConditionalGeneration": {"text_config": _MROPE},
    "Qwen2VLForConditionalGeneration": {"text_config": _MROPE},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
    "Swinv2ForImageClassification": _SWIN,
    "ViTForMaskedImageModeling": {"encoder_stride": 8},
}
"""What the rules leave wrong or too large."""

_BATCHES: Mapping[str, Any] = {
    "FSMTForConditionalGeneration": translation(12, 12),
    "MobileViTV2ForImageClassification": images(64),
    "PaliGemmaForConditionalGeneration": questions_about_images(16, types=True),
}

TASKS: tuple[Task, ...] = (
    Task(
        "decoder",
        causal(),
        """ApertusForCausalLM ArceeForCausalLM BertGenerationDecoder BigBirdForCausalLM BioGptForCausalLM
        BitNetForCausalLM BlenderbotForCausalLM CodeGenForCausalLM Cohere2ForCausalLM CwmForCausalLM
        DiffLlamaForCausalLM DogeForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM FlintForCausalLM
        FuyuForCausalLM Gemma2ForCausalLM GlmForCausalLM Glm4ForCausalLM GPTBigCodeForCausalLM
        GPTNeoXJapaneseForCausalLM GraniteForCausalLM GraniteSWAForCausalLM HeliumForCausalLM HrmTextForCausalLM
        HyperCLOVAXForCausalLM Jais2ForCausalLM Ministral3ForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM
        NanoChatForCausalLM OlmoForCausalLM Olmo3ForCausalLM OpenAIGPTLMHeadModel PersimmonForCausalLM
        Phi3ForCausalLM ProphetNetForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM
        Starcoder2ForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM XGLMForCausalLM CpmAntForCausalLM
        Gemma3nForCausalLM Gemma4ForCausalLM GlmMoeDsaForCausalLM HunYuanDenseV1ForCausalLM
        MiniCPM3ForCausalLM MinistralForCausalLM NemotronForCausalLM ReformerModelWithLMHead YoutuForCausalLM""",
    ),
    Task(
        "mixture of experts",
        causal(),
        """AfmoeForCausalLM AriaTextForCausalLM BeamForCausalLM Cohere2MoeForCausalLM DeepseekV4ForCausalLM
        Ernie4_5_MoeForCausalLM ExaoneMoeForCausalLM FlexOlmoForCausalLM Glm4MoeForCausalLM GraniteMoeForCausalLM
        GraniteMoeSharedForCausalLM HYV3ForCausalLM InklingForCausalLM Kolibri1ForCausalLM LagunaForCausalLM
        Llama4ForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM
        Qwen3MoeForCausalLM Qwen3_5MoeForCausalLM SolarOpenForCausalLM AXK1ForCausalLM AXK2ForCausalLM
        DeepseekV2ForCausalLM DeepseekV32ForCausalLM Dots1ForCausalLM Glm4MoeLiteForCausalLM GraniteMoeSWAForCausalLM
        HunYuanMoEV1ForCausalLM HYV4ForCausalLM Lfm2MoeForCausalLM LongcatFlashForCausalLM""",
    ),
    Task(
        "state space",
        causal(),
        """FalconMambaForCausalLM Lfm2ForCausalLM Lfm3ForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM
        Qwen3_5ForCausalLM RwkvForCausalLM ZayaForCausalLM BambaForCausalLM FalconH1ForCausalLM
        GraniteMoeHybridForCausalLM JambaForCausalLM KimiLinearForCausalLM""",
    ),
    Task(
        "encoder",
        masked(),
        """CamembertForMaskedLM Data2VecTextForMaskedLM EuroBertForMaskedLM FlaubertWithLMHeadModel GteForMaskedLM
        IBertForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM LukeForMaskedLM NomicBertForMaskedLM
        NystromformerForMaskedLM RobertaPreLayerNormForMaskedLM XLMRobertaXLForMaskedLM YosoForMaskedLM
        EsmForMaskedLM MraForMaskedLM XmodForMaskedLM""",
    ),
    Task(
        "encoder",
        text_classes(),
        """DebertaForSequenceClassification FunnelForSequenceClassification XLMForSequenceClassification
        SqueezeBertForSequenceClassification MarkupLMForSequenceClassification TapasForSequenceClassification""",
    ),
    Task(
        "encoder",
        tagged(),
        "ErnieForTokenClassification MegatronBertForTokenClassification XLMRobertaForTokenClassification",
    ),
    Task(
        "encoder",
        questions(),
        "SplinterForQuestionAnswering",
    ),
    Task("encoder", choices(), "RoCBertForMultipleChoice ModernBertForMultipleChoice"),
    Task("encoder", boxed(text_classes()), "LayoutLMv3ForSequenceClassification"),
    Task("encoder", boxed(tagged()), "LiltForTokenClassification"),
    Task("encoder", next_sentences(), "BertForPreTraining"),
    Task(
        "encoder-decoder",
        translation(),
        """BigBirdPegasusForConditionalGeneration BlenderbotSmallForConditionalGeneration EncoderDecoderModel
        FSMTForConditionalGeneration LEDForConditionalGeneration M2M100ForConditionalGeneration
        MBartForConditionalGeneration MvpForConditionalGeneration NllbMoeForConditionalGeneration
        PegasusXForConditionalGeneration PLBartForConditionalGeneration ProphetNetForConditionalGeneration
        SeamlessM4TForTextToText T5GemmaForConditionalGeneration T5Gemma2ForConditionalGeneration
        UMT5ForConditionalGeneration""",
    ),
    Task(
        "vision",
        images(),
        """BitForImageClassification CLIPForImageClassification ConvNextV2ForImageClassification
        Data2VecVisionForImageClassification Dinov2WithRegistersForImageClassification
        EfficientNetForImageClassification FocalNetForImageClassification HGNetV2ForImageClassification
        HieraForImageClassification IJepaForImageClassification MetaClip2ForImageClassification
        MobileNetV1ForImageClassification MobileNetV2ForImageClassification MobileViTForImageClassification
        MobileViTV2ForImageClassification PvtForImageClassification PvtV2ForImageClassification
        SiglipForImageClassification SwiftFormerForImageClassification Swinv2ForImageClassification
        ViTMSNForImageClassification DonutSwinForImageClassification""",
    ),
    Task("vision", depth(), "GLPNForDepthEstimation", _depth_loss),
    Task("vision", masked_patches(), "ViTForMaskedImageModeling DeiTForMaskedImageModeling"),
    Task(
        "vision",
        features("pixel_values", (4, 3, 32, 32)),
        "TimesformerForVideoClassification VivitForVideoClassification",
    ),
    Task("vision", features("pixel_values_videos", (4, 3, 32, 32)), "VJEPA2ForVideoClassification"),
    Task("vision", segmentation(), "BeitForSemanticSegmentation"),
    Task("time series", series(), "PatchTSMixerForPrediction"),
    Task("audio", features("input_features", (32, 16)), "Wav2Vec2BertForSequenceClassification"),
    Task("audio", features("input_values", (12000,)), "WavLMForXVector"),
    Task("audio", transcription("input_values", (2000,), 3), "HubertForCTC"),
    Task(
        "audio",
        features("input_values", (1000,)),
        """Data2VecAudioForSequenceClassification SEWForSequenceClassification SEWDForSequenceClassification
        UniSpeechForSequenceClassification UniSpeechSatForSequenceClassification
        Wav2Vec2ConformerForSequenceClassification""",
    ),
    Task(
        "audio",
        transcription("input_features", (32, 16), 6),
        "CanaryForConditionalGeneration CohereAsrForConditionalGeneration",
    ),
    Task(
        "audio",
        transcription("input_values", (2000,), 6),
        "MoonshineForConditionalGeneration SpeechT5ForSpeechToText",
    ),
    Task(
        "multimodal",
        questions_about_images(4),
        """AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration InternVLForConditionalGeneration
        QianfanOCRForConditionalGeneration""",
    ),
    Task(
        "multimodal",
        questions_about_images(16),
        """LlavaForConditionalGeneration Ovis2ForConditionalGeneration PaliGemmaForConditionalGeneration
        VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration JanusForConditionalGeneration""",
    ),
    Task(
        "multimodal",
        questions_about_images(4, (1, 3, 32, 32)),
        "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration",
    ),
    Task("multimodal", questions_about_images(64, (1, 3, 32, 32)), "Idefics2ForConditionalGeneration"),
    Task(
        "multimodal",
        grids_of_patches(4, 3 * 2 * 8 * 8),
        """Glm4vForConditionalGeneration MiniMaxM3SparseForConditionalGeneration Qwen2VLForConditionalGeneration
        Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration""",
    ),
    Task(
        "multimodal",
        captioned_images(),
        "AltCLIPModel ChineseCLIPModel CLIPSegModel Tipsv2Model OwlViTModel VisionTextDualEncoderModel",
        prepare=Contrastive,
    ),
)

ENTRIES: tuple[Entry, ...] = tuple(entry for task in TASKS for entry in task.entries())
