"""What the tests of models that run eagerly run on each rank, beside one process."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.spec.plan import ParameterSlice
from tests.gloo.chooses import Chooses, apart, batches, one_process, optimizers, program_of

STRATEGIES = ("ddp", "PS", "PartitionedPS", "hierarchical", "zero1", "zero1+late", "PartitionedAR", "ddp+bf16")


def steps(rank: int, n: int, strategy: str, kind: str, each: int, clip: float | None) -> float:
    """How far losses and parameters are from one process's, over three steps, of which the first is proved."""
    model, other = Chooses(again=kind == "adamw"), Chooses(sparse=False)
    optimizer, theirs = optimizers(model.parameters())[kind], optimizers(other.parameters())[kind]
    settings = {"fidelity": "rounded"} if "bf16" in strategy else {}
    program = program_of(
        model,
        optimizer,
        rank,
        n,
        strategy=strategy,
        clip_grad_norm=clip,
        late_parameters="late" in strategy,
        **settings,
    )
    worst = 0.0
    for step in range(3):
        own = batches(step, n, each)
        loss = program.step(own[rank][0]) if each == 1 else program.step(micro_batches=own[rank])
        expected = one_process(other, theirs, [b for of_rank in own for b in of_rank], clip)
        if step == 2 or "late" not in strategy:  # else the next forward pass receives what it uses
            program.synchronize()
            worst = max(worst, apart(model, other))
        worst = max(worst, abs(float(loss) - expected))
        assert model.calls == (step + 1) * each, (
            "the model runs once a batch, and the first step's proof leaves no trace"
        )
    assert not optimizer.state.get(model.never.weight)
    assert float(model.seen) == 3 * each
    return worst


def resumed(rank: int, n: int, folder: str) -> float:
    """How far two steps behind a checkpoint are from those that were not interrupted."""
    model, optimizer = Chooses(), None
    optimizer = optimizers(model.parameters())["adamw"]
    program = program_of(model, optimizer, rank, n, strategy="zero1")
    for step in range(4):
        if step == 2:
            program.save(folder)
        program.step(batches(step, n, 1)[rank][0])
    again = Chooses()
    for p in again.parameters():
        p.data.zero_()
    other = program_of(again, optimizers(again.parameters())["adamw"], rank, n, strategy="PartitionedPS")
    other.load(folder)
    for step in range(2, 4):
        other.step(batches(step, n, 1)[rank][0])
    return apart(model, again)


def module(rank: int, n: int, accumulates: bool) -> float:
    """How far a drop-in's gradients and updates are from one process's, over three steps of two backward passes."""
    model, other = Chooses(), Chooses(sparse=False)
    optimizer, theirs = optimizers(model.parameters())["adamw"], optimizers(other.parameters())["adamw"]
    synced = autopar.optimize(model, example_inputs=batches(0, n, 1)[rank][0][0], strategy="ddp", check="always")
    worst = 0.0
    for step in range(3):
        of_ranks = batches(step, n, 2)
        optimizer.zero_grad()
        (x, y), (x2, y2) = of_ranks[rank]
        if accumulates:
            with synced.no_sync():
                nn.functional.mse_loss(synced(x), y).backward()
        else:
            nn.functional.mse_loss(synced(x), y).backward()
        # What goes no further than here is none of its business.
        torch.autograd.grad(nn.functional.mse_loss(synced(x2), y2), model.last.weight)
        nn.functional.mse_loss(synced(x2), y2).backward()
        theirs.zero_grad()
        both = [[of_ranks[r][k] for r in range(n)] for k in range(2)]
        for part in [both[0] + both[1]] if accumulates else both:
            total = sum(len(x) for x, _ in part)
            # As with DDP, a pass that was kept back is added, not averaged.
            times = 2 if accumulates else 1
            loss = sum(nn.functional.mse_loss(other(x), y) * (times * len(x) / total) for x, y in part)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and b.grad is not None:
                worst = max(worst, float((a.grad - b.grad).abs().max()))
        optimizer.step()
        theirs.step()
        worst = max(worst, apart(model, other))
    return worst


class Renorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(x).mean()
        return found if x.sum().item() >= 0 else 2 * found


