"""What the tests of checkpoints on disk run on each rank: any plan on any number of ranks reads what another wrote."""

from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import SpecError
from autopar.runtime.checkpoints.pieces import Piece, whole_piece
from autopar.runtime.program import Program
from tests.gloo import sharded
from tests.gloo.checkpoints import masks, program_for, same, trained

WIDE = 12


class Table(nn.Module):
    """A table whose rows may be spread over the ranks, a strided and a 0-dimensional parameter, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(17, 5)
        self.inner = nn.Linear(5, WIDE)
        self.inner.weight = nn.Parameter(torch.randn(5, WIDE).t())
        self.last = nn.Linear(WIDE, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(WIDE, affine=False)
        self.eval()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(self.table(words))))
        return self.last(hidden) * self.scale  # type: ignore[no-any-return]


def words(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same global batch for every number of ranks, which share it out."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 17, (12,), generator=generator), torch.randint(0, 3, (12,), generator=generator)


def table_program(n: int, strategy: str) -> Program:
    model = Table().double()
    settings: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": torch.optim.Adam(model.parameters(), lr=0.02)}
    settings["plan" if strategy == "spread" else "strategy"] = _spread(n) if strategy == "spread" else strategy
    program: Program = autopar.optimize(model, example_inputs=words(0), **settings)
    return program


def _spread(n: int) -> autopar.Plan:
    """Rows of the table and of a strided parameter spread over the ranks, columns of another one owned by two of them,
    the rest in parts of its flat value."""
    model = Table().double()
    made = autopar.plan(
        model, autopar.ClusterSpec.local(n), example_inputs=words(0), loss_fn=F.cross_entropy, strategy="ddp"
    )
    rest = ["table.weight", "inner.weight", "last.weight"]
    others = [p.name for p in made.model.parameters if p.name not in rest]
    columns = [{"name": "last.weight", "dim": 1, "start": a, "stop": b} for a, b in ((0, 5), (5, WIDE))]
    groups = [
        {"strategy": "sharded_parameters", "members": [{"name": "table.weight"}, {"name": "inner.weight"}]},
        *({"strategy": "parameter_server", "members": [c], "options": {"owner": i}} for i, c in enumerate(columns)),
        {"strategy": "partitioned_parameter_server", "members": [{"name": name} for name in others]},
    ]
    return autopar.Plan.model_validate({"model": made.model, "cluster": made.cluster, "groups": groups})


def eager(steps: int) -> dict[str, torch.Tensor]:
    """The same steps in one process."""
    model = Table().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        inputs, target = words(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    return model.state_dict()


def residual_of(rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32) * (rank + 1) + 0.3


def with_own(program: Program, residual: torch.Tensor) -> list[Piece]:
    """Gives a program what a strategy might keep: a residual, a value of each rank's own, and one of all ranks."""
    rank, n = program.rank, program.world_size
    own = torch.full((2,), float(rank))
    rows = torch.arange(8.0)[rank::n].clone() if residual.any() else torch.zeros(len(range(rank, 8, n)))
    pieces = [
        whole_piece("state.residual.all", residual, "summed"),
        whole_piece("state.own.all", own, "reset"),
        Piece("state.rows.all", (8,), (range(rank, 8, n),), rows),
    ]
    program._lasting.states.pieces = lambda stopped=(): pieces  # type: ignore[method-assign]
    return pieces


def chain(rank: int, n: int, folder: str, strategy: str, before: int, after: int) -> dict[str, Any]:
    """Reads what other ranks wrote after `before` steps, trains up to `after`, and writes that."""
    program = table_program(n, strategy)
    found: dict[str, Any] = {}
    pieces = with_own(program, residual_of(rank) if before == 0 else torch.zeros(6))
    if before:
        program.load(folder)
        found["loaded"] = same(program.state_dict()["model"], autopar.load_checkpoint(folder)["model"])
        found["pieces"] = [p.tensor.tolist() for p in pieces]
    for step in range(before, after):
        program.step(words(step))
    program.save(folder)
    state, index = program.state_dict(), json.loads((Path(folder) / "index.json").read_text())
    there = autopar.load_checkpoint(folder)
    assert there.pop("state").keys() == {"residual", "rows"}  # which this test has kept for itself
    found["read by one process"] = same(there, state)
    expected = eager(after)
    found["distance"] = max(float((state["model"][k] - v).abs().max()) for k, v in expected.items())
    found["steps"] = index["steps"]
    found["layouts"] = {k: v["layout"] for k, v in index["tensors"].items()}
    found["written by"] = {k: sorted({p["rank"] for p in v["parts"]}) for k, v in index["tensors"].items()}
    found["elements"] = all(
        sum(_elements(p["box"]) for p in t["parts"]) == torch.Size(t["shape"]).numel()
        for t in index["tensors"].values()
        if t["layout"] not in ("Partial", "Varying")
    )
    found["files"] = sorted(p.name for p in Path(folder).iterdir()) == sorted(
        ["index.json", *(f["name"] for f in index["files"])]
    )
    return found


