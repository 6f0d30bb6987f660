"""What users write around torchaudio's models: a head over letters, and the losses of its recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

LETTERS = 12


def torchaudio_models() -> Any:
    """`torchaudio.models`. Its compiled part may be linked against another PyTorch (with CUDA, say); no model needs
    it, and torchaudio goes without where it finds none."""
    try:
        import torchaudio.models
    except OSError:
        with mock.patch.object(Path, "glob", return_value=[]):
            import torchaudio.models
    return torchaudio.models


class Heard(nn.Module):
    """Log probabilities of letters, (n, frames, letters), from an encoder of sound that also returns lengths."""

    def __init__(self, model: nn.Module, width: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Identity() if width is None else nn.Linear(width, LETTERS)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.head(self.model(**inputs)[0]), -1)


class Predicted(nn.Module):
    """The loss of HuBERT (Hsu et al., 2021): classes of masked frames, and a penalty of large features."""

    PENALTY = 10.0

    class Mask(nn.Module):
        """Puts one value, which is learned, in the place of every second frame."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.rand(width))

        def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            mask = (torch.arange(x.shape[1]) % 2 == 0).expand(x.shape[:2])
            return torch.where(mask[..., None], self.value, x), mask

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, waveforms: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        masked, _, penalty = self.model(waveforms, labels)
        return {"loss": F.cross_entropy(masked, torch.zeros_like(masked[:, 0], dtype=torch.long)) + penalty}


class Transducing(nn.Module):
    """The loss of a transducer (Graves, 2012), by its recursion over frames and letters; torchaudio's needs its
    compiled part."""

    BLANK = LETTERS - 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, sources: torch.Tensor, source_lengths: torch.Tensor, targets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        begun = F.pad(targets - 1, (1, 0), value=self.BLANK)
        scores, _, _, _ = self.model(sources, source_lengths, begun, torch.full((len(begun),), begun.shape[1]))
        scores = scores.log_softmax(-1)
        blank = scores[..., self.BLANK]
        letter = scores[:, :, :-1].gather(-1, (targets - 1)[:, None, :, None].expand(-1, scores.shape[1], -1, 1))[
            ..., 0
        ]
        row: list[torch.Tensor] = []
        for t in range(scores.shape[1]):
            before, row = row, []
            for u in range(scores.shape[2]):
                ways = [before[u] + blank[:, t - 1, u]] if t else []
                ways += [row[u - 1] + letter[:, t, u - 1]] if u else []
                row.append(torch.stack(ways).logsumexp(0) if ways else torch.zeros_like(blank[:, 0, 0]))
        return {"loss": -(row[-1] + blank[:, -1, -1]).mean()}


class Speaking(nn.Module):
    """The loss of Tacotron 2 (Shen et al., 2018): spectra before and behind the last convolutions, and their end."""

    def __init__(self, model: nn.Module, dropout: float) -> None:
        super().__init__()
        self.model = model
        self.drops = dropout > 0
        if not self.drops:  # these drop out in evaluation mode too
            linear = [layer for one in model.decoder.prenet.layers for layer in (one, nn.ReLU())]  # type: ignore[union-attr]
            model.decoder.prenet = nn.Sequential(*linear)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Speaking:
        """What drops out at a rate of its own asks whether it is trained itself; what it holds is trained anyway."""
        super().train(mode)
        if not self.drops:
            for part in (self.model.encoder, self.model.postnet):
                part.training = False  # type: ignore[union-attr]
        return self

    def forward(
        self, tokens: torch.Tensor, token_lengths: torch.Tensor, mel: torch.Tensor, mel_lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        before, behind, gate, _ = self.model(tokens, token_lengths, mel, mel_lengths)
        ends = F.one_hot(mel_lengths - 1, mel.shape[-1]).to(gate.dtype)
        spectra = F.mse_loss(before, mel) + F.mse_loss(behind, mel)
        return {"loss": spectra + F.binary_cross_entropy_with_logits(gate, ends)}
