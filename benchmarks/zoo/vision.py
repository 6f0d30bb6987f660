"""Vision: ResNet-50, a VGG with its large linear layers, a face classifier with 200,000 people, and DETR."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.architecture import from_config
from benchmarks.zoo.pictures import DIGITS, digits, faces, scenes
from benchmarks.zoo.plain import VGG, cross_entropy
from benchmarks.zoo.recipes import Detection
from benchmarks.zoo.resnet import RESNET18, RESNET50, Residual, ResNet
from benchmarks.zoo.workload import Workload, adamw, seeded, sgd
from benchmarks.zoo.zipf import EXPONENT

PEOPLE = 200_000
IMAGENET_CLASSES = 1000

_DETR_FIELDS = {
    "d_model": 256,
    "num_queries": 25,
    "num_labels": DIGITS,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}
_DETR_LAYERS = {"layers": 3, "attention_heads": 8, "ffn_dim": 1024}
"""Of encoder and decoder each."""

_DIGITS = "Images: scikit-learn's handwritten digits, enlarged"


def _calm(model: ResNet) -> ResNet:
    """Lets every residual block begin as the identity (Goyal et al. 2017, 5.1): without warm-up, rounding would
    otherwise grow within a few steps to differences that one sees in the loss."""
    for block in model.blocks:
        assert isinstance(block, Residual)
        *_, norm = (m for m in block.body.modules() if isinstance(m, nn.BatchNorm2d))
        nn.init.zeros_(norm.weight)
    return model


def _vgg() -> nn.Module:
    model = VGG(channels=(16, 32, 64, 128), width=2048, classes=IMAGENET_CLASSES)
    head = model.classifier[-1]
    assert isinstance(head, nn.Linear)
    nn.init.normal_(head.weight, std=0.01)  # as torchvision's
    return model


class FaceClassifier(nn.Module):
    """Images to logits over people: directions of faces from a ResNet, and one direction for every person.

    The scale stands in for the norm of the features, as in NormFace (Wang et al. 2017); the weights stay as they are,
    and there is no margin, so that the head is a plain linear layer.
    """

    def __init__(self, people: int = PEOPLE, width: int = 32, directions: int = 256, scale: float = 16.0) -> None:
        super().__init__()
        self.backbone = _calm(ResNet(RESNET18, width=width, classes=directions))
        self.scale = scale
        self.head = nn.Linear(directions, people, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.scale * F.normalize(self.backbone(images)))
        return logits


class UncheckedDetection(Detection):
    """A detector whose encoder does not look for overflows, which in float32 there are none of.

    DETR's encoder layers look for them in train mode, and branch on what they find, which no graph can hold. Without
    dropout their train and eval modes are otherwise the same.
    """

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.modules():
            if type(module).__name__ == "DetrEncoderLayer":
                module.training = False
        return self


def _detr() -> nn.Module:
    backbone = {
        "hidden_sizes": [64, 128, 256, 512],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
        "out_features": ["stage4"],
    }
    sides = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in _DETR_LAYERS.items()}
    detector = from_config("DetrConfig", "DetrForObjectDetection", _DETR_FIELDS | sides, backbone)
    return UncheckedDetection(detector.requires_grad_(True), classes=DIGITS)  # from scratch, so the backbone trains


RESNET = Workload(
    name="resnet50",
    about=f"ResNet-50 (He et al. 2016), whole, on small images of 64 x 64. {_DIGITS}; ten of its 1000 classes occur.",
    model=seeded(lambda: _calm(ResNet(RESNET50, expansion=4, classes=IMAGENET_CLASSES))),
    batch=lambda step, rank: digits(step, rank, 2, 64),
    loss_fn=cross_entropy,
    optimizer=sgd(5e-4, momentum=0.9, weight_decay=1e-4),
)
LARGE_LINEAR = Workload(
    name="vgg",
    about="VGG (Simonyan and Zisserman 2015): eight convolutions at a quarter of the channels, and linear layers of "
    "half the width, which hold 98 % of the parameters (6272 x 2048, 2048 x 2048, 2048 x 1000); without dropout, at "
    f"112 x 112. {_DIGITS}; ten of its 1000 classes occur.",
    model=seeded(_vgg),
    batch=lambda step, rank: digits(step, rank, 8, 112),
    loss_fn=cross_entropy,
    optimizer=sgd(5e-4, momentum=0.9, weight_decay=5e-4),
)
FACES = Workload(
    name="faces",
    about="Face recognition as one class a person: a narrow ResNet-18, normalized features of width 256, and a linear "
    "head over 200,000 people, cross entropy without a margin. Generated images: a pattern for each person, and noise; "
    f"people by Zipf's law with exponent {EXPONENT}.",
    model=seeded(FaceClassifier),
    batch=lambda step, rank: faces(step, rank, 4, PEOPLE),
    loss_fn=cross_entropy,
    optimizer=sgd(0.02, momentum=0.9, weight_decay=5e-4),
)
DETR = Workload(
    name="detr",
    about="DETR (Carion et al. 2020) with a ResNet-18 and three layers each of encoder and decoder, trained from "
    "scratch at 128 x 128. Its loss but for the matching: query i is given the i-th object from the left, since "
    f"the Hungarian algorithm runs outside of any graph. {_DIGITS} and placed on a canvas, three an image.",
    model=seeded(_detr),
    batch=lambda step, rank: scenes(step, rank, 3, 128, 3),
    optimizer=adamw(1e-4, weight_decay=1e-4),
)
