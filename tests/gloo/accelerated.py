"""What the tests of accelerate run, in one process and on two ranks."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.gloo.frameworks import EVEN, UNEVEN, Sizes, flat, loader, quiet, ran, said


class Net(nn.Module):
    """With a weight that two layers share, dropout, and batch normalization's kind of buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.dropout(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return y


class Branching(Net):
    """It cannot be captured, and is run eagerly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y * 2 if self.out.bias.item() > -9 else y.sin()


class Handing(nn.Module):
    """It hands what it is given on, some of it by position, and is run eagerly, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args) * kwargs.get("scale", 1.0)


def branching(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return Branching().double()


def net(rank: int, dropout: float = 0.0) -> nn.Module:
    """Ranks begin unequal: they take rank 0's values."""
    torch.manual_seed(rank)
    return Net(dropout).double()


def normalized(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def lora(rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)).double()


def accelerator(how: str, accumulates: int, **options: Any) -> Any:
    """As accelerate makes it, or with autopar's plans."""
    from accelerate import Accelerator, DataLoaderConfiguration

    import autopar.integrations.accelerate as integration

    config = DataLoaderConfiguration(use_seedable_sampler=False)
    made = Accelerator(cpu=True, gradient_accumulation_steps=accumulates, dataloader_config=config)
    return integration.use(made, strategy="ddp", **options) if how == "autopar" else made


def trained(how: str, model: nn.Module, sizes: Sizes, rank: int, n: int, accumulates: int = 1) -> Any:
    """The accelerator, the prepared model, the optimizer and the losses, after a loop as accelerate's users have it."""
    run = accelerator(how, accumulates)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    prepared, optimizer = run.prepare(model, optimizer)
    batches, losses = list(loader(sizes, rank, n)), []
    torch.manual_seed(5)  # for dropout
    for i, (x, y) in enumerate(batches):
        run.gradient_state._set_sync_gradients((i + 1) % accumulates == 0)
        with _accumulating(run, prepared):
            loss = F.mse_loss(prepared(x), y)
            run.backward(loss)
            if run.sync_gradients:
                run.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(run.gather(loss.detach()[None]).mean()))
    return run, prepared, optimizer, losses


def _accumulating(run: Any, model: nn.Module) -> Any:
    """As `accumulate`, whose own count of steps needs a loader that accelerate has made."""
    import contextlib

    return contextlib.nullcontext() if run.sync_gradients else run.no_sync(model)


