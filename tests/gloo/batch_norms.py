"""What the tests of synchronized batch normalization run on each rank: against one process on the global batch."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import AutoparError

SIZES = (3, 2, 4)


def net(momentum: float | None = 0.1, converted: bool = False) -> nn.Module:
    torch.manual_seed(4)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.BatchNorm1d(6, affine=False),
        nn.Linear(6, 3),
    ).double()
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if converted else model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    size = SIZES[rank] + step % 2 * rank
    return torch.randn(size, 2, 3, 3, generator=draw).double() + rank, torch.randint(0, 3, (size,), generator=draw)


def joined(step: int, n: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(x) for x in zip(*(batch(step, r) for r in range(n)), strict=True))


def train(rank: int, n: int, strategy: str, momentum: float | None = 0.1, converted: bool = False) -> list[float]:
    """How far losses and parameters, buffers, and outputs in evaluation mode are from one process's, over some steps of
    which the second has other shapes."""
    model, eager = net(momentum, converted), net(momentum)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    program = autopar.optimize(
        model,
        example_inputs=batch(0, rank),
        loss_fn=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        strategy=strategy,
        sync_batch_norm=not converted,
    )
    worst = 0.0
    for step in range(3):
        loss = program.step(batch(step, rank))
        optimizer.zero_grad()
        x, y = joined(step, n)
        expected = F.cross_entropy(eager(x), y)
        expected.backward()
        optimizer.step()
        worst = max(worst, abs(loss.item() - expected.item()))
    x, _ = joined(7, n)
    with program.evaluation():
        assert not model.training and not torch.is_grad_enabled()
        shown = apart([model(x)], [eager.eval()(x)])
        parameters = apart(model.parameters(), eager.parameters())
    assert all(m.training for m in model.modules())
    return [max(worst, parameters), apart(model.buffers(), eager.buffers()), shown]


def train_module(rank: int, n: int, each: int) -> float:
    """How far a drop-in module's gradients, parameters and buffers are from one process's, over steps of `each`
    backward passes, of which only the last is sent."""
    model, eager = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager)]
    synced = autopar.optimize(model, example_inputs=batch(0, rank)[0], strategy="ddp", sync_batch_norm=True)
    worst = 0.0
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        parts = [each * step + k for k in range(each)]
        total = sum(len(joined(k, n)[0]) for k in parts)
        for k in parts:
            x, y = batch(k, rank)
            with contextlib.nullcontext() if k == parts[-1] else synced.no_sync():
                F.cross_entropy(synced(x), y).backward()
            x, y = joined(k, n)
            # As with DDP, a pass that was kept back is added, not averaged.
            (F.cross_entropy(eager(x), y) * (each * len(x) / total)).backward()
        pairs = [*zip(model.parameters(), eager.parameters(), strict=True)]
        worst = max(worst, apart([a.grad for a, _ in pairs], [b.grad for _, b in pairs]))
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, apart(model.state_dict().values(), eager.state_dict().values()))
    return worst


def freeze_midway(rank: int, n: int) -> dict[str, tuple[float, ...]]:
    """How far parameters and buffers are from `DistributedDataParallel`'s where layers are in evaluation mode from the
    third step on, and once more train in the fifth; how many warnings say so; and how many that each rank's batch is
    normalized by itself."""
    found = {}
    for capture in ("always", "never"):
        for kind in ("step", "module"):
            model, theirs = net(), net()
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
            given: dict[str, Any] = {"strategy": "ddp", "capture": capture}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", autopar.AutoparWarning)
                if kind == "step":
                    given |= {"loss_fn": F.cross_entropy, "optimizer": optimizers[0]}
                    made: Any = autopar.optimize(model, example_inputs=even_batch(0, rank), **given)
                else:
                    made = autopar.optimize(model, example_inputs=even_batch(0, rank)[0], **given)
                wrapped = DistributedDataParallel(theirs)
                for step in range(7):
                    for m in (*model.modules(), *theirs.modules()):
                        if isinstance(m, nn.modules.batchnorm._BatchNorm):
                            m.train(step < 2 or step == 4)
                    x, y = even_batch(step, rank)
                    optimizers[1].zero_grad()
                    F.cross_entropy(wrapped(x), y).backward()
                    optimizers[1].step()
                    if kind == "step":
                        made.step((x, y))
                    else:
                        optimizers[0].zero_grad()
                        F.cross_entropy(made(x), y).backward()
                        optimizers[0].step()
            told = [sum(what in str(w.message) for w in said) for what in ("in evaluation mode now", "by itself")]
            found[f"{kind}, {capture}"] = (apart(model.state_dict().values(), theirs.state_dict().values()), *told)
    return found


def even_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(0, 0)
    return x + step + 2 * rank * x.roll(rank, 0), (y + step + rank) % 3


def apart(a: Any, b: Any) -> float:
    return max(float((x.double() - y.double()).detach().abs().max()) for x, y in zip(a, b, strict=True))


def ends_with_it(rank: int) -> list[str]:
    """What is said of the loss of a model that ends with batch normalization."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3, bias=False), nn.BatchNorm1d(3)).double()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = autopar.optimize(
            model,
            example_inputs=batch(0, rank),
            loss_fn=lambda output, target: F.mse_loss(output, F.one_hot(target, 3).double()),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            strategy="ddp",
            sync_batch_norm=True,
        )
        program.step(batch(0, rank))
    return [str(w.message) for w in said if issubclass(w.category, autopar.AutoparWarning)]


def evaluates_alone(rank: int) -> list[int]:
    """What a rank is told that evaluates a drop-in module with its own running statistics: how often, of twice; and
    once all ranks have the mean."""
    module: Any = autopar.optimize(net(), example_inputs=even_batch(0, rank)[0], strategy="ddp")
    F.mse_loss(module(even_batch(0, rank)[0]), even_batch(0, rank)[1].double()).backward()
    module.eval()
    told = []
    for synchronizes in (False, False, True):
        if synchronizes:
            module.program.synchronize_buffers()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            module(even_batch(1, rank)[0])
        told.append(sum("evaluates the normalization layer" in str(w.message) for w in said))
    return told


def refused(rank: int) -> list[str]:
    said = []
    half = net().bfloat16()
    x, y = batch(0, rank)
    tries: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (net().bfloat16(), x.bfloat16(), {"optimizer": None}),
        (net(), x, {"optimizer": None, "capture": "never"}),
        (half, (x.bfloat16(), y), {"optimizer": torch.optim.SGD(half.parameters(), lr=0.1)}),
    ]
    for model, data, settings in tries:
        try:
            autopar.optimize(
                model,
                example_inputs=data,
                loss_fn=F.cross_entropy if settings["optimizer"] else None,
                strategy="ddp",
                sync_batch_norm=True,
                **settings,
            )
            said.append("")
        except AutoparError as e:
            said.append(str(e))
    return said


def everything(rank: int, n: int) -> dict[str, Any]:
    cases: dict[int, tuple[tuple[Any, ...], ...]] = {
        1: (("ddp", 0.1, True),),
        2: (("ddp", None), ("sharded", 0.1)),
        3: (("zero1", 0.1, True),),
    }
    return {
        "trained": {str(case): train(rank, n, *case) for case in cases[n]},
        "modules": [train_module(rank, n, each) for each in (1, 2)] if n > 1 else [],
        "frozen": freeze_midway(rank, n) if n == 2 else {},
        "ends with it": ends_with_it(rank) if n == 2 else [],
        "alone": evaluates_alone(rank) if n == 2 else [],
        "refused": refused(rank) if n == 2 else [],
    }