def _elements(box: list[list[int]]) -> int:
    return torch.Size([len(range(*r)) for r in box]).numel()


def with_hooks(rank: int, n: int, folder: str) -> bool:
    """Rows are spread over the ranks, and a hook makes other tensors of the parameters: these are gathered."""

    def made() -> Program:
        model = sharded.net()
        model.register_state_dict_post_hook(
            lambda m, state, *_: state.update({k: v.detach() * 2 for k, v in state.items()})
        )
        model.register_load_state_dict_pre_hook(lambda m, state, *_: state.update({k: v / 2 for k, v in state.items()}))
        return sharded.program_for(model, n, "sharded_parameters")

    program, again = made(), made()
    program.step(sharded.batch(0, rank))
    program.save(folder)
    again.load(folder)
    return same(again.state_dict(), program.state_dict()) and bool(again._lasting.rows.shards)


def two_ranks(rank: int, n: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    program = program_for(rank)
    pieces = with_own(program, residual_of(rank))
    trained(program, range(2))
    program.save(folder)
    before = _hashes(folder)
    kept = [p.tensor.clone() for p in pieces]
    losses, drawn = trained(program, range(2, 4)), masks(program)
    final = program.state_dict()

    again = program_for(rank)
    pieces = with_own(again, torch.zeros(6))
    again.load(folder)
    found["own values"] = same([p.tensor for p in pieces], kept)
    found["resumed"] = trained(again, range(2, 4)) == losses and masks(again) == drawn
    found["same bits"] = same(again.state_dict(), {**final, "random": again.state_dict()["random"]})
    other = program_for(rank, "PS")
    other.load(folder)
    found["other plan"] = trained(other, range(2, 4)) == losses

    found["versions"] = autopar.load_checkpoint(folder)["model"]._metadata == final["model"]._metadata
    store = program._group.presence.store  # type: ignore[union-attr]
    held = [store.under(f"meeting/{i}").check(f"call/{rank}") for i in range(next(program._group.meetings))]
    found["store"] = sum(held) <= 1
    found["hooks"] = with_hooks(rank, n, f"{folder}/hooks")

    # A disk that is full for one rank.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    found["full"] = _said(lambda: again.save(folder))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again.synchronize_buffers()  # so that both ranks have removed what they wrote
    found["old one stays"] = _hashes(folder) == before
    found["no folder"] = _said(lambda: again.save(Path(folder) / "index.json" / "x" if rank else folder))
    found["not shared"] = _said(lambda: again.save(f"{folder}-{rank}"))
    again.synchronize_buffers()
    found["old one stays too"] = _hashes(folder) == before

    again.save(f"{folder}/newer")
    found["different"] = _said(lambda: again.load(f"{folder}/newer" if rank else folder))
    found["missing"] = _said(lambda: again.load(f"{folder}/none" if rank else folder))
    state = again.state_dict()
    again.save(f"{folder}/newer")
    if rank == 0:
        file = next(Path(folder, "newer").glob("*-00001-00000.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    again.synchronize_buffers()  # so that rank 0 has written
    found["altered"] = _said(lambda: again.load(f"{folder}/newer"))
    found["unchanged"] = same(again.state_dict(), state)
    return found


def _hashes(folder: str) -> dict[str, str]:
    files = [p for p in sorted(Path(folder).iterdir()) if p.is_file()]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _said(call: Any) -> str:
    try:
        call()
    except SpecError as e:
        return str(e)
    return ""
