"""Models of torchaudio, shrunk where their arguments allow it: recognizers with CTC or as transducers, and what
separates, makes and rates sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, generator
from benchmarks.zoo.entry import Batch, Entry, LossFn
from benchmarks.zoo.libraries.audio_models import (
    LETTERS,
    Heard,
    Predicted,
    Speaking,
    Transducing,
    torchaudio_models,
)
from benchmarks.zoo.libraries.draws import Draw, normal, whole

SPOKEN = 3
"""Letters of an utterance; 0 is the blank."""


def letters(g: torch.Generator, n: int) -> torch.Tensor:
    return torch.randint(1, LETTERS, (n, SPOKEN), generator=g)


def ctc(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of log probabilities, (n, frames, letters); all utterances fill theirs."""
    lengths = torch.full((len(output),), output.shape[1])
    spoken = torch.full((len(target),), target.shape[1])
    return F.ctc_loss(output.transpose(0, 1), target, lengths, spoken)


def separated(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The negative scale-invariant ratio of signal to noise in dB (Le Roux et al., 2019); sources in a fixed order."""
    target = target - target.mean(-1, keepdim=True)
    output = output - output.mean(-1, keepdim=True)
    along = (output * target).sum(-1, keepdim=True) / target.square().sum(-1, keepdim=True) * target
    ratio = along.square().sum(-1) / (output - along).square().sum(-1)
    return -10 * ratio.log10().mean()


def near(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(output, target)


def rated(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of one score, or of several, a row each."""
    found = torch.stack(output, -1) if isinstance(output, (list, tuple)) else output
    return F.mse_loss(found, target)


def sampled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each sample of a wave, (n, 1, samples, classes)."""
    return F.cross_entropy(output.flatten(0, 2), target.flatten())


@dataclass(frozen=True)
class Model:
    name: str
    make: Callable[[Any, float], nn.Module]
    """Of `torchaudio.models`, and a dropout probability."""
    inputs: Mapping[str, Draw]
    target: Draw = letters
    loss: LossFn | None = ctc

    def entry(self) -> Entry:
        return Entry(f"audio/{self.name}", "audio", self._make, self._batch, self.loss)

    def _make(self, dropout: float) -> nn.Module:
        return self.make(torchaudio_models(), dropout)

    def _batch(self, n: int, seed: int) -> Batch:
        g = generator(seed)
        inputs = {name: draw(g, n) for name, draw in self.inputs.items()}
        return inputs if self.loss is None else (inputs, self.target(g, n))


def _wav2vec2(models: Any, dropout: float, wavlm: bool = False, letters: int | None = LETTERS) -> nn.Module:
    """wav2vec 2.0, or WavLM, with one convolution a stage and two layers of width 32."""
    fields: dict[str, Any] = {
        "extractor_mode": "group_norm",
        "extractor_conv_layer_config": [(16, 10, 5), (16, 8, 4)],
        "extractor_conv_bias": False,
        "encoder_embed_dim": 32,
        "encoder_projection_dropout": dropout,
        "encoder_pos_conv_kernel": 16,
        "encoder_pos_conv_groups": 2,
        "encoder_num_layers": 2,
        "encoder_num_heads": 4,
        "encoder_attention_dropout": dropout,
        "encoder_ff_interm_features": 64,
        "encoder_ff_interm_dropout": dropout,
        "encoder_dropout": dropout,
        "encoder_layer_norm_first": False,
        "encoder_layer_drop": 0.0,
        "aux_num_out": letters,
    }
    if wavlm:
        return models.wavlm_model(**fields, encoder_num_buckets=32, encoder_max_distance=64)  # type: ignore[no-any-return]
    return models.wav2vec2_model(**fields)  # type: ignore[no-any-return]


def _hubert(models: Any, dropout: float) -> nn.Module:
    """HuBERT's pretraining with masks at fixed frames: its own are drawn in Python, as many as it happens."""
    from torchaudio.models.wav2vec2.components import LogitGenerator

    generator = LogitGenerator(32, CLASSES, 16, skip_masked=False, skip_nomask=False)
    wav2vec2 = _wav2vec2(models, dropout, letters=None)
    return Predicted(models.HuBERTPretrainModel(wav2vec2, Predicted.Mask(32), generator, feature_grad_mult=0.1))


def _subjective(models: Any, dropout: float) -> nn.Module:
    from torchaudio.models.squim.subjective import Predictor

    return models.SquimSubjective(  # type: ignore[no-any-return]
        _wav2vec2(models, dropout, wavlm=True, letters=None), nn.Linear(32, 8), Predictor(8 * 2, 8)
    )


def _transducer(models: Any, dropout: float) -> nn.Module:
    model = models.emformer_rnnt_model(
        input_dim=8,
        encoding_dim=16,
        num_symbols=LETTERS,
        segment_length=4,
        right_context_length=4,
        time_reduction_input_dim=8,
        time_reduction_stride=2,
        transformer_num_heads=2,
        transformer_ffn_dim=32,
        transformer_num_layers=2,
        transformer_dropout=dropout,
        transformer_activation="gelu",
        transformer_left_context_length=4,
        transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True,
        symbol_embedding_dim=16,
        num_lstm_layers=1,
        lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-3,
        lstm_dropout=dropout,
    )
    return Transducing(model)


def _tacotron2(models: Any, dropout: float) -> nn.Module:
    model = models.Tacotron2(
        n_mels=8,
        n_symbol=LETTERS,
        symbol_embedding_dim=16,
        encoder_embedding_dim=16,
        encoder_n_convolution=1,
        decoder_rnn_dim=16,
        decoder_dropout=dropout,
        attention_rnn_dim=16,
        attention_hidden_dim=16,
        attention_location_n_filter=4,
        attention_location_kernel_size=5,
        attention_dropout=dropout,
        prenet_dim=16,
        postnet_n_convolution=2,
        postnet_embedding_dim=16,
    )
    return Speaking(model, dropout)


_WAVE = {"waveforms": normal(400)}
_SPECTRUM = {"input": normal(12, 16), "lengths": whole(12)}

MODELS: tuple[Model, ...] = (
    Model("Wav2Vec2Model", lambda m, p: Heard(_wav2vec2(m, p)), _WAVE),
    Model("WavLM", lambda m, p: Heard(_wav2vec2(m, p, wavlm=True)), _WAVE),
    Model(
        "Wav2Vec2Model with lengths",
        lambda m, p: Heard(_wav2vec2(m, p)),
        {"waveforms": normal(400), "lengths": whole(400)},
    ),
    Model(
        "HuBERTPretrainModel",
        _hubert,
        {"waveforms": normal(400), "labels": lambda g, n: torch.randint(CLASSES, (n, 18), generator=g)},
        loss=None,
    ),
    Model("Conformer", lambda m, p: Heard(m.Conformer(16, 2, 32, 2, 3, dropout=p), 16), _SPECTRUM),
    Model(
        "Emformer",
        lambda m, p: Heard(m.Emformer(16, 2, 32, 2, 4, dropout=p, right_context_length=2), 16),
        {"input": normal(14, 16), "lengths": whole(12)},
    ),
    Model("DeepSpeech", lambda m, p: m.DeepSpeech(16, 32, LETTERS, dropout=p), {"x": normal(1, 12, 16)}),
    Model(
        "Wav2Letter",
        lambda m, p: m.Wav2Letter(LETTERS, "mfcc", 13),
        {"x": normal(13, 24)},
        loss=lambda output, target: ctc(output.transpose(1, 2), target),
    ),
    Model(
        "RNNT",
        _transducer,
        {"sources": normal(20, 8), "source_lengths": whole(16), "targets": letters},
        loss=None,
    ),
    Model(
        "Tacotron2",
        _tacotron2,
        {"tokens": letters, "token_lengths": whole(SPOKEN), "mel": normal(8, 6), "mel_lengths": whole(6)},
        loss=None,
    ),
    Model(
        "WaveRNN",
        lambda m, p: m.WaveRNN([2, 4], 16, 8, n_res_block=1, n_rnn=16, n_fc=16, n_freq=8, n_hidden=8, n_output=8),
        {"waveform": normal(1, 8 * 4), "specgram": normal(1, 8, 8)},
        lambda g, n: torch.randint(16, (n, 1, 8 * 4), generator=g),
        sampled,
    ),
    Model(
        "ConvTasNet",
        lambda m, p: m.ConvTasNet(2, 16, 16, 3, 8, 16, 2, 2),
        {"input": normal(1, 256)},
        normal(2, 256),
        separated,
    ),
    Model(
        "HDemucs",
        lambda m, p: m.HDemucs(["voice", "rest"], channels=8, nfft=256, depth=3, norm_starts=2),
        {"input": normal(2, 2048)},
        normal(2, 2, 2048),
        near,
    ),
    Model(
        "SquimObjective",
        lambda m, p: m.squim_objective_model(16, 16, 16, 2, 8, 1, "LSTM", 7),
        {"x": normal(400)},
        normal(3),
        rated,
    ),
    Model(
        "SquimSubjective",
        _subjective,
        {"waveform": normal(400), "reference": normal(400)},
        lambda g, n: torch.rand(n, generator=g),
        rated,
    ),
)

ENTRIES: tuple[Entry, ...] = tuple(model.entry() for model in MODELS)