def accumulated(how: str, rank: int, n: int) -> list[float]:
    """With accelerate's own loader and `accumulate`, whose last step has one micro-batch, and that unevenly."""
    from accelerate import Accelerator, DataLoaderConfiguration

    import autopar.integrations.accelerate as integration
    from tests.gloo.frameworks import Samples

    config = DataLoaderConfiguration(even_batches=False)
    run: Any = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    if how == "autopar":
        run = integration.use(run)
    model = net(rank)
    data = torch.utils.data.DataLoader(torch.utils.data.Subset(Samples(), range(22)), batch_size=8 // n)
    model, optimizer, batches = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for x, y in batches:
        with run.accumulate(model):
            run.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def looped(how: str, model: Any, rank: int, n: int, options: dict[str, Any], **given: Any) -> list[float]:
    """The model, trained. `options`: of `autopar.optimize`. `given`: inputs besides the batch."""
    run = accelerator(how, 1, **options)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loader(UNEVEN, rank, n):
        run.backward(F.mse_loss(model(x, **given), y))
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def saved_and_loaded(rank: int, n: int) -> bool:
    """Whether a run that goes on from `save_state` ends where the one ends that saved it."""
    folder = [tempfile.mkdtemp(prefix="autopar-test-") if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    run, model, optimizer, _ = trained("autopar", net(rank, 0.2), EVEN, rank, n)
    assert list(run.get_state_dict(model)) == list(run.unwrap_model(model).state_dict())
    assert isinstance(run.unwrap_model(model), Net)
    assert run.prepare(model) is model
    run.save_state(folder[0])
    run.save_model(model, folder[0] + "/model")
    other, fresh, its, _ = trained("autopar", net(rank, 0.2), EVEN[:1], rank, n)
    other.load_state(folder[0])
    ends = []
    for accelerated, m, o in ((run, model, optimizer), (other, fresh, its)):
        torch.manual_seed(9)
        for x, y in loader(EVEN, rank, n):
            accelerated.backward(F.mse_loss(m(x), y))
            o.step()
            o.zero_grad()
        ends.append(flat(m))
    return ends[0] == ends[1]


class Centered(nn.Module):
    """Takes the mean of what it saw in training off, in evaluation alone; and, always, an offset that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.offset = nn.Buffer(torch.zeros(6)), nn.Buffer(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x - self.seen - self.offset
        self.seen.lerp_(x.detach().mean(0), 0.5)
        return x - self.offset


def evaluated(how: str, rank: int, n: int) -> list[float]:
    """What a model with batch normalization and buffers predicts of one batch, and what its losses are on the ranks'
    own, twice; so does a copy, and the model itself, behind more training, of which a rank alone writes a buffer."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Centered(), nn.Linear(6, 1)).double()
    run, prepared, optimizer, _ = trained(how, model, EVEN, rank, n)
    found = []

    def evaluate(evaluated: nn.Module) -> None:
        evaluated.eval()
        with torch.inference_mode():
            for x, y in list(loader(EVEN, rank, n))[:2]:
                losses = run.gather(F.mse_loss(evaluated(x), y)[None])
                found.extend([*losses.tolist(), *evaluated(torch.ones(2, 6, dtype=torch.float64)).flatten().tolist()])

    evaluate(prepared)
    prepared.train()
    for step, (x, y) in enumerate(loader(EVEN, rank, n)):
        if rank == 0 and step == 1:
            model[2].offset.data.fill_(0.3)  # type: ignore[operator]
        run.backward(F.mse_loss(prepared(x), y))
        optimizer.step()
        optimizer.zero_grad()
    evaluate(copy.deepcopy(prepared))
    evaluate(model)
    return [*found, *flat(model)]


def says(rank: int) -> dict[str, str]:
    """What is refused, and how."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs
    from torch.nn.parallel import DistributedDataParallel

    import autopar
    import autopar.integrations.accelerate as integration

    prepared = Accelerator(cpu=True)
    wrapped = prepared.prepare(net(rank))
    assert isinstance(wrapped, DistributedDataParallel)
    run = accelerator("autopar", 1)
    model = run.prepare(net(rank))

    def joins() -> None:
        with run.join_uneven_inputs([model]):
            pass

    hook, own = DistributedDataParallelKwargs(comm_hook="fp16"), DistributedDataParallelKwargs(broadcast_buffers=False)
    answers = {
        "too late": said(lambda: integration.use(prepared)),
        "wrapped": said(lambda: run.prepare(wrapped)),
        "given to optimize": said(lambda: autopar.optimize(run)),
        "a prepared model": said(lambda: autopar.optimize(model)),
        "joins": said(joins),
        "hook": said(lambda: integration.use(Accelerator(cpu=True, kwargs_handlers=[hook]))),
        "own buffers": said(lambda: integration.use(Accelerator(cpu=True, kwargs_handlers=[own]))),
        "a word misspelt": said(lambda: integration.use(Accelerator(cpu=True), fidelty="rounded")),
        "a value misspelt": said(lambda: integration.use(Accelerator(cpu=True), fidelity="rouded")),
        "no such plan": said(lambda: integration.use(Accelerator(cpu=True), strategy="zeroo1")),
        "of the framework": said(lambda: integration.use(Accelerator(cpu=True), optimizer=None)),
        "clips": said(lambda: integration.use(Accelerator(cpu=True), clip_grad_norm=1.0)),
        "no plan yet": said(lambda: model.plan),
        "frozen": said(lambda: (model.requires_grad_(False)(torch.ones(2, 6, dtype=torch.float64)), model.plan)),
    }
    AcceleratorState._reset_state(True)
    return answers | {"compiles": said(lambda: integration.use(Accelerator(cpu=True, dynamo_backend="inductor")))}


def everything(rank: int, n: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, PartialState

    quiet()
    torch.manual_seed(rank)
    how = "one" if n == 1 else "autopar"
    found: dict[str, Any] = {
        "plain": flat(trained(how, net(rank), UNEVEN, rank, n)[1]),
        "accumulated": flat(trained(how, net(rank), UNEVEN, rank, n, 2)[1]),
        "run eagerly": flat(trained(how, branching(rank), UNEVEN, rank, n, 2)[1]),
        "both kinds": looped(how, Handing().double(), rank, n, {}, scale=2.0),
        "normalized": looped(how, normalized(rank), rank, n, {"sync_batch_norm": True}),
        "LoRA": flat(trained(how, lora(rank), UNEVEN, rank, n)[1]),
        "its own loader": accumulated(how, rank, n),
    }
    if n == 1:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        if dist.is_initialized():  # by accelerate
            dist.destroy_process_group()
        return found
    for kind in ("ddp", "autopar"):
        _, model, _, losses = trained(kind, net(rank, 0.2), EVEN, rank, n, 2)
        found[f"even {kind}"] = [*flat(model), *losses]
        found[f"evaluated {kind}"] = evaluated(kind, rank, n)
    found["timeout"] = model._synced[0].program.group.timeout_s
    found |= {"resumed": saved_and_loaded(rank, n), "example": ran("accelerate_loop")}
    return found | {"says": says(rank)}