def refused(rank: int) -> str:
    """What is said of a model whose ranks would drift apart."""
    model = Renorms()
    with torch.no_grad():
        model.table.weight.mul_(10)
    program = autopar.optimize(
        model,
        example_inputs=torch.tensor([0, 1]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        weight=lambda _: 1.0,
    )
    try:
        program.step(torch.tensor([rank, 2]))
    except AutoparError as e:
        return str(e)
    return ""


def told() -> list[str]:
    """What is said of drop-in modules whose ranks would drift apart, or count for themselves, as with DDP."""
    scaled = nn.EmbeddingBag(4, 3, scale_grad_by_freq=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model, ids in ((Renorms(), torch.tensor([0, 1])), (scaled, torch.tensor([[0, 1], [1, 1]]))):
            module = autopar.optimize(model, example_inputs=ids)
            for _ in range(2):
                module(ids).sum().backward()
    words = [str(w.message) for w in said]
    return [w for w in words if "drift apart" in w or "scale_grad_by_freq" in w]


class Meets(Chooses):
    """Has ranks communicate in its forward pass, as normalization over all ranks does. Of its buffers, one is there on
    some ranks only, and one has another size on each."""

    cache: torch.Tensor | None
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)
        self.register_buffer("queue", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
        self.cache = mean if x.sum().item() > 0 else None
        self.queue = torch.cat([self.queue, x])
        return super().forward(x)


def meets(rank: int, n: int) -> dict[str, Any]:
    """What buffers are after two steps, and how far parameters are from one process's."""
    model, other = Meets(), Chooses(sparse=False)
    optimizer, theirs = optimizers(model.parameters())["adamw"], optimizers(other.parameters())["adamw"]
    program = program_of(model, optimizer, rank, n, strategy="ddp", timeout_s=30)
    queue, cached = 0, False
    for step in range(2):
        own = batches(step, n, 1)
        program.step(own[rank][0])
        one_process(other, theirs, [b for of_rank in own for b in of_rank], None)
        queue, cached = queue + len(own[0][0][0]), own[0][0][0].sum().item() > 0
    return {"off": apart(model, other), "queue": len(model.queue) - queue, "cache": (model.cache is not None) is cached}


def adversarial(rank: int, n: int) -> float:
    """How far a generator and a discriminator, both drop-ins, are from one process's: the discriminator is frozen while
    the generator trains."""
    torch.manual_seed(1)
    made, judge = torch.nn.Linear(4, 4), Chooses(sparse=False)
    pairs = [(made, judge), (copy.deepcopy(made), copy.deepcopy(judge))]
    optimizer = [[torch.optim.SGD(m.parameters(), lr=0.1) for m in pair] for pair in pairs]
    example = batches(0, n, 1)[rank][0][0]
    synced = [autopar.optimize(m, example_inputs=example, strategy="ddp", capture="never") for m in pairs[0]]
    for step in range(3):
        own = [b for of_rank in batches(step, n, 1) for b in of_rank]
        total = sum(len(x) for x, _ in own)
        for (maker, judging), of, data in (synced, optimizer[0], [own[rank]]), (pairs[1], optimizer[1], own):
            shares = [1.0 if maker is synced[0] else len(x) / total for x, _ in data]
            of[1].zero_grad()
            for (x, y), share in zip(data, shares, strict=True):
                real, false = judging(x), judging(maker(x).detach())
                ((nn.functional.mse_loss(real, y) + nn.functional.mse_loss(false, -y)) * share).backward()
            of[1].step()
            of[0].zero_grad()
            judging.requires_grad_(False)
            for (x, y), share in zip(data, shares, strict=True):
                (nn.functional.mse_loss(judging(maker(x)), y) * share).backward()
            judging.requires_grad_(True)
            of[0].step()
    return max(apart(a, b) for a, b in zip(*pairs, strict=True))


def local_without_own_gradient(rank: int, n: int) -> list[str]:
    """What is said where ranks update alone, and one has no gradient of what another one has."""
    model = Chooses()
    optimizer = optimizers(model.parameters())["momentum"]
    program = program_of(model, optimizer, rank, n, strategy="ddp+every=2", fidelity="local", check="never")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        for step in range(3):
            # The first rank takes the one layer, the others take the other.
            x = torch.full((2, 4), 0.5 if rank == 0 else -1.2)
            program.step((x, batches(step, n, 1)[rank][0][1][:2]))
    return [str(w.message) for w in said if "each updates alone" in str(w.message)]


def receives(rank: int, n: int) -> dict[str, Any]:
    """Which parameters of late groups are on their way still as each layer runs, in a second step; and as the model
    itself is called afterwards."""
    model, other = Chooses(sparse=False), Chooses(sparse=False)
    optimizer, theirs = optimizers(model.parameters())["momentum"], optimizers(other.parameters())["momentum"]
    batch = batches(0, n, 1)[rank][0]
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(n),
        example_inputs=batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        capture="never",
        strategy="zero1+late",
        late_parameters=True,
    )
    kind = plan.groups[0]
    names = sorted({m.name for g in plan.groups for m in g.members})
    groups = tuple(kind.model_copy(update={"members": (ParameterSlice(name=name),)}) for name in names)
    plan = plan.model_copy(update={"groups": groups, "prediction": None})
    program = program_of(model, optimizer, rank, n, plan=plan, late_parameters=True, capture="never")
    on_their_way: dict[str, list[str]] = {}

    def look(layer: str) -> None:
        deferred = program._lasting.deferred._groups
        on_their_way[layer] = [name for i, name in enumerate(names) if deferred[i]._flat is not None]

    for layer in ("first", "last"):
        model.get_submodule(layer).register_forward_hook(lambda *_, layer=layer: look(layer))
    for step in range(3):
        own = batches(step, n, 1)
        on_their_way.clear()
        program.step(own[rank][0])
        one_process(other, theirs, [b for of_rank in own for b in of_rank], None)
    during, own = dict(on_their_way), batches(3, n, 1)
    read = float((model(own[rank][0][0]) - other(own[rank][0][0])).detach().abs().max())
    return {"during": during, "read": read, "off": apart(model, other)}


class Looks(nn.Module):
    """Looks rows up, in one table of three on some ranks alone, and branches on what it is given."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(300, 8, padding_idx=0, sparse=sparse)
        self.bags, self.some = nn.EmbeddingBag(200, 8, mode="mean"), nn.Embedding(100, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 1000).long() % 300
        h = self.words(ids).mean(1) + self.bags(ids % 200)
        if x.sum().item() > 0:
            h = h + self.some(ids % 100).sum(1)
        found: torch.Tensor = self.last(h)
        return found


def rows(rank: int, n: int, sparse: bool, each: int, clip: float | None) -> float:
    """How far the parameters are from one process's where ranks exchange the rows that they have looked up."""
    model, other = Looks(sparse), Looks(False)
    kind = torch.optim.SGD if sparse else torch.optim.AdamW
    program = program_of(
        model,
        kind(model.parameters(), lr=0.1),
        rank,
        n,
        strategy="structured",
        capture="never",
        clip_grad_norm=clip,
    )
    theirs = kind(other.parameters(), lr=0.1)
    if n > 1:
        assert "sparse_rows" in {g.strategy for g in program.plan.groups for m in g.members if m.name == "words.weight"}
    worst = 0.0
    for step in range(3):
        own = batches(step, n, each)
        program.step(own[rank][0]) if each == 1 else program.step(micro_batches=own[rank])
        one_process(other, theirs, [b for of_rank in own for b in of_rank], clip)
        worst = max(worst, apart(model, other))
    return worst


class Compiles(nn.Module):
    """Calls a function that PyTorch compiles, and a module in TorchScript: neither shows what it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.last = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 2)
        self.script = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        self.product = torch.compile(lambda x, w: x @ w, backend="eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.script(self.product(x, self.weight)).relu())
        return found


def compiles(rank: int, n: int, strategy: str) -> float:
    """How far losses are from one process's, whose ranks each normalize their own batch."""
    torch._dynamo.reset()  # what models before have had compiled counts towards a limit
    model, other = Compiles(), Compiles()
    optimizer, theirs = optimizers(model.parameters())["momentum"], optimizers(other.parameters())["momentum"]
    settings: dict[str, Any] = {"strategy": strategy, "late_parameters": True, "capture": "never"}
    program = program_of(model, optimizer, rank, n, **settings)
    worst = 0.0
    for step in range(3):
        own = batches(step, n, 1)
        loss = program.step(own[rank][0])
        worst = max(worst, abs(float(loss) - one_process(other, theirs, [b for of_rank in own for b in of_rank], None)))
    return worst


def everything(rank: int, n: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"steps": {}}
    for i, strategy in enumerate(STRATEGIES):
        kind, each, clip = ("adamw", "momentum")[i % 2], 1 + (i // 2) % 2, (None, 0.05)[(i // 4) % 2]
        found["steps"][f"{strategy} {kind} {each} {clip}"] = steps(rank, n, strategy, kind, each, clip)
    found["module"] = [module(rank, n, accumulates) for accumulates in ((False, True) if n > 1 else (False,))]
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    if n > 1:
        torch.distributed.broadcast_object_list(folder)
    found["resumed"] = resumed(rank, n, str(Path(str(folder[0])) / "checkpoint"))
    found["refused"] = refused(rank)
    found["told"] = told()
    found["alone"] = local_without_own_gradient(rank, n) if n > 1 else []
    found["receives"] = receives(rank, n) if n > 1 else {}
    found["compiles"] = [compiles(rank, n, strategy) for strategy in ("zero1+late", "PS+late")]
    found["rows"] = [rows(rank, n, *case) for case in ((False, 2, None), (True, 1, None), (False, 1, 0.05))]
    found["meets"] = meets(rank, n)
    found["adversarial"] = adversarial(rank, n)
    return found
