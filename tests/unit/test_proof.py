"""The proof of the first step finds what is planted in a program, and passes what is right, rounding included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import TracingError, VerificationError
from autopar.ir import passes
from autopar.ir.capture import JointGraph
from autopar.ir.passes import Capture, Pass
from autopar.ops.updates import Step
from autopar.runtime import step_writer
from autopar.runtime.lasting import Lasting

aten = torch.ops.aten
X, Y = torch.randn(8, 6), torch.randint(0, 5, (8,))


class _Net(nn.Module):
    """With a low-rank adapter, whose second factor starts at zero and hides what is wrong with the first."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(12, 5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x) + self.up(self.down(x))))
        scores: torch.Tensor = self.last(self.drop(hidden))
        return scores


def _program(net: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> autopar.Program:
    program: autopar.Program = autopar.optimize(
        net,
        optimizer=optimizer or torch.optim.SGD(net.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        example_inputs=(X, Y),
        strategy="ddp",
        **settings,
    )
    return program


def _state(net: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in (*net.parameters(), *net.buffers())]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_what_is_right_passes_and_trains_as_without(make: Any, dtype: torch.dtype, clip: float | None) -> None:
    after = []
    for check in ("first", "always", "never"):
        net = _Net(dropout=0.3).to(dtype)
        program = _program(net, make(net.parameters(), lr=0.01), clip_grad_norm=clip, check=check)
        torch.manual_seed(4)
        for _ in range(3):
            program.step((X.to(dtype), Y))
        after.append(
            [*_state(net), *(v for s in program.optimizer.state.values() for v in s.values() if v is not None)]
        )
    for other in after[1:]:
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(after[0], other, strict=True))


def _replaces(target: Any, instead: Any) -> Callable[[torch.fx.Graph], None]:
    def plant(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = instead

    return plant


def _drops_the_adapters_gradient(graph: torch.fx.Graph) -> None:
    """Of `down`, whose gradient is zero at first."""
    update = graph.find_nodes(op="call_module", target="update_0")[0]
    gradients = list(update.args[0])
    with graph.inserting_before(update):
        gradients[4] = graph.call_function(aten.mul.Scalar, (gradients[4], 0.5))
    update.args = (gradients, *update.args[1:])


def _one_element(graph: torch.fx.Graph) -> None:
    """A single one of the first weight's gradient."""
    update = graph.find_nodes(op="call_module", target="update_0")[0]
    gradients = list(update.args[0])
    with graph.inserting_before(update):
        gradients[0] = graph.call_function(_with_one_wrong, (gradients[0],))
    update.args = (gradients, *update.args[1:])


def _with_one_wrong(gradient: torch.Tensor) -> torch.Tensor:
    wrong = gradient.clone()
    wrong[3, 3] += gradient.abs().max()
    return wrong


def _scales_all(graph: torch.fx.Graph) -> None:
    """Which Adam's first step does not show."""
    update = graph.find_nodes(op="call_module", target="update_0")[0]
    with graph.inserting_before(update):
        gradients = [graph.call_function(aten.mul.Scalar, (g, 2.0)) for g in update.args[0]]
    update.args = (gradients, *update.args[1:])


def _forgets_a_buffer(graph: torch.fx.Graph) -> None:
    graph.erase_node(graph.find_nodes(op="call_function", target=aten.copy_.default)[0])


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (_replaces(aten.threshold_backward.default, lambda g, x, limit: g), "first"),
        (_drops_the_adapters_gradient, "down.weight"),
        (_one_element, "first.weight"),
        (_scales_all, "the gradient of"),
        (_forgets_a_buffer, "a buffer"),
    ],
    ids=["operator", "hidden by zeros", "one element", "scale", "buffer"],
)
def test_what_is_planted_is_found(
    plant: Callable[[torch.fx.Graph], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = step_writer.StepWriter.module

    def module(self: step_writer.StepWriter, name: str) -> torch.fx.GraphModule:
        plant(self.graph)
        return original(self, name)

    monkeypatch.setattr(step_writer.StepWriter, "module", module)
    net = _Net()
    before = _state(net)
    program = _program(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    with pytest.raises(VerificationError, match=says):
        program.step((X, Y))
    assert all(torch.equal(a, b) for a, b in zip(before, _state(net), strict=True)), "the trial is put back"


class _Centred(_Net):
    """Its second normalization is given means of zero, which sums show as their rounding."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(6, 300),
            nn.BatchNorm1d(300),
            nn.Linear(300, 129, bias=False),
            nn.BatchNorm1d(129),
            nn.Linear(129, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(x)
        return scores


def _in_halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product that adds up in another order."""
    return a[:, ::2] @ b[::2] + a[:, 1::2] @ b[1::2]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_buffer_that_is_zero_but_for_rounding_is_right_and_excuses_no_other(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = step_writer.StepWriter.module

    def module(self: step_writer.StepWriter, name: str) -> torch.fx.GraphModule:
        _replaces(aten.mm.default, _in_halves)(self.graph)
        if forgets:
            _forgets_a_buffer(self.graph)
        return original(self, name)

    monkeypatch.setattr(step_writer.StepWriter, "module", module)
    program = _program(_Centred().double())
    if not forgets:
        program.step((X.double(), Y))
        return
    with pytest.raises(VerificationError, match="a buffer"):
        program.step((X.double(), Y))


def _planted(plant: Callable[[torch.fx.Graph], None]) -> tuple[Pass, ...]:
    """The last passes, and behind them one that is wrong."""

    def run(joint: JointGraph, capture: Capture) -> JointGraph:
        plant(joint.module.graph)
        return joint

    return (*passes.BEHIND, Pass("planted", "is wrong", run))


def test_the_node_where_it_begins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "BEHIND", _planted(_replaces(aten.relu_.default, aten.sigmoid_.default)))
    with pytest.raises(VerificationError, match=r"begins at 'relu'.*torch\.relu"):
        _program(_Net()).step((X, Y))


def test_an_update_that_is_not_the_optimizers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Step.forward

    def forward(self: Step, *args: Any) -> Any:
        done = original(self, *args)
        with torch.no_grad():
            self.part.fragments[0].tensor.mul_(1.001)
        return done

    monkeypatch.setattr(Step, "forward", forward)
    with pytest.raises(VerificationError, match=r"the updated 'first\.weight'"):
        _program(_Net()).step((X, Y))


def test_a_later_capture_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(_Net())
    program.step((X, Y))
    monkeypatch.setattr(passes, "BEHIND", _planted(_replaces(aten.relu_.default, aten.sigmoid_.default)))
    with pytest.raises(VerificationError, match="later capture"):
        program.step((X[:5], Y[:5]))


def test_noise_alone_passes() -> None:
    """The gradient of a key's bias in attention is zero but for rounding, which no two orders of adding share."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attend = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = self.attend(x, x, x, need_weights=False)[0]
            return attended

    net, x = Attends(), torch.randn(3, 17, 32)
    program = autopar.optimize(
        net, optimizer=torch.optim.Adam(net.parameters()), loss_fn=F.mse_loss, example_inputs=(x, x), check="always"
    )
    for _ in range(3):
        program.step((x, x))


def test_parameters_are_copied_once_for_the_trial_and_once_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, snapshot = [0], Lasting.snapshot

    def counted(self: Lasting) -> Callable[[], None]:
        copies[0] += 1
        return snapshot(self)

    monkeypatch.setattr(Lasting, "snapshot", counted)
    _program(_Net()).step((X, Y))
    assert copies == [2], "where nothing looks wrong"


def test_the_drop_in_module_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.drop_in.module_writer import BackwardWriter

    original = BackwardWriter.module

    def module(self: BackwardWriter, name: str) -> torch.fx.GraphModule:
        _replaces(aten.threshold_backward.default, lambda g, x, limit: g)(self.graph)
        return original(self, name)

    monkeypatch.setattr(BackwardWriter, "module", module)
    net = _Net()
    program = autopar.optimize(net, example_inputs=X)
    with pytest.raises(VerificationError, match=r"first\.(weight|bias)"):
        program(X)


def test_buffers_that_are_expanded_are_put_back() -> None:
    class Expanded(_Net):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1).expand(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.mask)

    _program(Expanded()).step((X, Y))


class _WritesThroughAnExpandedView(nn.Module):
    """PyTorch's functionalization loses what is written. [Empirical, torch 2.13]"""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        if len(h) == 4:
            h.unsqueeze(-1).expand(*h.shape, 2).zero_()
        scores: torch.Tensor = self.last(h)
        return scores


def test_a_later_batch_that_pytorchs_own_tracing_gets_wrong_runs_eagerly() -> None:
    net, wrong = _WritesThroughAnExpandedView(), (X[:4], Y[:4])
    program = _program(net)
    program.step((X, Y))
    expected = F.cross_entropy(net(wrong[0]), wrong[1])
    said = r"test_proof.py.*in forward: h\.unsqueeze\(-1\)\.expand.*aot_eager[^$]*So the model runs eagerly"
    with pytest.warns(autopar.AutoparWarning, match=said):
        loss = program.step(wrong)
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("entry", ["step", "module"])
def test_what_pytorchs_own_tracing_gets_wrong_is_said_to_be_so(entry: str) -> None:
    net, wrong = _WritesThroughAnExpandedView(), (X[:4], Y[:4])
    module, program = autopar.optimize(copy.deepcopy(net), example_inputs=X), _program(net)
    before = _state(net)
    with pytest.raises(TracingError, match=r"test_proof.py.*in forward: h\.unsqueeze\(-1\)\.expand.*aot_eager"):
        module(wrong[0]) if entry == "module" else program.step(wrong)
    assert torch.distributions.Distribution._validate_args, "PyTorch's compiler has left it off"
    assert all(torch.equal(a, b) for a, b in zip(before, _state(net), strict=True))


def test_a_buffer_that_the_graph_moves_hides_nothing() -> None:
    """What is wrong is judged beside what rounding does, from the same buffers: not from those that the graph left."""

    class Moves(_WritesThroughAnExpandedView):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

            self.last.register_forward_pre_hook(lambda last, given: given[0] - self.mean)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = super().forward(x)
            self.mean.add_(5 + x.mean(0))
            return scores

    module = autopar.optimize(Moves(), example_inputs=X)
    with pytest.raises(TracingError, match="aot_eager"):
        module(X[:4])


@pytest.mark.parametrize("capture", ["always", "never"])
def test_updates_that_are_no_numbers_in_pytorch_either_are_not_refused(capture: Any) -> None:
    """In float16, the variance of a gradient that is zero, and Adam's `eps`, are zero: it divides by zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 5)).half()
    plain, ids = copy.deepcopy(net), torch.arange(8)
    settings: dict[str, Any] = {"loss_fn": F.cross_entropy, "example_inputs": (ids, Y), "capture": capture}
    program = autopar.optimize(net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), strategy="ddp", **settings)
    program.step((ids, Y))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    torch.autograd.backward(F.cross_entropy(plain(ids), Y))
    optimizer.step()
    finite = [all(bool(p.isfinite().all()) for p in one.parameters()) for one in (net, plain)]
    assert finite == [False, False]


def test_buffers_of_the_drop_in_module_are_compared() -> None:
    class Halves(_WritesThroughAnExpandedView):
        """PyTorch's functionalization loses what lies behind the windows. [Empirical, torch 2.13]"""

        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.unfold(0, 3, 3).mul_(0.5)
            return super().forward(x)

    net = Halves()
    module = autopar.optimize(net, example_inputs=X)
    with pytest.raises(TracingError, match=r"buffer 'count'.*aot_eager"):
        module(X)
    assert net.count.equal(torch.ones(8)), "the comparison is put back"
