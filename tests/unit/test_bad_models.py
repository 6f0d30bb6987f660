"""Models, losses, optimizers and batches that cannot be used, and what the user is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, OptimizerError, PlanError, PlanMismatchError, SignatureError
from autopar.ir.model_output import find_loss
from autopar.ops.fragments import Fragment
from autopar.runtime.optimizers.optimizer import OptimizerPart
from autopar.spec.plan import ParameterSlice

ONE = autopar.ClusterSpec.local(1)
BATCH = (torch.randn(3, 4), torch.randn(3, 4))


def optimize(model: nn.Module, batch: Any = BATCH, loss_fn: Any = nn.functional.mse_loss, **settings: Any) -> Any:
    settings.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return autopar.optimize(model, ONE, example_inputs=batch, loss_fn=loss_fn, **settings)


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.sum() > 0:  # the line that the message must name
            return y * 2
        return y


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


class WritesToItsInput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


def test_a_graph_break_is_refused_with_the_users_line() -> None:
    with pytest.raises(CaptureError) as e:
        optimize(Branching(4, 4), capture="always")
    line = next(i for i, text in enumerate(open(__file__), 1) if "the line that the message must name" in text)  # noqa: PTH123, SIM115
    assert f"{__file__}:{line}" in str(e.value)
    assert "torch.where" in str(e.value)


def test_a_loss_that_is_no_scalar() -> None:
    with pytest.raises(CaptureError, match=r"one scalar.*\(3, 4\).*reduce it"):
        optimize(nn.Linear(4, 4), BATCH[0], None)


def test_no_loss_at_all() -> None:
    class Outputs(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x)}

    with pytest.raises(CaptureError, match="holds no loss: pass labels"):
        optimize(Outputs(4, 4), BATCH[0], None)


class Several(nn.Linear):
    """Returns its loss first, with others behind it."""

    def forward(self, x: torch.Tensor) -> Any:
        h = super().forward(x)
        return h.square().mean(), None, h, *self.others(h)

    def others(self, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (h.mean().detach(),)


def test_the_loss_is_the_first_of_a_tuple() -> None:
    model = Several(4, 4)
    expected = model(BATCH[0])[0].item()
    assert optimize(model, BATCH[0], None).step(BATCH[0]).item() == pytest.approx(expected)


def test_a_tuple_of_several_losses_is_refused() -> None:
    class Two(Several):
        def others(self, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (h.abs().mean(),)

    class Within(Several):
        def others(self, h: torch.Tensor) -> Any:
            return ({"more": h.abs().mean()},)

    for model in (Two(4, 4), Within(4, 4)):
        with pytest.raises(CaptureError, match=r"\(tuple\) holds several scalars.*added up"):
            optimize(model, BATCH[0], None)


def test_the_loss_of_a_tuple_is_found_without_gradients() -> None:
    """Parts of batches run so, to see whether a loss compares samples with each other."""
    with torch.no_grad():
        output = Several(4, 4)(BATCH[0])
        assert find_loss(output) is output[0]


def test_a_parameter_without_a_gradient_is_named() -> None:
    with pytest.raises(CaptureError, match=r"2 trainable parameter.*'spare.weight', 'spare.bias'.*freeze"):
        optimize(Unused())


def test_a_parameter_without_a_gradient_may_be_frozen_and_then_stays_as_eager_leaves_it() -> None:
    model = Unused()
    eager = copy.deepcopy(model)
    program = optimize(model, unused_parameters="freeze")
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        program.step(BATCH)
        optimizer.zero_grad()
        nn.functional.mse_loss(eager(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_parameter_frozen() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="no parameter gets a gradient"):
        optimize(model.requires_grad_(False), optimizer=optimizer)


def test_a_model_that_writes_to_its_input() -> None:
    with pytest.warns(autopar.AutoparWarning, match="'tensor 0 of the batch', which the captured step does not do"):
        optimize(WritesToItsInput(4, 4), capture="always")


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(OptimizerError, match=r"2 of the optimizer's 2 parameters are not the model's"):
        optimize(nn.Linear(4, 4), optimizer=torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))


def test_an_optimizer_that_lacks_a_parameter() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match=r"1 trainable parameter\(s\), the first is 'bias'"):
        optimize(model, optimizer=torch.optim.SGD([model.weight], lr=0.1))


def test_lbfgs_and_optimizers_of_others() -> None:
    class Own(torch.optim.SGD):
        pass

    model = nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match="closure"):
        optimize(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(OptimizerError, match='optimizer_acts_on="element" or "parameter"'):
        optimize(model, optimizer=Own(model.parameters(), lr=0.1))
    optimize(model, optimizer=Own(model.parameters(), lr=0.1), optimizer_acts_on="element").step(BATCH)


@pytest.mark.parametrize("capture", ["always", "never"])
@pytest.mark.parametrize("steps_first", [False, True])
def test_a_model_of_another_dtype_than_it_was_planned_with(capture: Any, steps_first: bool) -> None:
    model, ids = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)), torch.tensor([0, 3, 2])
    program = optimize(model, (ids, BATCH[1]), capture=capture)
    module = autopar.optimize(copy.deepcopy(model), ONE, example_inputs=ids, capture=capture)
    if steps_first:
        program.step((ids, BATCH[1]))
        module(ids).sum().backward()
    model.double()
    module.module.double()
    said = r"'0.weight' was torch.float32 on cpu .* is torch.float64 on cpu now"
    for use in (lambda: program.step((ids, BATCH[1].double())), lambda: module(ids)):
        with pytest.raises(PlanMismatchError, match=said):
            use()


def test_sparse_adam_is_refused_by_name() -> None:
    model = nn.Embedding(5, 4, sparse=True)
    with pytest.raises(OptimizerError, match=r"SparseAdam takes sparse gradients.*Use Adagrad or SGD.*to_sparse\(1\)"):
        optimize(model, (torch.tensor([0, 3]), torch.zeros(2, 4)), optimizer=torch.optim.SparseAdam(model.parameters()))


def test_an_optimizer_with_attributes_of_its_own() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, parameters: Any, factor: float) -> None:
            super().__init__(parameters, lr=0.1)
            self.factor = factor

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["lr"] = 0.1 * self.factor
            super().step(closure)

    model = nn.Linear(4, 4)
    eager = copy.deepcopy(model)
    optimize(model, optimizer=Own(model.parameters(), 0.5), optimizer_acts_on="element").step(BATCH)
    nn.functional.mse_loss(eager(BATCH[0]), BATCH[1]).backward()
    Own(eager.parameters(), 0.5).step()
    assert torch.allclose(model.weight, eager.weight)


def test_parameters_that_the_optimizer_gets_or_loses_later() -> None:
    def program(late: str) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].requires_grad_(late == "removed")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        made = optimize(model, optimizer=optimizer)
        made.step(BATCH)
        if late == "removed":
            optimizer.param_groups[0]["params"].pop()
        else:
            new = [nn.Parameter(torch.zeros(2))] if late == "stranger" else [*model[1].requires_grad_().parameters()]
            optimizer.add_param_group({"params": new})
        return made

    for late, said in [
        ("thawed", r"2 parameter\(s\) were added to it, '1.weight', '1.bias': call autopar.optimize again"),
        ("stranger", r"1 parameter\(s\) that are not the model's"),
        ("removed", "parameters were removed"),
    ]:
        made = program(late)
        before = [p.clone() for p in made.model.parameters()]
        with pytest.raises(OptimizerError, match=said):
            made.step(BATCH)
        assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), before, strict=True))


@pytest.mark.parametrize("batch", [None, "text", {}, (), ["a", 3]], ids=repr)
def test_what_is_no_batch(batch: Any) -> None:
    program = optimize(nn.Linear(4, 4))
    with pytest.raises(SignatureError):
        program.step(batch)


def test_a_batch_that_does_not_fit_the_model() -> None:
    program = optimize(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"3.*5|5.*4"):
        program.step((torch.randn(3, 5), torch.randn(3, 4)))
    with pytest.raises(SignatureError, match=r"\(inputs, target\)"):
        program.step((torch.randn(3, 4),))
    program.step(BATCH)  # and nothing is lost


def test_no_example_inputs() -> None:
    with pytest.raises(SignatureError, match=r"pass\s+example_inputs=batch"):
        autopar.optimize(nn.Linear(4, 4), ONE)


def test_example_inputs_from_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    program = autopar.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert program.step(model.dummy_inputs | {"labels": model.dummy_inputs["input_ids"]}).isfinite()


def test_plans_of_another_model_cluster_or_size() -> None:
    settings: dict[str, Any] = {"example_inputs": BATCH, "loss_fn": nn.functional.mse_loss}
    other = autopar.plan(nn.Linear(4, 5), ONE, **settings | {"example_inputs": (BATCH[0], torch.randn(3, 5))})
    with pytest.raises(PlanMismatchError, match=r"'weight': shape is \(5, 4\) in the plan, \(4, 4\) in the model"):
        optimize(nn.Linear(4, 4), plan=other)
    four = autopar.plan(nn.Linear(4, 4), autopar.ClusterSpec.local(4), **settings)
    with pytest.raises(PlanMismatchError, match="made for 4 ranks"):
        optimize(nn.Linear(4, 4), plan=four)
    mine = autopar.plan(nn.Linear(4, 4), ONE, **settings)
    elsewhere = autopar.ClusterSpec.loads("hosts: [{name: a, devices: 1 x A100-80GB}]")
    with pytest.raises(PlanMismatchError, match="another cluster"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        autopar.optimize(model, elsewhere, **settings, optimizer=optimizer, plan=mine)


def test_an_unknown_strategy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PlanError, match="did you mean 'Parallax'"):
        optimize(nn.Linear(4, 4), strategy="Paralax")


def test_an_optimizer_that_quantizes_its_state_in_blocks_does_not_act_on_elements() -> None:
    class Blocks(torch.Tensor):
        pass

    class Quantizing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["moment"] = torch.zeros_like(p.detach()).as_subclass(Blocks)

    parameter = nn.Parameter(torch.zeros(4))
    piece = ParameterSlice(name="p", start=0, stop=2)
    part = Fragment("p", False, parameter.detach()[:2], piece, 0, 0, parameter=parameter)
    made = OptimizerPart(Quantizing([parameter], lr=0.1), [part], {"p": parameter})
    with pytest.raises(OptimizerError, match=r"keeps 'moment' as Blocks.*optimizer_acts_on=\"parameter\""):
        made.step([torch.ones(2)])
