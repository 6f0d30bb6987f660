"""Small random jobs, each a function of its number: a model of a handful of parameters on two to four ranks.

Models are captured for real, without weights. Devices are kinds of the library, so that an instance is the same on
every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn import functional as F

from autopar.cost_models.steps import predict_steps
from autopar.search.builders import builder_named
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Fidelity
from autopar.spec.topology import topology_of
from benchmarks.search_quality.job import Job, captured

MOST_PARAMETERS = 5
"""What exhaustive search visits grows by all choices a parameter."""
MOST_ROUNDED = 3
"""Parameters where numbers may be rounded on the wire, which triples the choices."""
SMALL_MEMORY = 0.7
"""The part of what lies between the leanest plan's memory and DDP's that a small device has, at most."""


@dataclass
class _Draft:
    """A model in the making."""

    draw: random.Random
    left: int
    """Parameters that may still be added."""
    width: int = 0
    modules: list[nn.Module] = field(default_factory=list)

    def size(self, low: int, high: int) -> int:
        """A multiple of 4, small ones as likely as large ones."""
        return max(4, round(low * math.exp(math.log(high / low) * self.draw.random()) / 4) * 4)

    def add(self, module: nn.Module) -> None:
        self.modules.append(module)
        self.left -= sum(1 for _ in module.parameters())

    def layer(self, outputs: int) -> None:
        """A linear layer, with a bias where there is room for one."""
        self.add(nn.Linear(self.width, outputs, bias=self.left >= 2 and self.draw.random() < 0.6))
        self.width = outputs


class _Tied(nn.Module):
    """A table of words that is the head's weight, too."""

    def __init__(self, words: int, inner: nn.Sequential, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(self.table(ids)), self.table.weight)


