"""What the tests of several optimizers and several models run on each rank: against one process, on uneven batches."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.testing import classes
from tests.gloo.sharded import CLASSES, batch, net

SIZES = (3, 1, 2)
WIDTH = 4


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The table by SGD, the rest by AdamW in two groups."""
    rest = [p for n, p in model.named_parameters() if not n.startswith("table")]
    groups: list[dict[str, Any]] = [{"params": rest[:1]}, {"params": rest[1:], "weight_decay": 0.0}]
    table = [p for n, p in model.named_parameters() if n.startswith("table")]
    return [torch.optim.SGD(table, lr=0.5, momentum=0.9), torch.optim.AdamW(groups, lr=1e-2)]


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def eager_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, n: int, clip: float) -> None:
    every = [batch(step, r) for r in range(n)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    classes.loss(model(torch.cat([b[0] for b in every])), torch.cat([b[1] for b in every])).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()


def two_optimizers(rank: int, n: int, strategy: str, folder: str) -> float:
    """How far a model with two optimizers is from one process: after some steps with schedulers, and behind checkpoints
    of both kinds, under another plan and in plain PyTorch."""

    def program_for(model: nn.Module, optimizers: list[torch.optim.Optimizer], strategy: str) -> Any:
        return autopar.optimize(
            model,
            example_inputs=batch(0, rank),
            loss_fn=classes.loss,
            optimizer=optimizers,
            strategy=strategy,
            clip_grad_norm=0.3,
        )

    model, eager = net(), net()
    own, theirs = pair(model), pair(eager)
    program = program_for(model, own, strategy)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.5 + 0.1 * i) for x in (own, theirs) for i, o in enumerate(x)
    ]
    for step in range(3):
        program.step(batch(step, rank))
        eager_step(eager, theirs, step, n, 0.3)
        for scheduler in schedulers:
            scheduler.step()
    state = copy.deepcopy(program.state_dict())
    program.save(folder)
    others = [net(), net(), net(), net()]
    pairs = [pair(m) for m in others]
    loaded = [program_for(others[0], pairs[0], "ddp"), program_for(others[1], pairs[1], "zero1")]
    loaded[0].load_state_dict(state)
    loaded[1].load(folder)
    for model_, optimizers, found in zip(others[2:], pairs[2:], (state, autopar.load_checkpoint(folder)), strict=True):
        model_.load_state_dict(found["model"])
        for optimizer, one in zip(optimizers, found["optimizer"], strict=True):
            optimizer.load_state_dict(one)
    for step in range(3, 5):
        eager_step(eager, theirs, step, n, 0.3)
        for one in (program, *loaded):
            one.step(batch(step, rank))
        for model_, optimizers in zip(others[2:], pairs[2:], strict=True):
            eager_step(model_, optimizers, step, n, 0.3)
    with program.gathered():
        distance = apart(model, eager)
    return max(distance, *(apart(m, eager) for m in others))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(z)
        return made


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(x)
        return scores


class Fooling(nn.Module):
    """The generator's loss: what the critic says of what it makes."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.critic(self.generator(z))).mean()


class Telling(nn.Module):
    """The critic's loss: real from made."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made)).mean()


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    return Generator().double(), Critic().double()


def gan_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    size = SIZES[rank] + step % 2
    return torch.randn(size, WIDTH, generator=draw).double(), torch.randn(size, 3, generator=draw).double()


def gan_optimizers(generator: nn.Module, critic: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(generator.parameters(), lr=1e-2), torch.optim.RMSprop(critic.parameters(), lr=1e-2)]


def eager_gan(n: int, steps: int) -> list[nn.Module]:
    generator, critic = models()
    of_generator, of_critic = gan_optimizers(generator, critic)
    for step in range(steps):
        every = [gan_batch(step, r) for r in range(n)]
        real, z = torch.cat([b[0] for b in every]), torch.cat([b[1] for b in every])
        of_critic.zero_grad()
        Telling(critic)(real, generator(z).detach()).backward()
        of_critic.step()
        of_generator.zero_grad()
        Fooling(generator, critic)(z).backward()
        of_generator.step()
    return [generator, critic]


