"""Models without weights, on the `meta` device or of fake tensors: planned as the real ones are, and not trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import autopar
from autopar.cli.app import app
from autopar.cli.model_argument import load_model
from autopar.errors import AutoparWarning, CaptureError, PlanError, PlanMismatchError, SpecError

CLUSTER = autopar.ClusterSpec.local(4)


class Words(nn.Module):
    """A tied table, a buffer with values, a constant that is neither, batch statistics, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("frequency", torch.arange(8).float())
        self.scales = [torch.ones(8), {"of": torch.ones(8)}]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x: Any = self.table(ids).mean(1) * self.frequency * self.scales[0] + self.scales[1]["of"] + torch.arange(8)  # type: ignore[index]
        return {"loss": F.cross_entropy(self.head(self.norm(self.frozen(x))), labels)}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(-x if x.sum() > 0 else x).mean()
        return loss


class OtherOnMeta(nn.Module):
    """Looks rows up where it has no values, and multiplies with the whole table where it has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 8)
        self.looks_up = self.table.weight.is_meta

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        table = self.table.weight
        x = F.embedding(ids, table) if self.looks_up else F.one_hot(ids, 2000).float() @ table
        return F.cross_entropy(x.mean(1), labels)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(12).reshape(4, 3) % 5
    return {"ids": ids, "labels": ids[:, 0].clone()}


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def without_values(x: Any) -> Any:
    return pytree.tree_map(lambda t: t.to("meta"), x)


def planned(model: nn.Module, inputs: Any = None) -> autopar.Plan:
    return autopar.plan(model, CLUSTER, example_inputs=inputs or batch(), strategy="Parallax", capture="always")


def test_a_model_without_weights_gets_the_plan_of_the_real_one() -> None:
    real, inputs = planned(Words()), batch()
    assert planned(on_meta(Words)) == real
    mode = FakeTensorMode()
    with mode:
        model = Words()
        assert planned(model, inputs) == real
    held = model.scales[0]
    assert planned(model) == real
    assert model.scales[0] is held, "a capture leaves the model as it was"
    with torch.device("meta"):
        assert planned(Words(), inputs) == real


def test_such_a_plan_trains_the_real_model() -> None:
    one = autopar.ClusterSpec.local(1)
    plan = autopar.plan(on_meta(Words), one, example_inputs=batch())
    model = Words()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    program = autopar.optimize(model, one, optimizer=optimizer, example_inputs=batch(), plan=plan)
    assert program.step(batch()) > program.step(batch())
    model.to("meta")
    with pytest.raises(PlanMismatchError, match="was replaced"):
        program.step(batch())


def test_a_plan_that_the_real_model_has_no_graph_for_is_refused() -> None:
    settings: dict[str, Any] = {"example_inputs": batch(), "capture": "always"}
    plan = autopar.plan(on_meta(OtherOnMeta), CLUSTER, strategy="structured", **settings)
    assert [g.strategy for g in plan.groups] == ["sparse_rows"]
    with pytest.raises(PlanError, match=r"'table.weight' cannot use sparse_rows"):
        autopar.plan(OtherOnMeta(), CLUSTER, plan=plan, **settings)


def test_a_batch_without_values_leaves_open_which_rows_it_names() -> None:
    with pytest.warns(AutoparWarning, match="the batch has no values.*'table.weight'"):
        plan = planned(on_meta(Words), without_values(batch()))
    assert plan.model == planned(Words()).model


def test_counts_of_a_batch_without_values_need_none() -> None:
    inputs = without_values((torch.ones(4, 2), torch.ones(4, 1)))
    settings: dict[str, Any] = {"example_inputs": inputs, "loss_fn": F.mse_loss, "strategy": "ddp"}
    autopar.plan(on_meta(lambda: nn.Linear(2, 1)), CLUSTER, weight=lambda b: (b[1] != 0).sum(), **settings)
    with pytest.raises(SpecError, match="weight= cannot count in this batch, which has no values"):
        autopar.plan(on_meta(lambda: nn.Linear(2, 1)), CLUSTER, weight=lambda b: b[1].sum().item(), **settings)


def test_what_has_to_run_the_model_is_refused() -> None:
    linear, inputs = on_meta(lambda: nn.Linear(2, 1)), (torch.ones(4, 2), torch.ones(4, 1))
    settings: dict[str, Any] = {"example_inputs": inputs, "loss_fn": F.mse_loss}
    with pytest.raises(SpecError, match=r"measure_compute.*'weight' has no values"):
        autopar.plan(linear, CLUSTER, measure_compute=True, **settings)
    with pytest.raises(CaptureError, match=r"capture='never'.*'weight' has no values"):
        autopar.plan(linear, CLUSTER, capture="never", **settings)
    with pytest.raises(CaptureError, match=r"(?s)a branch depends.*'layer.weight' has no values"):
        autopar.plan(on_meta(Branches), CLUSTER, example_inputs=torch.ones(4, 2))
    with pytest.raises(CaptureError, match=r"(?s)a branch depends.*the batch has no values"):
        autopar.plan(Branches(), CLUSTER, example_inputs=torch.ones(4, 2, device="meta"))
    with pytest.raises(CaptureError, match=r"'weight' has no values.*optimize\(model, plan=plan"):
        autopar.optimize(linear, optimizer=torch.optim.SGD(linear.parameters(), lr=0.1), **settings)
    with pytest.raises(CaptureError, match="example_inputs hold a tensor without values"):
        autopar.optimize(nn.Linear(2, 1), example_inputs=torch.ones(4, 2, device="meta"))


FACTORIES = """\
import torch
from torch import nn

