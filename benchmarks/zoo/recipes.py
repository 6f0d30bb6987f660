"""What usual training recipes do to a fresh model: freeze a part of it, or compute a loss beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES


def freeze_feature_encoder(model: nn.Module) -> nn.Module:
    """Freezes the convolutions of a speech model, as fine-tuning does since wav2vec 2.0 (Baevski et al. 2020, 4.2)."""
    model.freeze_feature_encoder()  # type: ignore[operator]
    return model


class Contrastive(nn.Module):
    """A two-tower model that is asked for its loss: `return_loss` is a flag of the call, not of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


class Detection(nn.Module):
    """A detector with the loss of DETR (Carion et al. 2020, section 3.1), but for the matching: query i is given box i.

    DETR matches queries with boxes by the Hungarian algorithm, which runs in SciPy on the host: no graph can hold it.
    """

    BOX_WEIGHT = 5.0
    """The paper's weight of the L1 distance of boxes."""

    def __init__(self, detector: nn.Module, classes: int = CLASSES) -> None:
        super().__init__()
        self.detector = detector
        self.classes = classes

    def forward(
        self, pixel_values: torch.Tensor, class_labels: torch.Tensor, boxes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        output = self.detector(pixel_values=pixel_values)
        distance = (output.pred_boxes[:, : boxes.shape[1]] - boxes).abs().mean()
        return {"loss": _class_loss(output.logits, class_labels, self.classes) + self.BOX_WEIGHT * distance}


def _class_loss(logits: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Cross entropy where there is a class for "no object"; one sigmoid a class, as the later DETRs have, where not."""
    empty = logits.shape[1] - labels.shape[1]
    if logits.shape[-1] > classes:
        no_object = labels.new_full((logits.shape[0], empty), classes)
        return F.cross_entropy(logits.flatten(0, 1), torch.cat([labels, no_object], 1).flatten())
    target = F.pad(F.one_hot(labels, classes), (0, 0, 0, empty))
    return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype))
