"""What the training tests run on each rank: one float64 model, many ways to train it, each against one process."""

from __future__ import annotations

import copy
import io
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import AutoparError, CaptureError, VerificationError
from autopar.runtime.program import Program

SIZES = (3, 1, 2, 2)
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """An embedding tied to the output layer, batch norm's running statistics left out, dropout optional."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.dropout(torch.tanh(self.hidden(self.embed(ids)))) * self.frozen)
        return logits


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(5)
    return Net(dropout).double()


def batch(step: int, rank: int, size: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (size or SIZES[rank],)
    return torch.randint(0, 11, shape, generator=generator), torch.randint(0, 11, shape, generator=generator)


def joined(batches: list[Batch]) -> Batch:
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups, as users have them."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3)


def program_for(model: nn.Module, rank: int, strategy: str, **settings: Any) -> Program:
    settings.setdefault("optimizer", adamw(model))
    program: Program = autopar.optimize(
        model, example_inputs=batch(0, rank), loss_fn=F.cross_entropy, strategy=strategy, **settings
    )
    return program


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[0]), data[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def distance(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def new_shapes_and_schedulers(rank: int, n: int) -> float:
    """Batches of other sizes, and a learning rate that changes."""
    model, eager = net(), net()
    program, optimizer = program_for(model, rank, "zero1"), adamw(eager)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (program.optimizer, optimizer)]
    for step in range(4):
        sizes = [s + (step % 2) * (1 + r) for r, s in enumerate(SIZES[:n])]
        program.step(batch(step, rank, sizes[rank]))
        eager_step(eager, optimizer, joined([batch(step, r, sizes[r]) for r in range(n)]))
        for scheduler in schedulers:
            scheduler.step()
    return distance(model, eager)


def different_micro_batches(rank: int, n: int) -> float:
    """Ranks that split their steps into different numbers of micro-batches."""
    model, eager = net(), net()
    program, optimizer = program_for(model, rank, "PSLoadBalancing"), adamw(eager)
    for step in range(3):
        parts = [[batch(10 * step + k, r) for k in range(1 + (r + step) % 2)] for r in range(n)]
        program.step(micro_batches=parts[rank])
        eager_step(eager, optimizer, joined([b for p in parts for b in p]))
    return distance(model, eager)


def resumed_under_another_plan(rank: int, n: int) -> float:
    """Two steps under one plan, a checkpoint through bytes, two more under another plan and in plain PyTorch."""
    model, eager = net(), net()
    program, optimizer = program_for(model, rank, "zero1"), adamw(eager)
    for step in range(2):
        program.step(batch(step, rank))
        eager_step(eager, optimizer, joined([batch(step, r) for r in range(n)]))
    file = io.BytesIO()
    torch.save(program.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, plain = net(), net()
    again, plain_optimizer = program_for(other, rank, "PS"), adamw(plain)
    again.load_state_dict(state)
    plain.load_state_dict(state["model"])
    plain_optimizer.load_state_dict(state["optimizer"])
    for step in range(2, 4):
        again.step(batch(step, rank))
        data = joined([batch(step, r) for r in range(n)])
        eager_step(eager, optimizer, data)
        eager_step(plain, plain_optimizer, data)
    return max(distance(other, eager), distance(plain, eager))


def drop_in_module(rank: int, n: int) -> float:
    """The module in DDP's place, with an accumulated step, and evaluation in between."""
    model, eager = net(), net()
    module = autopar.optimize(model, example_inputs=batch(0, rank)[0])
    mine, optimizer = adamw(model), adamw(eager)
    for step in range(3):
        mine.zero_grad()
        parts = [batch(10 * step + k, rank) for k in range(2)]
        with module.no_sync():
            (F.cross_entropy(module(parts[0][0]), parts[0][1]) / 2).backward()
        (F.cross_entropy(module(parts[1][0]), parts[1][1]) / 2).backward()
        mine.step()
        eager_step(eager, optimizer, joined([batch(10 * step + k, r) for r in range(n) for k in range(2)]))
        with torch.no_grad():
            assert torch.equal(module.eval()(parts[0][0]), model(parts[0][0]))
        module.train()
    assert list(module.state_dict()) == list(eager.state_dict())
    return distance(model, eager)


def copied_module(rank: int, n: int, capture: Literal["auto", "never"]) -> list[float]:
    """How far copies are from those of eager models: a moving average of weights that rank 0 alone keeps, and a copy
    that is trained by itself beside what it was copied from."""
    model, eager = net(), net()
    module = autopar.optimize(model, example_inputs=batch(0, rank)[0], capture=capture)
    average = get_ema_multi_avg_fn(0.5)
    averages = [AveragedModel(of, multi_avg_fn=average) for of in ((module, eager) if rank == 0 else ())]
    pairs = [(module, eager)]
    optimizers = [(adamw(model), adamw(eager))]
    for step in range(4):
        if step == 2:
            other, eager_other = copy.deepcopy(pairs[0])
            pairs.append((other, eager_other))
            optimizers.append((adamw(other), adamw(eager_other)))
        for (mine, theirs), (of_mine, of_theirs) in zip(pairs, optimizers, strict=True):
            x, y = batch(10 * step + len(pairs), rank)
            of_mine.zero_grad()
            F.cross_entropy(mine(x), y).backward()
            of_mine.step()
            eager_step(theirs, of_theirs, joined([batch(10 * step + len(pairs), r) for r in range(n)]))
        for averaged, (of, _) in zip(averages, [pairs[0], pairs[0][::-1]], strict=False):
            averaged.update_parameters(of)
    both: list[tuple[Any, Any]] = [(averages[0].module.module, averages[1].module)] if averages else []
    return [distance(a, b) for a, b in [*((mine.module, theirs) for mine, theirs in pairs), *both]]


