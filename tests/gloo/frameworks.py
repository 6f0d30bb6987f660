"""What the tests of the integrations have in common: tiny models, data, and how far two runs are from each other."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
Sizes = Sequence[tuple[int, ...]]
"""For each step, the samples of each rank."""
EVEN: Sizes = [(4, 4), (3, 3), (4, 4), (2, 2)]
UNEVEN: Sizes = [(4, 3), (2, 5), (4, 4), (3, 1)]


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of 8 tokens of 30, with different numbers of labels that are ignored."""

    def __init__(self, count: int, classes: int = 0) -> None:
        self.count, self.classes = count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[: i * 5 % 7] = -100
        return {"input_ids": ids, "labels": ids.sum() % self.classes if self.classes else labels}


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Six numbers and the sine of their sum."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return x, x.sum()[None].sin()


class Batches(torch.utils.data.Sampler[list[int]]):
    """The samples of one rank, or of all ranks where there is only one."""

    def __init__(self, sizes: Sizes, rank: int, world_size: int) -> None:
        self.sizes, self.rank, self.world_size = sizes, rank, world_size

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for per_rank in self.sizes:
            before = sum(per_rank[: self.rank]) if self.world_size > 1 else 0
            own = per_rank[self.rank] if self.world_size > 1 else sum(per_rank)
            yield list(range(start + before, start + before + own))
            start += sum(per_rank)


def loader(sizes: Sizes, rank: int, world_size: int) -> Any:
    return torch.utils.data.DataLoader(Samples(), batch_sampler=Batches(sizes, rank, world_size))


def flat(model: nn.Module) -> list[float]:
    """All trained parameters, one after the other."""
    return [float(x) for p in model.parameters() if p.requires_grad for x in p.detach().flatten()]


def apart(a: Iterable[float], b: Iterable[float]) -> float:
    """The largest difference of two runs' parameters."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def said(function: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        function()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing was raised"


def ran(example: str) -> str:
    """What an example prints, run as one of the ranks that torchrun would have started."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    return printed.getvalue()


def quiet() -> None:
    """What frameworks warn of, and log, is theirs."""
    import logging

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
