"""Models of torchvision: classifiers, segmentation and video; `torchvision_detection` has its detectors.

Each is the smallest of its family, made narrower and shallower where its class takes that as arguments, else without
layers that are like those before them. Batches are (inputs, target), and losses are those of torchvision's own training
scripts (`references/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, classes, generator
from benchmarks.zoo.entry import Entry, LossFn
from benchmarks.zoo.libraries import torchvision_detection as detection
from benchmarks.zoo.libraries.drop import with_dropout
from benchmarks.zoo.libraries.shallow import shallow

Pair = tuple[Any, torch.Tensor]
FRAMES = 4


def _named(name: str, fields: Mapping[str, Any], dropout: float) -> nn.Module:
    from torchvision.models import get_model

    return with_dropout(get_model(name, weights=None, num_classes=CLASSES, **fields), dropout)


def _shallow(name: str, fields: Mapping[str, Any], dropout: float) -> nn.Module:
    return shallow(_named(name, fields, dropout))


def _made(build: Callable[[], Any], dropout: float) -> nn.Module:
    return with_dropout(build(), dropout)


def pictures(size: int, n: int, seed: int) -> Pair:
    g = generator(seed)
    return torch.randn(n, 3, size, size, generator=g), classes(g, n)


def _pixels(size: int, n: int, seed: int) -> Pair:
    """Images with a class for every pixel; the border's is 255, which does not count."""
    g = generator(seed)
    target = classes(g, n, size, size)
    target[:, 0] = 255
    return torch.randn(n, 3, size, size, generator=g), target


def _clips(size: int, frames: int, n: int, seed: int) -> Pair:
    g = generator(seed)
    return torch.randn(n, 3, frames, size, size, generator=g), classes(g, n)


def _inception_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """GoogLeNet's, whose two side branches count 0.3 each (Szegedy et al. 2014, section 5)."""
    loss = F.cross_entropy(output.logits, target)
    return loss + 0.3 * (F.cross_entropy(output.aux_logits1, target) + F.cross_entropy(output.aux_logits2, target))


def _segmentation_loss(output: Mapping[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    losses = {name: F.cross_entropy(x, target, ignore_index=255) for name, x in output.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def _classifier(name: str, size: int = 64, loss: LossFn = F.cross_entropy, **fields: Any) -> Entry:
    return _entry(name, partial(_shallow, name, fields), partial(pictures, size), loss)


def _entry(
    name: str, make: Callable[[float], nn.Module], batch: Callable[[int, int], Pair], loss: LossFn = F.cross_entropy
) -> Entry:
    return Entry(f"torchvision/{name}", "vision", make, batch, loss)


def _vgg() -> Any:
    from torchvision.models import vgg

    layers = vgg.make_layers([16, "M", 32, "M", 64, "M"], batch_norm=True)
    return _narrow(vgg.VGG(layers, num_classes=CLASSES), 64)


def _narrow(model: Any, channels: int) -> Any:
    """AlexNet and VGG with narrow linear layers in the place of those of 4096."""
    inputs = channels * model.avgpool.output_size[0] ** 2
    for layer in model.classifier:
        if isinstance(layer, nn.Linear):
            width = min(layer.out_features, 64)
            layer.__init__(inputs, width)  # type: ignore[misc]
            inputs = width
    return model


def _alexnet() -> Any:
    from torchvision.models import AlexNet

    return _narrow(AlexNet(num_classes=CLASSES), 256)


def _convnext() -> Any:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(16, 24, 1), CNBlockConfig(24, 32, 1), CNBlockConfig(32, None, 2)]
    return ConvNeXt(stages, num_classes=CLASSES)


def _densenet() -> Any:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=CLASSES)


def _maxvit() -> Any:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)


def _resnet(block: str, **fields: Any) -> Any:
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), [1, 1, 1, 1], num_classes=CLASSES, **fields)


def _swin(version: int) -> Any:
    from torchvision.models import swin_transformer as swin

    block = swin.SwinTransformerBlock if version == 1 else swin.SwinTransformerBlockV2
    merging = swin.PatchMerging if version == 1 else swin.PatchMergingV2
    stages = {"depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return swin.SwinTransformer([4, 4], 16, **stages, num_classes=CLASSES, block=block, downsample_layer=merging)


def _vit() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES)


def _on_resnet(head: str) -> Any:
    """A segmenter on a shallow ResNet: `fcn_resnet50` and `deeplabv3_resnet50` with one block a stage."""
    from torchvision.models import segmentation
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead
    from torchvision.models.segmentation.fcn import FCNHead

    resnet = _resnet("Bottleneck", replace_stride_with_dilation=[False, True, True], width_per_group=16)
    body = IntermediateLayerGetter(resnet, {"layer4": "out", "layer3": "aux"})
    last = FCNHead(2048, CLASSES) if head == "FCN" else DeepLabHead(2048, CLASSES, [2, 3, 4])
    return getattr(segmentation, head)(body, last, FCNHead(1024, CLASSES))