def drop_in_module_in_evaluation_mode(rank: int, n: int, by_itself: bool) -> list[str]:
    """What a backward pass says that would leave each rank its own gradients; and that gradients of inputs are none of
    these. `by_itself`: whether the model is put into evaluation mode without the module."""
    model = nn.Linear(3, 2)
    module = autopar.optimize(model, example_inputs=torch.randn(4, 3))
    (model if by_itself else module).eval()
    x = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x)
    assert bool(gradient.any())
    said = []
    for _ in range(2):
        try:
            module(x).square().sum().backward()
        except CaptureError as e:
            said.append(str(e))
    model.requires_grad_(False)
    module(x).square().sum().backward()
    return said


def rounded_gradient(rank: int, n: int, wire: str) -> float:
    """How far a gradient that was summed in 16 bits is from the exact one, relative to its largest element."""
    model, eager = net(), net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(n),
        example_inputs=batch(0, rank),
        loss_fn=F.cross_entropy,
        strategy="ddp+bf16",
        fidelity="rounded",
    )
    groups = tuple(g.model_copy(update={"options": {"wire": wire}}) for g in plan.groups)
    before = [p.detach().clone() for p in model.parameters()]
    program = program_for(model, rank, "ddp", plan=plan.model_copy(update={"groups": groups}), optimizer=optimizer)
    program.step(batch(0, rank))
    data = joined([batch(0, r) for r in range(n)])
    F.cross_entropy(eager(data[0]), data[1]).backward()
    moved = [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]
    exact = [torch.zeros_like(p) if p.grad is None else p.grad for p in eager.parameters()]
    return max(float((m - e).abs().max() / e.abs().max().clamp_min(1e-9)) for m, e in zip(moved, exact, strict=True))


def rounded_in_a_module(rank: int, n: int, wire: str, capture: Any) -> float:
    """How far a drop-in module's gradients, summed in 16 bits and compared with each rank's own, are from the exact
    ones, relative to their largest elements."""
    model, eager = net(), net()
    synced = autopar.optimize(
        model,
        example_inputs=batch(0, rank)[0],
        strategy=f"all_reduce(wire={wire})",
        fidelity="rounded",
        capture=capture,
        check="always",
    )
    x, y = batch(0, rank)
    F.cross_entropy(synced(x), y).backward()
    x, y = joined([batch(0, r) for r in range(n)])
    F.cross_entropy(eager(x), y).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True)]
    known = [(mine, exact) for mine, exact in pairs if mine is not None and exact is not None]
    return max(float((mine - exact).abs().max() / exact.abs().max()) for mine, exact in known)


def out_of_range(rank: int, n: int, factor: float) -> list[str]:
    """What is said of gradients of such a size that are sent in float16, by a step and by drop-in modules."""
    settings: dict[str, Any] = {"strategy": "all_reduce(wire=float16)", "fidelity": "rounded"}

    def step() -> None:
        model = net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        program = autopar.optimize(
            model,
            example_inputs=batch(0, rank),
            loss_fn=lambda output, target: factor * F.cross_entropy(output, target),
            optimizer=optimizer,
            **settings,
        )
        program.step(batch(0, rank))

    def module(capture: Any) -> None:
        synced = autopar.optimize(net(), example_inputs=batch(0, rank)[0], capture=capture, **settings)
        x, y = batch(0, rank)
        (factor * F.cross_entropy(synced(x), y)).backward()

    said = []
    for call in (step, lambda: module("always"), lambda: module("never")):
        try:
            call()
        except VerificationError as e:
            said.append(str(e))
    return said


def refused_plan(rank: int) -> list[str]:
    """The kind of error, and what it says, of a plan that cannot be used."""
    try:
        autopar.optimize(net(), example_inputs=batch(0, rank)[0], strategy="quantized", fidelity="compressed")
    except AutoparError as e:
        return [type(e).__name__, str(e)]
    return []


def dropout_losses(rank: int, seed: int) -> float:
    """The loss of this rank's own batch under dropout, from the outputs of the drop-in module."""
    model = net(dropout=0.5)
    torch.manual_seed(seed)
    module = autopar.optimize(model, example_inputs=batch(0, 0)[0])
    return float(module(torch.arange(11)).sum())


def autocast_loss(rank: int) -> tuple[float, float]:
    """The same step in float32 and under bfloat16 autocast."""
    losses = []
    for enabled in (False, True):
        model = net().float()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            program = program_for(model, rank, "ddp")
            losses.append(program.step(batch(0, rank)).item())
    return losses[0], losses[1]


def everything(rank: int, n: int) -> dict[str, Any]:
    """All of the above, on this rank."""
    return {
        "new shapes": new_shapes_and_schedulers(rank, n),
        "micro-batches": different_micro_batches(rank, n),
        "resumed": resumed_under_another_plan(rank, n),
        "module": drop_in_module(rank, n),
        "copied": max(d for capture in ("auto", "never") for d in copied_module(rank, n, capture)),
        "evaluated": [drop_in_module_in_evaluation_mode(rank, n, by_itself) for by_itself in (False, True)],
        "bfloat16": rounded_gradient(rank, n, "bfloat16"),
        "float16": rounded_gradient(rank, n, "float16"),
        "refused": refused_plan(rank),
        "out of range": [out_of_range(rank, n, factor) for factor in (1e8, 1e-8)],
        "bfloat16 module": [rounded_in_a_module(rank, n, "bfloat16", capture) for capture in ("always", "never")],
        "float16 module": [rounded_in_a_module(rank, n, "float16", capture) for capture in ("always", "never")],
        "dropout": [dropout_losses(rank, seed) for seed in (1, 1, 2)],
        "autocast": autocast_loss(rank),
    }
