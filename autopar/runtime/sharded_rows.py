"""Parameters whose rows live on one rank each: taken apart, and made whole again while somebody needs them.

In between, the model's parameter keeps its shape and holds nothing: one element, seen as all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from autopar.backends import collectives
from autopar.errors import PlanError
from autopar.ops.fragments import rows_of_rank
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.held_state import KeptByProgram
from autopar.runtime.model.pre_use_hooks import PreUseHooks


class ShardedRows(KeptByProgram):
    """This rank's rows of the parameters of a model that are spread over the ranks."""

    def __init__(self, owners: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter], group: Group) -> None:
        self.shards: dict[str, torch.Tensor] = {}
        """By parameter: rows r, r+n, r+2n, ... on rank r of n, contiguous."""
        self._strides: dict[str, tuple[int, ...]] = {}
        """Of the whole parameters."""
        self._stand_ins: dict[str, torch.Tensor] = {}
        """By parameter: the one element that it holds while it is not whole."""
        self._parameters = parameters
        self._group = group
        self._hooks = PreUseHooks(owners, self._refuse)
        self._are_whole = False
        """Whether a `gathered` is open."""

    def is_spread(self) -> bool:
        """Whether rows of parameters live on other ranks between steps."""
        return bool(self.shards)

    def spread(self, names: Iterable[str]) -> None:
        """Keeps this rank's rows of these parameters, and gives the others' memory back."""
        rows = rows_of_rank(self._group.rank, self._group.world_size)
        for name in names:
            if name not in self.shards:
                whole = self._parameters[name].detach()
                self.shards[name] = whole[rows].clone(memory_format=torch.contiguous_format)
                self._strides[name] = whole.stride()
                if not self._are_whole:
                    self._empty(name)
        if self.shards and not self._are_whole:
            self._hooks.on()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """While it is open, the parameters are whole; what was changed is kept. By all ranks together. One within
        another changes nothing."""
        if not self.shards or self._are_whole:
            yield
            return
        self._check_stand_ins()
        for name in sorted(self.shards):
            self._parameters[name].data = self._whole(name)
        self._are_whole = True
        try:
            with self._hooks.off():
                yield
        finally:
            self._are_whole = False
            self._store()
            for name in self.shards:
                self._empty(name)

    def check(self, called: str) -> None:
        """Raises `PlanError` while the parameters are whole: `called` writes to rows that are overwritten after it; and
        where a parameter that is not whole was written to."""
        if not self._are_whole:
            self._check_stand_ins()
        else:
            raise PlanError(
                f"program.{called} was called within 'with program.gathered():' or 'with program.evaluation():', but "
                "the plan spreads parameters over the ranks between steps: leave the block first"
            )

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """While it is open, the model gives its `state_dict()`, in which parameters that are not whole hold no values,
        and the shards hold what was changed in parameters that are."""
        if self._are_whole:
            self._store()
            yield
            return
        self._check_stand_ins()
        with self._hooks.off():
            yield

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """While it is open, the model can be traced: its parameters have memory, laid out as ever, that nobody has
        touched, or are whole."""
        if self._are_whole:
            yield
            return
        for name in self.shards:
            p = self._parameters[name]
            p.data = torch.empty_strided(p.shape, self._strides[name], dtype=p.dtype, device=p.device)
        try:
            with self._hooks.off():
                yield
        finally:
            for name in self.shards:
                self._empty(name)

    def _refuse(self) -> None:
        shown = ", ".join(f"'{n}'" for n in sorted(self.shards))
        raise PlanError(
            f"the rows of {shown} are spread over the ranks, so the model can neither run nor be saved by itself: use "
            "it within 'with program.gathered():', which all ranks must enter, or save program.state_dict()"
        )

    def _store(self) -> None:
        """Takes this rank's rows from the whole parameters."""
        rows = rows_of_rank(self._group.rank, self._group.world_size)
        for name, shard in self.shards.items():
            shard.copy_(self._parameters[name].detach()[rows])

    def _empty(self, name: str) -> None:
        p = self._parameters[name]
        self._stand_ins[name] = torch.full((), torch.nan, dtype=p.dtype, device=p.device)
        p.data = self._stand_ins[name].expand(p.shape)

    def _check_stand_ins(self) -> None:
        """Raises `PlanError` where a parameter that is not whole was given other memory or, on CPUs, another value:
        its rows are elsewhere, and what was written would be lost. It holds nothing again behind that."""
        for name in self.shards:
            p, mine = self._parameters[name], self._stand_ins[name]
            if p.numel() and (p.data_ptr() != mine.data_ptr() or (mine.is_cpu and not mine.isnan())):
                self._empty(name)
                raise PlanError(
                    f"parameter '{name}' was written to (`p.data = ...`, say) while its rows were spread over the "
                    "ranks, where it holds no values. Its rows are as they were: write to it within "
                    "'with program.gathered():', which all ranks must enter"
                )

    def _whole(self, name: str) -> torch.Tensor:
        """All rows, from the ranks that have them."""
        n, shard, shape = self._group.world_size, self.shards[name], self._parameters[name].shape
        longest = -(-shape[0] // n)
        mine = shard.new_zeros(longest, *shape[1:])
        mine[: len(shard)] = shard
        assert self._group.name is not None
        with torch.no_grad(), self._group.guard("making a parameter whole"):
            everyone = collectives.wait(collectives.all_gather_equal(mine, n, self._group.name))
        whole = shard.new_empty_strided(shape, self._strides[name])
        for rank, part in enumerate(everyone.view(n, longest, *shape[1:])):
            rows = rows_of_rank(rank, n)
            whole[rows] = part[: len(range(*rows.indices(shape[0])))]
        return whole