BATCH = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(4, 4))
        self.one, self.two = weight, weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("large", torch.ones(1024, 4 * 1024), persistent=False)

    def forward(self, x):
        return x @ (self.one * self.mask) @ self.two


def factory():
    model = Model()
    return {
        "model": model,
        "example_inputs": BATCH,
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def reads():
    made = factory()
    made["scale"] = float(made["model"].one.sum())
    return {k: v for k, v in made.items() if k != "scale"}


def branches():
    model = Model()
    model.register_forward_pre_hook(lambda m, args: (args[0] * (2 if args[0].sum() > 0 else 1),))
    return model, *[BATCH, nn.functional.cross_entropy]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(FACTORIES)
    return path


def test_a_factory_makes_its_model_without_weights(models: Path) -> None:
    made = load_model(f"{models}:factory", weights=False)
    model: Any = made.model
    assert model.one.is_meta and model.one is model.two and model.one.requires_grad
    assert made.optimizer is not None and made.optimizer.param_groups[0]["params"] == [model.one]
    assert not model.mask.is_meta and model.large.is_meta and not made.example_inputs[0].is_meta
    real: Any = load_model(f"{models}:factory").model
    assert not any(t.is_meta for t in (real.one, real.large)), "what is made later is real again"


@pytest.mark.parametrize(
    ("factory", "options", "code", "said"),
    [
        ("factory", ("-v",), 0, "'one' has no values"),
        ("factory", ("-v", "--weights"), 0, ""),
        ("reads", (), 0, "made with its weights (--no-weights: never)"),
        ("reads", ("--no-weights",), 2, "the factory raised RuntimeError"),
        ("branches", (), 0, "made with its weights (--no-weights: never)"),
        ("branches", ("--no-weights",), 2, "'one' has no values"),
        ("factory", ("--no-weights", "--measure-compute"), 2, "leave --no-weights out"),
    ],
)
def test_the_command_says_which_model_it_plans(
    models: Path, factory: str, options: tuple[str, ...], code: int, said: str
) -> None:
    run = CliRunner().invoke(
        app, ["plan", f"{models}:{factory}", "--cluster", "local:2", "--strategy", "ddp", *options]
    )
    assert run.exit_code == code, run.stderr
    assert said in run.stderr
    assert ("no values" in run.stderr) == ("no values" in said)
