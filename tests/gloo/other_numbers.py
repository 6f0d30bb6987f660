"""What the tests of `test_other_numbers` run on each rank: what would differ from one process, or between ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.backends import collectives
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph


class Net(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.activation(self.first(x)))
        return scores


class Averages(Net):
    """Reads and writes a moving average."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x - self.mean)


def batch(rank: int, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    n = size or 2 + rank
    return (
        torch.randn(n, 4, generator=draw, dtype=torch.float64),
        torch.randn(n, 3, generator=draw, dtype=torch.float64),
    )


def program_of(net: nn.Module, rank: int, lr: float = 0.1, size: int | None = 3, **settings: Any) -> autopar.Program:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    program: autopar.Program = autopar.optimize(
        net, optimizer=optimizer, loss_fn=F.mse_loss, example_inputs=batch(rank, size), **settings
    )
    return program


def one_wide_column_slices(rank: int, n: int) -> float:
    """Each column in a group of its own, which gloo is not to be given as strided memory."""
    slices = [{"name": "first.weight", "dim": 1, "start": i, "stop": i + 1} for i in range(4)]
    return difference(Net, [[m] for m in slices], rank, n)


class Shifted(Net):
    """Two parameters whose gradients lie in one memory, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.one, self.other = (nn.Parameter(torch.zeros(n)) for n in (0, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.one + self.other) + (2 * self.none).sum()


def gradients_in_one_memory(rank: int, n: int) -> float:
    """Which each group would sum where it lies, the second group the first one's sum."""
    return difference(Shifted, [[{"name": "one"}], [{"name": "other"}]], rank, n)


def no_elements_first(rank: int, n: int) -> float:
    """Whether a gradient may be summed where it lies is asked of the one member that has elements."""
    return difference(Shifted, [[{"name": "none"}, {"name": "one"}], [{"name": "other"}]], rank, n)


def difference(model: Callable[[], nn.Module], members: list[list[dict[str, Any]]], rank: int, n: int) -> float:
    """By how much a step differs from one in one process. `members`: of the first groups; others are alone."""
    net, eager = model().double(), model().double()
    graph = training_graph(net, flatten(batch(rank)), F.mse_loss)
    named = {m["name"] for some in members for m in some}
    rest = [[{"name": p.name}] for p in graph.parameters if p.name not in named]
    groups = [{"strategy": "all_reduce", "members": some} for some in [*members, *rest]]
    plan = autopar.Plan.model_validate(
        {"model": graph.model, "cluster": autopar.ClusterSpec.local(n).fingerprint, "groups": groups}
    )
    program_of(net, rank, plan=plan).step(batch(rank))
    parts = [batch(r) for r in range(n)]
    F.mse_loss(eager(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    return max(float((a - b).detach().norm()) for a, b in zip(net.parameters(), eager.parameters(), strict=True))


def gradients_of_inputs(rank: int, n: int) -> float:
    """What comes before the drop-in is a rank's own, as is its gradient; with an accumulated step."""
    net, before = Net().double(), nn.Linear(4, 4).double()
    eager, eager_before = copy.deepcopy(net), copy.deepcopy(before)
    module = autopar.optimize(net, example_inputs=batch(rank)[0])
    x, y = batch(rank)
    with module.no_sync():
        F.mse_loss(module(before(x)), y).backward()
    F.mse_loss(module(before(x)), y).backward()
    (2 * F.mse_loss(eager(eager_before(x)), y)).backward()
    pairs = zip(before.parameters(), eager_before.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)


def nothing_saved(rank: int, n: int) -> float:
    """A drop-in module whose backward pass needs nothing of the forward pass: only a bias is trained."""
    net = nn.Linear(4, 3).double()
    net.weight.requires_grad_(False)
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=batch(rank)[0])
    module(batch(rank)[0]).mean().backward()
    eager(torch.cat([batch(r)[0] for r in range(n)])).mean().backward()
    assert net.bias.grad is not None and eager.bias.grad is not None
    return float((net.bias.grad - eager.bias.grad).abs().max())


def shared_buffers(rank: int, n: int) -> tuple[list[float], list[str]]:
    """The moving average after two steps, and what was said of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net = Averages().double()
        program = program_of(net, rank, strategy="ddp")
        for _ in range(2):
            program.step(batch(rank, 3))
    return net.mean.tolist(), [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except (autopar.AutoparError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return "nothing was refused"


def other_rates(rank: int, n: int) -> str:
    return refused(lambda: program_of(Net().double(), rank, lr=0.1 * (1 + rank)))


def other_activations(rank: int, n: int) -> str:
    return refused(lambda: program_of(Net((torch.tanh, torch.relu)[rank]).double(), rank, strategy="ddp"))


def said_of_uneven(rank: int, n: int) -> dict[str, list[str]]:
    """What is said where batches differ in shape, of ranks that compute different things, and of ranks that do not,
    though their graphs have different constants."""

    def scaled(by: Callable[[torch.Tensor], float]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.tanh(x) * by(x)

    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "an activation": (torch.tanh, torch.relu)[rank],
        "a factor": scaled(lambda x: (0.3, 0.4)[rank]),
        "a whole factor": scaled(lambda x: (2, 3)[rank]),
        "alike": torch.tanh,
        "alike, by shape": scaled(lambda x: 0.7 / len(x)),
        "alike, by a case": lambda x: torch.sin(x) if len(x) > 2 else torch.cos(x) * 2,
    }
    found = {}
    for what, activation in activations.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            program_of(Net(activation).double(), rank, size=None, strategy="ddp")
        found[what] = [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]
    return found


def rates_that_change(rank: int, n: int) -> dict[str, str]:
    """What is said where rank 1 alone changes its rate, after steps in which both ranks change theirs; and that nothing
    was updated then, nor keeps both from going on once they agree. With micro-batches, on rank 1 alone."""
    said = {}
    for what in ("number", "tensor"):
        net = Net().double()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 if what == "number" else torch.tensor(0.1))
        program: autopar.Program = autopar.optimize(
            net, optimizer=optimizer, loss_fn=F.mse_loss, example_inputs=batch(rank), strategy="zero1"
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(2):
            program.step(batch(rank))
            schedule.step()
        before, group = [p.detach().clone() for p in net.parameters()], optimizer.param_groups[0]
        if rank == 1:
            group["lr"] *= 0.5  # a tensor in place
        several = [batch(rank), batch(rank, 1)] if rank == 1 else [batch(rank)]
        said[what] = refused(lambda p=program, several=several: p.step(micro_batches=several))  # type: ignore[misc]
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        if rank == 0:
            group["lr"] *= 0.5
        program.step(batch(rank))
    return said


def sum_over_uneven_micro_batches(rank: int, n: int) -> float:
    """A loss that is a sum, where rank 0 has one micro-batch and rank 1 has two."""
    loss_fn = nn.MSELoss(reduction="sum")
    net, eager = Net().double(), Net().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)  # DDP would divide it
        program: autopar.Program = autopar.optimize(
            net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss_fn=loss_fn, example_inputs=batch(rank)
        )
        program.step(batch(0)) if rank == 0 else program.step(micro_batches=[batch(1), batch(2)])
    parts = [batch(r) for r in range(3)]
    loss_fn(eager(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    return max(float((a - b).detach().abs().max()) for a, b in zip(net.parameters(), eager.parameters(), strict=True))


def always_compared(rank: int, n: int) -> str:
    """Steps whose optimizer state lies in parts, on several ranks or on one of them."""

    def train() -> None:
        for strategy in ("zero1", "PSLoadBalancing", "ddp"):
            net = Net().double()
            program: autopar.Program = autopar.optimize(
                net,
                optimizer=torch.optim.NAdam(net.parameters()),
                loss_fn=F.mse_loss,
                example_inputs=batch(rank),
                strategy=strategy,
                check="always",
            )
            for _ in range(3):
                program.step(batch(rank))

    return refused(train)


def wrong_sums(rank: int, n: int) -> str:
    """A collective that sums wrongly, once it is planted, on one rank alone."""
    original = collectives.wait

    def wait(x: torch.Tensor) -> torch.Tensor:
        found = original(x)
        return found * 1.01 if rank == 0 and found.numel() > 10 else found

    net = Net().double()
    before = [p.detach().clone() for p in net.parameters()]
    program = program_of(net, rank, strategy="ddp")
    step = program.graph_module
    for node in step.graph.find_nodes(op="call_function", target=collectives.wait):
        node.target = wait
    step.recompile()
    said = refused(lambda: program.step(batch(rank, 3)))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)), said
    return said


class Centered(nn.Module):
    """Takes away again what its first parameter adds, whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.last = nn.Parameter(torch.zeros(4)), nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = 1e-6 * x + self.shift
        scores: torch.Tensor = self.last(h - h.mean(0))
        return scores


def rounding_in_a_drop_in(rank: int, n: int, by: float) -> str:
    """What is said of a drop-in module one of whose gradients is nothing but rounding, on ranks whose shares of the
    batch are thirds, and of which rank 0 sums `by` times too much."""
    torch.manual_seed(2)
    module, (x, y) = autopar.optimize(Centered(), example_inputs=batch(rank, 6)[0].float()), batch(rank, 4 + 4 * rank)
    original = collectives.wait

    def wait(t: torch.Tensor) -> torch.Tensor:
        return original(t) * (by if rank == 0 and t.dtype == torch.float32 else 1.0)

    with patch.object(collectives, "wait", wait):
        return refused(lambda: F.mse_loss(module(x.float()), y.float()).backward())


class Keeps(Net):
    """Keeps what its dropout has left, for who looks at it."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = F.dropout(x, 0.5)
        return super().forward(self.kept)


def dropout_that_is_kept(rank: int, n: int) -> float:
    """How far the loss of a captured step is from the ranks' eager losses, each with its stream of random numbers."""
    net, eager = Keeps().double(), Keeps().double()
    torch.manual_seed(5)
    program = program_of(net, rank, capture="always")
    x, y = batch(rank, 3)
    torch.manual_seed(5 + rank)
    with torch.no_grad():
        expected = F.mse_loss(eager(x), y)
    torch.distributed.all_reduce(expected)
    return abs(float(program.step((x, y)) - expected / n))


class Level(nn.Module):
    """All classes have one score, so that their gradients, each of some size, add up to nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = torch.tanh(self.layer(x)).expand(-1, 3)
        return scores


def gradients_that_are_nothing(rank: int, n: int) -> float:
    """How far a step moves a parameter whose gradient is nothing, but for rounding."""
    net = Level().double()
    before = net.layer.weight.detach().clone()
    x, y = batch(rank, 3 + 2 * rank)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = x, y.argmax(1)
    autopar.optimize(net, optimizer=optimizer, loss_fn=weighted, example_inputs=given).step(given)
    return float((net.layer.weight - before).abs().max())


def everything(rank: int, n: int) -> dict[str, Any]:
    """All of the above, on this rank."""
    return {
        "column slices": one_wide_column_slices(rank, n),
        "gradients in one memory": gradients_in_one_memory(rank, n),
        "no elements first": no_elements_first(rank, n),
        "gradients of inputs": gradients_of_inputs(rank, n),
        "gradients that are nothing": gradients_that_are_nothing(rank, n),
        "dropout that is kept": dropout_that_is_kept(rank, n),
        "nothing saved": nothing_saved(rank, n),
        "shared buffers": shared_buffers(rank, n),
        "other rates": other_rates(rank, n),
        "rates that change": rates_that_change(rank, n),
        "a sum over uneven micro-batches": sum_over_uneven_micro_batches(rank, n),
        "other activations": other_activations(rank, n),
        "uneven": said_of_uneven(rank, n),
        "always compared": always_compared(rank, n),
        "wrong sums": wrong_sums(rank, n),
        "rounding": [rounding_in_a_drop_in(rank, n, by) for by in (1.0, 1.01)],
    }
