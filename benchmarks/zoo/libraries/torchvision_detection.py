"""torchvision's detectors, on shallow backbones. `model(images, targets)` takes lists, and returns a dict of losses,
which `Losses` adds up as training loops do.

All images have their objects at the same places, so that the anchors and pixels that a loss is divided by are as many
in every batch. Proposals are sampled in the order in which they come, not at random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.batches import CLASSES, generator
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.libraries.drop import with_dropout

SIZE = 64
BOXES = ((4.0, 6.0, 36.0, 40.0), (28.0, 20.0, 60.0, 56.0))
KEYPOINTS = 5
SAMPLED = 8
"""Anchors and proposals of an image that have a loss."""


class Losses(nn.Module):
    """A detector whose losses are added up."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        losses = self.detector(images, targets)
        return {"loss": sum(loss for loss in losses.values())}


class FirstSampler:
    """`BalancedPositiveNegativeSampler` without its randomness: it takes the first ones."""

    def __init__(self, size: int, positive: float) -> None:
        self.size, self.positive = size, positive

    def __call__(self, matched: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        positives, negatives = [], []
        for indices in matched:
            first = torch.where(indices >= 1)[0][: int(self.size * self.positive)]
            second = torch.where(indices == 0)[0][: self.size - first.numel()]
            positives.append(torch.zeros_like(indices, dtype=torch.uint8).index_fill(0, first, 1))
            negatives.append(torch.zeros_like(indices, dtype=torch.uint8).index_fill(0, second, 1))
        return positives, negatives


def _batch(extra: str, n: int, seed: int) -> dict[str, Any]:
    g = generator(seed)
    images = list(torch.randn(n, 3, SIZE, SIZE, generator=g))
    targets = []
    for _ in range(n):
        target = {"boxes": torch.tensor(BOXES), "labels": torch.randint(1, CLASSES, (len(BOXES),), generator=g)}
        if extra == "masks":
            target["masks"] = torch.randint(0, 2, (len(BOXES), SIZE, SIZE), dtype=torch.uint8, generator=g)
        if extra == "keypoints":
            target["labels"] = torch.ones(len(BOXES), dtype=torch.int64)
            target["keypoints"] = _keypoints(g)
        targets.append(target)
    return {"images": images, "targets": targets}


def _keypoints(g: torch.Generator) -> torch.Tensor:
    """Points within the boxes, all of them visible: (boxes, points, 3)."""
    boxes = torch.tensor(BOXES)[:, None]
    places = boxes[..., :2] + torch.rand(len(BOXES), KEYPOINTS, 2, generator=g) * (boxes[..., 2:] - boxes[..., :2])
    return torch.cat([places, torch.ones(len(BOXES), KEYPOINTS, 1)], 2)


def _pyramid(**fields: Any) -> Any:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, **fields)


def _rcnn(kind: str) -> Any:
    """Faster, Mask and Keypoint R-CNN, with narrow heads."""
    from torchvision.models import detection
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    classes = 2 if kind == "KeypointRCNN" else CLASSES
    proposals = {"rpn_pre_nms_top_n_train": 100, "rpn_post_nms_top_n_train": 50}
    model = getattr(detection, kind)(_pyramid(), classes, min_size=SIZE, max_size=SIZE, **proposals)
    heads = model.roi_heads
    heads.box_head, heads.box_predictor = TwoMLPHead(256 * 49, 64), FastRCNNPredictor(64, classes)
    if kind == "MaskRCNN":
        heads.mask_head, heads.mask_predictor = MaskRCNNHeads(256, (32, 32), 1), MaskRCNNPredictor(32, 32, classes)
    if kind == "KeypointRCNN":
        heads.keypoint_head = KeypointRCNNHeads(256, (32, 32))
        heads.keypoint_predictor = KeypointRCNNPredictor(32, KEYPOINTS)
    model.rpn.fg_bg_sampler = FirstSampler(SAMPLED, 0.5)
    heads.fg_bg_sampler = FirstSampler(SAMPLED, 0.25)
    return model


def _dense(kind: str) -> Any:
    """RetinaNet and FCOS."""
    from torchvision.models import detection
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    backbone = _pyramid(returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256))
    return getattr(detection, kind)(backbone, CLASSES, min_size=SIZE, max_size=SIZE)


def _ssdlite() -> Any:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)


def _make(build: Callable[[], Any], dropout: float) -> nn.Module:
    return Losses(with_dropout(build(), dropout))


def _entry(name: str, build: Callable[[], Any], extra: str = "") -> Entry:
    return Entry(f"torchvision/{name}", "detection", partial(_make, build), partial(_batch, extra))


ENTRIES: tuple[Entry, ...] = (
    _entry("fasterrcnn", partial(_rcnn, "FasterRCNN")),
    _entry("maskrcnn", partial(_rcnn, "MaskRCNN"), "masks"),
    _entry("keypointrcnn", partial(_rcnn, "KeypointRCNN"), "keypoints"),
    _entry("retinanet", partial(_dense, "RetinaNet")),
    _entry("fcos", partial(_dense, "FCOS")),
    _entry("ssdlite320_mobilenet_v3_large", _ssdlite),
)