def _video(convolution: str, stem: str) -> Any:
    from torchvision.models.video import resnet

    makers = [getattr(resnet, convolution)] * 4
    return resnet.VideoResNet(resnet.BasicBlock, makers, [1, 1, 1, 1], getattr(resnet, stem), num_classes=CLASSES)


def _mvit(version: int) -> Any:
    from torchvision.models.video import mvit

    block = partial(mvit.MSBlockConfig, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3])
    blocks = [
        block(num_heads=1, input_channels=16, output_channels=32, stride_q=[1, 1, 1], stride_kv=[1, 2, 2]),
        block(num_heads=2, input_channels=32, output_channels=32, stride_q=[1, 2, 2], stride_kv=[1, 1, 1]),
    ]
    second = version == 2
    flags = (True, second, second, second)
    return mvit.MViT((32, 32), FRAMES, blocks, *flags, num_classes=CLASSES, norm_layer=nn.LayerNorm)


def _swin3d() -> Any:
    from torchvision.models.video import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=CLASSES)


def _s3d(dropout: float) -> nn.Module:
    """S3D for clips of 64 x 64: its pooling is made for 224 x 224."""
    from torchvision.models.video import s3d

    model = s3d(weights=None, num_classes=CLASSES)
    model.avgpool = nn.AvgPool3d(2, stride=1)
    return with_dropout(model, dropout)


def _built(name: str, build: Callable[[], Any], size: int = 64) -> Entry:
    return _entry(name, partial(_made, build), partial(pictures, size))


def _clip_entry(name: str, make: Callable[[float], nn.Module], size: int = 32, frames: int = FRAMES) -> Entry:
    return _entry(name, make, partial(_clips, size, frames))


CLASSIFIERS = (
    _built("alexnet", _alexnet),
    _built("convnext", _convnext),
    _built("densenet", _densenet),
    _classifier("efficientnet_b0"),
    _classifier("efficientnet_v2_s"),
    _classifier("googlenet", loss=_inception_loss, init_weights=False),
    _classifier("inception_v3", 128, init_weights=False, aux_logits=False),
    _built("maxvit", _maxvit),
    _classifier("mnasnet0_5"),
    _classifier("mobilenet_v2", width_mult=0.5),
    _classifier("mobilenet_v3_small"),
    _classifier("regnet_x_400mf"),
    _classifier("regnet_y_400mf"),
    _built("resnet", partial(_resnet, "BasicBlock")),
    _built("resnext", partial(_resnet, "Bottleneck", groups=8, width_per_group=4)),
    _classifier("shufflenet_v2_x0_5"),
    _classifier("squeezenet1_1"),
    _built("swin", partial(_swin, 1)),
    _built("swin_v2", partial(_swin, 2)),
    _built("vgg_bn", _vgg, 32),
    _built("vit", _vit, 32),
)

_SEGMENTERS: tuple[tuple[str, Callable[[float], nn.Module]], ...] = (
    ("fcn_resnet", partial(_made, partial(_on_resnet, "FCN"))),
    ("deeplabv3_resnet", partial(_made, partial(_on_resnet, "DeepLabV3"))),
    (
        "deeplabv3_mobilenet_v3_large",
        partial(_shallow, "deeplabv3_mobilenet_v3_large", {"weights_backbone": None, "aux_loss": True}),
    ),
    ("lraspp_mobilenet_v3_large", partial(_shallow, "lraspp_mobilenet_v3_large", {"weights_backbone": None})),
)
SEGMENTATION = tuple(_entry(name, make, partial(_pixels, 64), _segmentation_loss) for name, make in _SEGMENTERS)

VIDEO = (
    _clip_entry("r3d", partial(_made, partial(_video, "Conv3DSimple", "BasicStem"))),
    _clip_entry("mc3", partial(_made, partial(_video, "Conv3DNoTemporal", "BasicStem"))),
    _clip_entry("r2plus1d", partial(_made, partial(_video, "Conv2Plus1D", "R2Plus1dStem"))),
    _clip_entry("mvit_v1", partial(_made, partial(_mvit, 1))),
    _clip_entry("mvit_v2", partial(_made, partial(_mvit, 2))),
    _clip_entry("s3d", _s3d, 64, 16),
    _clip_entry("swin3d", partial(_made, _swin3d)),
)
"""Clips with one class each."""

ENTRIES: tuple[Entry, ...] = (*CLASSIFIERS, *SEGMENTATION, *VIDEO, *detection.ENTRIES)