@dataclass(frozen=True)
class _Model:
    about: str
    make: Callable[[], nn.Module]
    batch: tuple[torch.Tensor, torch.Tensor]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _words(draft: _Draft, samples: int, classes: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, by a law of many rare ones, and labels."""
    random_ids = torch.Generator().manual_seed(draft.draw.randrange(2**31))
    ids = (words * torch.rand(samples, generator=random_ids) ** 3).long()
    return ids, torch.randint(0, classes, (samples,), generator=random_ids)


def _perceptron(draft: _Draft) -> _Model:
    """Linear layers of very different sizes, with a norm between them at times."""
    samples, inputs = draft.size(8, 4096), draft.size(64, 4096)
    draft.width = inputs
    while draft.left >= 1:
        if draft.left >= 3 and draft.modules and draft.draw.random() < 0.3:
            draft.add(nn.LayerNorm(draft.width))
        draft.layer(draft.size(64, 4096))
        draft.modules.append(nn.ReLU())
    batch = torch.zeros(samples, inputs), torch.zeros(samples, draft.width)
    return _Model("linear layers", lambda: nn.Sequential(*draft.modules), batch, F.mse_loss)


def _table(draft: _Draft) -> _Model:
    """A table of words, layers, and a head over classes."""
    samples, words = draft.size(8, 2048), draft.size(1000, 200_000)
    width, classes = draft.size(16, 512), draft.size(16, 50_000)
    draft.add(nn.Embedding(words, width))
    draft.width = width
    while draft.left >= 3:
        draft.layer(draft.size(32, 1024))
        draft.modules.append(nn.ReLU())
    draft.layer(classes)
    batch = _words(draft, samples, classes, words)
    return _Model("a table and a head", lambda: nn.Sequential(*draft.modules), batch, F.cross_entropy)


def _tied(draft: _Draft) -> _Model:
    """A table that is the head's weight, too, with layers between."""
    samples, words, width = draft.size(8, 1024), draft.size(1000, 50_000), draft.size(32, 512)
    draft.left -= 1
    draft.width = width
    while draft.left >= 3:
        draft.layer(draft.size(64, 1024))
        draft.modules.append(nn.GELU())
    draft.layer(width)
    batch = _words(draft, samples, words, words)
    return _Model("a tied table", lambda: _Tied(words, nn.Sequential(*draft.modules), width), batch, F.cross_entropy)


def _pictures(draft: _Draft) -> _Model:
    """A convolution, and a linear layer that has most of the parameters."""
    samples, channels, side = draft.size(4, 64), draft.size(8, 64), draft.size(8, 32)
    draft.add(nn.Conv2d(3, channels, 3, padding=1, bias=False))
    if draft.left >= 3 and draft.draw.random() < 0.5:
        draft.add(nn.BatchNorm2d(channels))
    draft.modules += [nn.ReLU(), nn.Flatten()]
    draft.width = channels * side * side
    while draft.left >= 1:
        draft.layer(draft.size(16, 1024))
    batch = torch.zeros(samples, 3, side, side), torch.zeros(samples, draft.width)
    return _Model("a convolution and linear layers", lambda: nn.Sequential(*draft.modules), batch, F.mse_loss)


_KINDS = (_perceptron, _perceptron, _table, _tied, _pictures)


def _cluster(draw: random.Random, ranks: int) -> tuple[str, str, str]:
    """What kind of cluster it is; its hosts, whose devices are `{memory}` apart, and its network."""
    rate = 10 ** draw.uniform(2, 4.4)  # of Mbit/s: 100 Mbit/s to 25 Gbit/s
    device = draw.choice(("cpu", "cpu", "T4", "V100-16GB"))
    network = f"{{bandwidth: {rate:.0f} Mbit/s}}"
    hosts = f"{{name: a, count: {ranks}, devices: {{kind: {device}{{memory}}}}}}"
    kind = draw.choice(("even", "slow host", "high latency", "small memory", "two kinds", "hosts of two", "servers"))
    if kind == "hosts of two" and ranks != 4:
        kind = "slow host"
    if kind == "slow host":
        slow = rate / draw.uniform(1.5, 10)
        hosts = (
            f"{{name: a, count: {ranks - 1}, devices: {{kind: {device}{{memory}}}}}}, "
            f"{{name: b, devices: {{kind: {device}{{memory}}}}, bandwidth: {slow:.0f} Mbit/s}}"
        )
    elif kind == "high latency":
        network = f"{{bandwidth: {rate:.0f} Mbit/s, latency: {draw.uniform(0.5, 20):.1f} ms}}"
    elif kind == "two kinds":
        hosts = f"{{name: a, count: {ranks - 1}, devices: 1 x V100-16GB}}, {{name: b, devices: 1 x T4}}"
    elif kind == "hosts of two":
        hosts = f"{{name: a, count: 2, devices: 2 x {device}}}"
    elif kind == "servers":
        hosts += f", {{name: s, count: {draw.randint(1, 2)}, devices: 0}}"
    return kind, hosts, network


def instance(number: int) -> Job:
    """The job of this number, always the same."""
    draw = random.Random(number)
    ranks = draw.choice((2, 3, 4))
    fidelity: Fidelity = "rounded" if draw.random() < 0.2 else "exact"
    most = MOST_PARAMETERS if fidelity == "exact" else MOST_ROUNDED
    draft = _Draft(draw, draw.randint(3, most))
    kind = draw.choice(_KINDS)
    with torch.device("meta"):
        made = kind(draft)
        model = made.make()
    batch = made.batch
    about, hosts, network = _cluster(draw, ranks)

    def described(memory: str) -> ClusterSpec:
        return ClusterSpec.loads(f"hosts: [{hosts.replace('{memory}', memory)}]\nnetwork: {network}\n")

    cluster = described("")
    optimizer = torch.optim.AdamW(model.parameters())
    said = f"{made.about}, {ranks} ranks, {about}, {fidelity}"
    job = replace(captured(said, model, batch, made.loss_fn, cluster, optimizer), fidelity=fidelity)
    if about != "small memory":
        return job
    least, ddp = sorted(_peak_bytes(job, name) for name in ("sharded", "ddp"))
    peak = least + draw.uniform(0.1, SMALL_MEMORY) * (ddp - least)
    small = described(f", memory: {peak / 0.9 / 2**20:.2f} MiB")
    return replace(job, cluster=small)


def _peak_bytes(job: Job, name: str) -> int:
    """What the plan of a builder takes of the fullest device."""
    context = job.context.on(job.cluster)
    groups = builder_named(name)(job.graph.parameters, context, job.cluster)
    return max(predict_steps(job.cost_model, groups, job.graph, context, topology_of(job.cluster)).peak_memory_bytes)
