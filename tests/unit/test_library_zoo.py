"""The zoo's models of other libraries train, in steps that are repeatable to the last bit."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from benchmarks.zoo import Entry, find
from benchmarks.zoo.libraries.timm import ENTRIES as TIMM

pytestmark = pytest.mark.filterwarnings("ignore")

SOME = {
    "torchaudio": ("audio", ("Wav2Vec2Model", "Emformer", "RNNT", "Tacotron2", "ConvTasNet")),
    "diffusers": ("diffusers", ("UNet2DModel", "FluxTransformer2DModel", "ControlNetModel", "AutoencoderKL")),
    "torch_geometric": ("geometric", ("GCN", "GAT of graphs", "HeteroConv", "SchNet", "LightGCN")),
    "peft": ("peft", ("LoRA llama", "AdaLora llama", "PrefixTuning gpt2", "DoRA resnet")),
    "timm": ("timm", ("test_convnext", "mobilevit_xxs", "swin_tiny_patch4_window7_224", "MultiScaleVit")),
    "torchvision": ("torchvision", ("resnet", "googlenet", "lraspp_mobilenet_v3_large", "mvit_v2", "fasterrcnn")),
}


def _need(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    try:
        import_module(library)
    except Exception as e:  # torchvision that does not fit PyTorch raises a RuntimeError, and timm with it
        if library != "torchaudio":  # its models can be imported without its compiled part
            pytest.skip(f"{library} cannot be imported: {e}")


def _step(entry: Entry) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = entry.build()
    torch.manual_seed(1)
    loss = entry.loss(model, entry.batch(2, 0))
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("library", "family", "name"), [(library, family, n) for library, (family, names) in SOME.items() for n in names]
)
def test_a_model_trains_and_its_step_is_repeatable(library: str, family: str, name: str) -> None:
    _need(library)
    entry = find(import_module(f"benchmarks.zoo.libraries.{family}").ENTRIES, f"{family}/{name}")
    loss, gradients = _step(entry)
    again, same = _step(entry)
    assert loss.shape == () and loss.isfinite()
    assert all(bool(g.isfinite().all()) for g in gradients) and any(int(g.count_nonzero()) for g in gradients)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


@pytest.mark.parametrize("family", [family for family, _ in SOME.values()])
def test_names_are_unique(family: str) -> None:
    entries = import_module(f"benchmarks.zoo.libraries.{family}").ENTRIES
    assert entries and len({e.name for e in entries}) == len(entries)


def test_dropout_is_a_parameter() -> None:
    _need("timm")
    entry = find(TIMM, "timm/test_vit")
    model, batch = entry.build(dropout=0.5), entry.batch(2, 0)
    torch.manual_seed(0)
    assert not torch.equal(entry.loss(model, batch), entry.loss(model, batch))
