"""The strategy that CONTRIBUTING.md shows trains as one process does."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.lab import launch, this_machine

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"

TRAIN = """
import os, re, sys
from pathlib import Path
from types import ModuleType

import torch

import autopar
from autopar.spec.plan import ModelFingerprint, ParameterSlice, ParameterSpec, Plan, SyncGroup
from autopar.strategies import STRATEGIES

example = ModuleType("two_phase")
exec(re.search(r"```python\\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL)[1], example.__dict__)
STRATEGIES["two_phase"] = example.TwoPhase()

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fresh():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def loss_fn(output, target):
    return torch.nn.functional.mse_loss(output, target)


random = torch.Generator().manual_seed(1)
batches = [
    [tuple(torch.randn(3, n, generator=random, dtype=torch.float64) for n in (5, 3)) for _ in range(ranks)]
    for _ in range(4)
]

model, optimizer = fresh()
table = tuple(ParameterSpec(name=n, shape=tuple(p.shape), dtype="float64") for n, p in model.named_parameters())
plan = Plan(
    name="example",
    model=ModelFingerprint(name="Sequential", parameters=table),
    cluster=autopar.ClusterSpec.local(ranks).fingerprint,
    groups=(
        SyncGroup(strategy="two_phase", members=tuple(ParameterSlice(name=p.name) for p in table[2:])),
        SyncGroup(strategy="two_phase", members=tuple(ParameterSlice(name=p.name) for p in table[:2])),
    ),
)
program = autopar.optimize(model, example_inputs=batches[0][rank], loss_fn=loss_fn, optimizer=optimizer, plan=plan)
for batch in batches:
    program.step(batch[rank])

alone, optimizer = fresh()
for batch in batches:
    optimizer.zero_grad()
    inputs, targets = (torch.cat(parts) for parts in zip(*batch))
    loss_fn(alone(inputs), targets).backward()
    optimizer.step()

pairs = zip(model.parameters(), alone.parameters(), strict=True)
print(max((a - b).abs().max().item() for a, b in pairs))
"""


def test_the_example_trains_as_one_process_does() -> None:
    differences = launch([this_machine()] * 3, [sys.executable, "-c", TRAIN, str(GUIDE)], timeout_s=240)
    assert max(float(d) for d in differences) < 1e-10