def gan_of_programs(rank: int, n: int, strategies: tuple[str, str], freezes: bool = False) -> float:
    """Two programs in turns, each of which reads the other's parameters; the critic's may be frozen meanwhile."""
    generator, critic = models()
    of_generator, of_critic = gan_optimizers(generator, critic)
    real, z = gan_batch(0, rank)
    made = generator(z).detach()
    telling = autopar.optimize(
        Telling(critic), example_inputs={"real": real, "made": made}, optimizer=of_critic, strategy=strategies[0]
    )
    with telling.gathered():
        fooling = autopar.optimize(
            Fooling(generator, critic),
            example_inputs=(z,),
            optimizer=of_generator,
            strategy=strategies[1],
            unused_parameters="freeze",
        )
    for step in range(3):
        real, z = gan_batch(step, rank)
        with fooling.gathered(), torch.no_grad():
            made = generator(z)
        telling.step({"real": real, "made": made})
        critic.requires_grad_(not freezes)
        with telling.gathered():
            fooling.step((z,))
        critic.requires_grad_(True)
    expected = eager_gan(n, 3)
    with fooling.gathered(), telling.gathered():
        return max(apart(a, b) for a, b in zip((generator, critic), expected, strict=True))


def gan_of_modules(rank: int, n: int) -> float:
    """The drop-in modules with an optimizer each, as beside DDP; what is between two losses is weighted by samples."""
    generator, critic = models()
    both = gan_optimizers(generator, critic)
    real, z = gan_batch(0, rank)
    g = autopar.optimize(generator, example_inputs=(z,))
    c = autopar.optimize(critic, example_inputs=(real,))
    for step in range(3):
        real, z = gan_batch(step, rank)
        both[1].zero_grad()
        loss = F.softplus(-c(real)).mean() + F.softplus(c(g(z).detach())).mean()
        loss.backward()
        both[1].step()
        both[0].zero_grad()
        F.softplus(-c(g(z))).mean().backward()
        both[0].step()
    return max(apart(a, b) for a, b in zip((generator, critic), eager_gan(n, 3), strict=True))


@contextlib.contextmanager
def said(into: list[str]) -> Iterator[None]:
    try:
        yield
        into.append("")
    except AutoparError as e:
        into.append(str(e))


def refused(rank: int) -> list[str]:
    """What is said of a parameter with two optimizers, of one without any, and of one that holds nothing."""
    found: list[str] = []
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with said(found):
        autopar.optimize(model, example_inputs=batch(0, rank), loss_fn=classes.loss, optimizer=optimizers)
    generator, critic = models()
    of_generator, of_critic = gan_optimizers(generator, critic)
    real, z = gan_batch(0, rank)
    with said(found):
        autopar.optimize(Fooling(generator, critic), example_inputs=(z,), optimizer=of_generator, strategy="ddp")
    whole = autopar.optimize(
        Fooling(generator, critic),
        example_inputs=(z,),
        optimizer=of_generator,
        strategy="ddp",
        unused_parameters="freeze",
    )
    data = {"real": real, "made": torch.zeros_like(real)}
    autopar.optimize(Telling(critic), example_inputs=data, optimizer=of_critic, strategy="sharded")
    with said(found):
        whole.step((z,))
    return found


def connections(rank: int) -> list[int]:
    """How many process groups there are as each of several programs has been made, of which only the last is held."""
    found = []
    for _ in range(4):
        module = autopar.optimize(net(), example_inputs=batch(0, rank)[0], strategy="ddp")
        found.append(len(torch.distributed.distributed_c10d._world.pg_map))
        del module
        gc.collect()
    return found


def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    strategies = {1: ["zero1"], 2: ["ddp", "sharded"], 3: ["zero1", "PSLoadBalancing"]}[n]
    gans = {1: [("ddp", "ddp")], 2: [("zero1", "ddp"), ("sharded", "zero1")], 3: [("PSLoadBalancing", "zero1")]}[n]
    assert CLASSES
    return {
        "optimizers": {s: two_optimizers(rank, n, s, f"{folder}/{n}-{s}") for s in strategies},
        "programs": {str(g): gan_of_programs(rank, n, g, freezes=n == 2) for g in gans},
        "modules": gan_of_modules(rank, n),
        "refused": refused(rank) if n == 2 else [],
        "connections": connections(rank) if n > 1 else [],
    }
