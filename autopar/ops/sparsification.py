"""The operations of sparsification: few chunks of what ranks keep are sent, the same on all ranks.

A chunk is `chunk` consecutive elements of the group's flat value; the last one may have fewer, and is sent with zeros
behind it. Which are chosen is known to all ranks, so that their values are summed as they are, without indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.gradients import MEMBER_START
from autopar.ops.layouts import REPLICATE, unsummed
from autopar.ops.values import Bytes, Setting, Value, Work

INDEX = "int64"


@dataclass(frozen=True, slots=True)
class Accumulate(Operation):
    """Multiplies a state, its first input, with `decay`, and adds its second; its value is the state."""

    name = "accumulate"
    reads_members = False
    in_place = True
    decay: float = 1.0

    def value(self, at: Emission) -> Value:
        state = at.inputs[0].made
        return Value(state.elements, state.dtype, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        decays = self.decay != 1
        return copied(2 * (1 + decays) * call.bytes + call.inputs[1].bytes, 1 + decays)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return call.bytes if call.inputs[1].dtype != call.dtype else 0

    def write(self, site: Site, call: Call) -> Any:
        return site.call(accumulate, (*map(site.value_of, call.inputs), self.decay))


@dataclass(frozen=True, slots=True)
class Momentum(Operation):
    """The same on one rank, where gradients are not packed: its value is updated with."""

    name = "momentum"
    reads_members = False
    decay: float

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        state = call.inputs[0].bytes
        return copied(4 * state + (1 + 2 * self._is_narrow(call)) * call.bytes, 2 + MEMBER_START * len(call.members))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return call.bytes if self._is_narrow(call) else None

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return call.inputs[0].bytes if self._is_narrow(call) else 0

    def write(self, site: Site, call: Call) -> Any:
        return site.call(with_momentum, (*map(site.value_of, call.inputs), self.decay))

    def _is_narrow(self, call: Call) -> bool:
        return call.dtype != call.inputs[0].dtype


@dataclass(frozen=True, slots=True)
class ChunkNorms(Operation):
    """The squared norm of each chunk of this rank's value."""

    name = "chunk_norms"
    reads_members = False
    chunk: int

    def value(self, at: Emission) -> Value:
        return Value(chunks_of(at.inputs[0].elements, self.chunk), "float32", unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(call.inputs[0].bytes + call.bytes, 4)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return 2 * call.elements * DTYPE_BYTES[call.inputs[0].dtype]

    def write(self, site: Site, call: Call) -> Any:
        return site.call(chunk_norms, (site.value_of(call.inputs[0]), self.chunk))


@dataclass(frozen=True, slots=True)
class LargestChunks(Operation):
    """The numbers of the `count` chunks of which the norms, its input, are largest, in order. Of equal ones the first;
    NaN counts as larger than all."""

    name = "largest_chunks"
    reads_members = False
    count: int

    def value(self, at: Emission) -> Value:
        return Value(self.count, INDEX)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(50 * call.inputs[0].elements, 8)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return 40 * call.inputs[0].elements + 32 * call.elements

    def write(self, site: Site, call: Call) -> Any:
        return site.call(largest_chunks, (site.value_of(call.inputs[0]), self.count))


@dataclass(frozen=True, slots=True)
class RandomChunks(Operation):
    """The numbers of `count` of `chunks` chunks, in order, each equally likely: drawn by the count of steps, its input,
    which grows by one."""

    name = "random_chunks"
    reads_members = False
    count: int
    chunks: int

    def value(self, at: Emission) -> Value:
        return Value(self.count, INDEX)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(200 * self.chunks, 24)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return 56 * self.chunks + 32 * call.elements

    def write(self, site: Site, call: Call) -> Any:
        return site.call(random_chunks, (site.value_of(call.inputs[0]), self.chunks, self.count))


@dataclass(frozen=True, slots=True)
class TakeChunks(Operation):
    """Takes the chosen chunks, its second input, out of a state, its first, to be sent in the group's dtype: what that
    rounds stays there. Of further states, they become zero."""

    name = "take_chunks"
    reads_members = False
    chunk: int

    def value(self, at: Emission) -> Value:
        return Value(at.inputs[1].elements * self.chunk, at.group.dtype, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        others = len(call.inputs) - 2
        return copied((4 + 2 * others) * self._wide(call) + 2 * call.bytes, 6 + 4 * others)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        narrow = call.dtype != call.inputs[0].dtype
        return (3 if narrow else 1) * self._wide(call) + 4 * self.chunk * DTYPE_BYTES[call.inputs[0].dtype]

    def write(self, site: Site, call: Call) -> Any:
        state, chosen, *others = map(site.value_of, call.inputs)
        return site.call(take_chunks, (state, chosen, self.chunk, call.torch_dtype, *others))

    def _wide(self, call: Call) -> int:
        """Bytes of what is taken, as the state has it."""
        return call.elements * DTYPE_BYTES[call.inputs[0].dtype]


@dataclass(frozen=True, slots=True)
class SpreadChunks(Operation):
    """Writes chunks, its second input, where they were chosen, its third; all else becomes zero. It lies in the memory
    of its first input, the gradients, which nobody reads any more."""

    name = "spread_chunks"
    reads_members = False
    in_place = True
    chunk: int

    def value(self, at: Emission) -> Value:
        return Value(at.inputs[0].elements, at.inputs[1].dtype, REPLICATE)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(call.bytes + 2 * call.inputs[1].bytes, 6)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        return 4 * self.chunk * DTYPE_BYTES[call.dtype]

    def write(self, site: Site, call: Call) -> Any:
        return site.call(spread_chunks, (*map(site.value_of, call.inputs), self.chunk))


def chunks_of(elements: int, chunk: int) -> int:
    """How many chunks there are, with that at the end which may have fewer elements."""
    return -(-elements // chunk)


def accumulate(state: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
    """Changes `state` in place."""
    return (state if decay == 1 else state.mul_(decay)).add_(value)


def with_momentum(
    momentum: torch.Tensor, gradients: torch.Tensor | Sequence[torch.Tensor], decay: float
) -> torch.Tensor | list[torch.Tensor]:
    """Changes `momentum` in place. `gradients`: of each parameter, or, where they were held back, flat."""
    if isinstance(gradients, torch.Tensor):
        return accumulate(momentum, gradients, decay).to(gradients.dtype)
    if not gradients:
        return []
    parts = torch.split(momentum.mul_(decay), [g.numel() for g in gradients])
    views = [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]
    torch._foreach_add_(views, list(gradients))
    return [view.to(g.dtype) for view, g in zip(views, gradients, strict=True)]


def chunk_norms(flat: torch.Tensor, chunk: int) -> torch.Tensor:
    """float32 [chunks]."""
    body, rest = _rows(flat, chunk)
    found: torch.Tensor = torch.linalg.vector_norm(body, dim=1)
    if len(rest):
        found = torch.cat([found, torch.linalg.vector_norm(rest).view(1)])
    return found.square_().float()


def largest_chunks(norms: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [count], ascending. `norms`: float32; the bits of numbers that are not negative are in their order."""
    return _largest(norms.abs().view(torch.int32).long(), count)


def random_chunks(step_count: torch.Tensor, chunks: int, count: int) -> torch.Tensor:
    """int64 [count], ascending. `step_count`: int64 [1], changed in place.

    A counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): the same numbers
    on each device, and nothing is read on the host.
    """
    seed = mixed(step_count.remainder(1 << 32))
    step_count += 1
    return _largest(mixed(torch.arange(chunks, device=step_count.device) ^ seed), count)


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 32 bits, hashed: a permutation of all of them (Mueller's hash, of shifts and of products that 63 bits
    hold)."""
    for _ in range(2):
        numbers = ((numbers >> 16) ^ numbers) * 0x45D9F3B & 0xFFFFFFFF
    return (numbers >> 16) ^ numbers


def take_chunks(
    state: torch.Tensor, chosen: torch.Tensor, chunk: int, dtype: torch.dtype, *others: torch.Tensor
) -> torch.Tensor:
    """[chosen chunks * chunk], in `dtype`. Changes `state`, where what was not taken stays, and `others` in place."""
    own = _read(state, chosen, chunk)
    sent = own.to(dtype)
    _write(state, chosen, torch.zeros_like(own) if sent is own else own.sub_(sent), chunk)
    for other in others:
        _write(other, chosen, torch.zeros_like(own), chunk)
    return sent.view(-1)


def spread_chunks(flat: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, chunk: int) -> torch.Tensor:
    """Overwrites `flat`."""
    flat.zero_()
    _write(flat, chosen, values.view(-1, chunk), chunk)
    return flat


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest of some numbers of 32 bits are, ascending; of equal ones the first: their places tell them
    apart."""
    places = torch.arange(len(keys) - 1, -1, -1, device=keys.device)
    return torch.topk((keys << 31) | places, count, sorted=False).indices.sort().values


def _rows(flat: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks that have all their elements, one a row, and the elements behind them."""
    end = len(flat) // chunk * chunk
    return flat[:end].view(-1, chunk), flat[end:]


def _read(flat: torch.Tensor, chosen: torch.Tensor, chunk: int) -> torch.Tensor:
    """[chosen, chunk]: the chosen chunks, of which only the last may be the one with fewer elements."""
    body, rest = _rows(flat, chunk)
    if not len(rest):
        return body.index_select(0, chosen)
    found = flat.new_empty((len(chosen), chunk))
    torch.index_select(body, 0, chosen[:-1], out=found[:-1])
    last = chosen[-1:]
    padded = torch.nn.functional.pad(rest, (0, chunk - len(rest)))
    found[-1] = torch.where(last == len(body), padded, body.index_select(0, last.clamp(max=len(body) - 1))[0])
    return found


def _write(flat: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor, chunk: int) -> None:
    """Overwrites the chosen chunks with the rows of `values`."""
    body, rest = _rows(flat, chunk)
    if not len(rest):
        body.index_copy_(0, chosen, values)
        return
    body.index_copy_(0, chosen[:-1], values[:-1])
    is_rest, last = chosen[-1:] == len(body), chosen[-1:].clamp(max=len(body) - 1)
    body.index_copy_(0, last, torch.where(is_rest, body.index_select(0, last), values[-1:]))
    rest.copy_(torch.where(is_rest, values[-1, : len(rest)], rest))
