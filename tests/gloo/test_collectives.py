"""Reduce-scatter, all-gather and all-to-all of parts that are large enough to go in rounds; and which collectives ranks
have issued that leave a step by errors."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.backends import collectives
from autopar.backends.exchange import in_rounds
from autopar.backends.nccl import NCCL
from autopar.errors import CollectiveError
from autopar.runtime.job.process_group import join
from tests.gloo.ranks import run_ranks

ELEMENTS = 100_003
SHARES = {"even": (1, 1, 1, 1), "slow rank without a part": (1, 1, 1, 0), "one owner": (0, 1, 0, 0)}
PENDING = 3


def splits_of(shares: tuple[int, ...], world_size: int) -> list[int]:
    mine = shares[:world_size]
    found = [ELEMENTS * s // sum(mine) for s in mine]
    found[1] += ELEMENTS - sum(found)
    return found


def exchange(rank: int, n: int, names: list[str]) -> dict[str, list[float]]:
    """The largest error of each sum and of each gathered value, with several on their way at once."""
    group = join(60.0).name
    assert group is not None
    errors = {}
    for name in names:
        splits = splits_of(SHARES[name], n)
        values = torch.randn(PENDING, n, ELEMENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert in_rounds(values[0, 0], splits)
        started = [collectives.reduce_scatter(v[rank].clone(), splits, rank, group) for v in values]
        parts = [collectives.sum_parts(collectives.wait(s), torch.float64) for s in started]
        gathered = [collectives.wait(g) for g in [collectives.all_gather(p, splits, rank, group) for p in parts]]
        begin = sum(splits[:rank])
        sums = values.sum(1)
        own = [(p - s[begin : begin + len(p)]).abs().sum().item() for p, s in zip(parts, sums, strict=True)]
        errors[name] = own + [(g - s).abs().max().item() for g, s in zip(gathered, sums, strict=True)]
        errors[name] += parts_of_all(rank, splits, values, group)
    return errors


def parts_of_all(rank: int, splits: list[int], values: torch.Tensor, group: str) -> list[float]:
    """The errors of all-to-alls of [pending, ranks, elements], whose rank r receives part r of each."""
    received = [splits[rank]] * len(splits)
    started = [collectives.all_to_all(v[rank].clone(), splits, received, group, large=True) for v in values]
    expected = [torch.stack([torch.split(of, splits)[rank] for of in v]).view(-1) for v in values]
    return [(collectives.wait(s) - e).abs().sum().item() for s, e in zip(started, expected, strict=True)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_and_parts_are_right_with_several_on_their_way(n: int) -> None:
    for found in run_ranks(n, exchange, list(SHARES)):
        assert set(found) == set(SHARES)
        assert all(e < 1e-9 for errors in found.values() for e in errors), found


def library_sums(rank: int, n: int) -> list[float]:
    """Errors of NCCL's reduce-scatter of equal parts, of narrow numbers and of unequal parts, as a process group of
    gloo does what NCCL is asked to do."""
    pg = join(60.0).pg
    errors = []
    for sizes, dtype in (((5, 5), torch.float32), ((5, 5), torch.bfloat16), ((7, 3), torch.float32)):
        values = torch.arange(20).view(n, 10).to(dtype)
        out, work = NCCL.reduce_scatter(values[rank].clone(), sizes, rank, pg)
        assert work is not None
        work.wait()
        expected = torch.split(values.sum(0), list(sizes))[rank]
        errors.append((collectives.sum_parts(out, dtype) - expected).abs().max().item())
    return errors


def leave(rank: int, n: int) -> list[str]:
    """What ranks are told that have left a step by errors, with as many sums issued each, and then with more on one."""
    group, told = join(60.0), []
    assert group.name is not None
    for issued in (1, 1), (1, 2):
        with suppress(MemoryError), group.guard("a step"):
            for _ in range(issued[rank]):
                collectives.all_reduce(torch.ones(3), group.name)
            raise MemoryError
        try:
            with group.guard("the next step"):
                total = collectives.wait(collectives.all_reduce(torch.ones(3), group.name))
            told.append(str(total.tolist()))
        except CollectiveError as e:
            told.append(str(e))
    return told


def begin_anew(rank: int, n: int, folder: str) -> list[str]:
    """What an exchange is told whose other rank is late, the one behind it, and the first one of the next process
    group, which has the same name."""
    told, names = [], set()
    for attempt in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=n)
        group = join((3.0, 60.0)[attempt]).name
        assert group is not None
        names.add(group)
        for _ in range((2, 1)[attempt]):
            if attempt == 1 or rank == 0:
                told.append(_sum_of_part(rank, n, group))
        if attempt == 0:
            (Path(folder) / f"over-{rank}").touch()
            while not (Path(folder) / "over-0").exists():
                time.sleep(0.05)
    assert len(names) == 1
    return told


def _sum_of_part(rank: int, n: int, group: str) -> str:
    try:
        parts = collectives.reduce_scatter(torch.ones(n * ELEMENTS), [ELEMENTS] * n, rank, group)
        return str(collectives.sum_parts(collectives.wait(parts), torch.float32).sum().item())
    except (RuntimeError, CollectiveError):
        return "failed"


def on_two(rank: int, n: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"begun anew": begin_anew(rank, n, folder)}
    return found | {"sums": library_sums(rank, n), "told": leave(rank, n)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_two, str(tmp_path_factory.mktemp("stores")))


def test_nccls_own_reduce_scatter_gives_the_same_sums(two: list[dict[str, Any]]) -> None:
    assert [found["sums"] for found in two] == [[0.0] * 3] * 2


def test_ranks_that_leave_a_step_go_on_where_they_were_equally_far(two: list[dict[str, Any]]) -> None:
    for found in two:
        went_on, refused = found["told"]
        assert went_on == "[2.0, 2.0, 2.0]"
        assert "rank 0 had issued 1 collectives" in refused and "rank 1 had issued 2 collectives" in refused


def test_a_process_group_made_anew_does_not_inherit_an_error(two: list[dict[str, Any]]) -> None:
    right = str(2.0 * ELEMENTS)
    assert [found["begun anew"] for found in two] == [["failed", "failed", right], [right]]
