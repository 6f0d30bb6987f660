"""Every peer trains, and computes what it says that it computes: its losses are those that its fidelity promises."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar import ClusterSpec
from benchmarks.peers import OURS, PEERS, Options, peer_named
from benchmarks.peers.case import Case
from benchmarks.peers.local_sgd import FIRST_STEP as LOCAL_FROM
from benchmarks.peers.outcome import TOLERANCE
from benchmarks.zoo.named import any_workload
from benchmarks.zoo.tiny import TINY
from tests.gloo.ranks import run_ranks

RANKS, STEPS, LOSSY_STEPS = 2, 3, 8
STATEFUL = ("autopar", "ddp", "fsdp2", "zero_redundancy", "deepspeed_zero", "autodist_PartitionedPS")
"""Those that do something of their own with the optimizer's state."""
FLOAT = 1e-5
"""Of losses around 2 in float32, after a few steps."""
ROUNDING = 5e-7
"""Exact systems differ by less in each of these steps; whoever sends 16 bits differs by more in some of them."""


@dataclass(frozen=True)
class System:
    """A peer with one of its choices, on a tiny workload."""

    workload: str
    peer: str
    options: Options

    @property
    def steps(self) -> int:
        return STEPS if peer_named(self.peer).fidelity == "exact" else LOSSY_STEPS


def _systems(folder: Path) -> list[System]:
    cluster = ClusterSpec.local(RANKS)
    found = []
    for workload in TINY.values():
        case = Case(workload, "local", cluster, folder, search_time_s=0.2)
        for name, peer in ({n: OURS[n] for n in ("autopar", "autopar_rounded")} | PEERS).items():
            if peer.applies(workload, cluster) is None and (workload.name == "tiny" or name in STATEFUL):
                # A search may find nothing to round in so small a model.
                rounded = [{"plan": case.save(case.built("ddp+bf16"))}] if name == "autopar_rounded" else None
                found += [System(workload.name, name, options) for options in rounded or peer.choices(case)]
    return found


def _train(rank: int, world_size: int, systems: Sequence[System]) -> list[list[float]]:
    """The global mean loss of each step of each system."""
    found = []
    for system in systems:
        workload = any_workload(system.workload)
        step = peer_named(system.peer).build(workload, rank, world_size, system.options)
        losses = torch.stack([step(workload.batch(i, rank)).double() for i in range(system.steps)])
        dist.all_reduce(losses)
        found.append((losses / world_size).tolist())
    return found


@functools.cache
def _one_process(workload_name: str) -> list[float]:
    """The same training on the global batch."""
    workload = TINY[workload_name]
    model = workload.model()
    optimizer = workload.optimizer(model)
    losses = []
    for i in range(LOSSY_STEPS):
        parts = [workload.batch(i, rank) for rank in range(RANKS)]
        optimizer.zero_grad()
        loss = workload.loss(model, tuple(torch.cat(each) for each in zip(*parts, strict=True)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[System, list[float]]]:
    """Every system that applies, and its losses, which all ranks agree on."""
    systems = _systems(tmp_path_factory.mktemp("plans"))
    first, *others = run_ranks(RANKS, _train, systems)
    assert all(other == first for other in others)
    return list(zip(systems, first, strict=True))


def test_every_peer_took_part(trained: list[tuple[System, list[float]]]) -> None:
    """Each trains one of the tiny workloads at least, except where it is not installed."""
    missing = PEERS.keys() - {system.peer for system, _ in trained}
    assert missing <= {"deepspeed_zero"}


def test_exact_peers_train_as_one_process_does(trained: list[tuple[System, list[float]]]) -> None:
    for system, losses in trained:
        if peer_named(system.peer).fidelity == "exact":
            assert losses == pytest.approx(_one_process(system.workload)[:STEPS], rel=FLOAT), system


def test_lossy_peers_keep_near_one_process(trained: list[tuple[System, list[float]]]) -> None:
    """And differ from it, once they have begun: else what is measured is not what the name says."""
    for system, losses in trained:
        peer = peer_named(system.peer)
        if peer.fidelity != "exact":
            expected = _one_process(system.workload)[: len(losses)]
            assert losses == pytest.approx(expected, rel=TOLERANCE[peer.fidelity]), system
            assert losses[0] == pytest.approx(expected[0], rel=FLOAT)
            assert losses != pytest.approx(expected, rel=ROUNDING), system


def test_local_sgd_begins_as_ddp(trained: list[tuple[System, list[float]]]) -> None:
    (losses,) = (losses for system, losses in trained if system.peer == "local_sgd")
    assert losses[: LOCAL_FROM + 1] == pytest.approx(_one_process("tiny")[: LOCAL_FROM + 1], rel=FLOAT)
