"""What an operation is, a call of one in a step, and the site where it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import Elements, Layout, held_by_rank, held_elements, is_sharded, shard_sizes
from autopar.ops.subgroups import Subgroups
from autopar.ops.values import NO_WORK, Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class Emission:
    """What an operation is emitted with: its sync group `of` (`None`: the whole step), inputs and context."""

    of: Group | None
    inputs: tuple[Call, ...]
    context: Context

    @property
    def group(self) -> Group:
        assert self.of is not None, "it belongs to a sync group"
        return self.of

    @property
    def world_size(self) -> int:
        return self.context.world_size


class Operation(ABC):
    """One operation. Subclass it as a frozen dataclass: prices are remembered by its fields and the values it takes."""

    name: ClassVar[str]
    """The operation's name in timelines, messages and the comparison between ranks."""
    reads_members: ClassVar[bool] = True
    """Whether its bytes, work and value depend on more of the group's members than their number and dtype."""
    is_collective: ClassVar[bool] = False
    """Whether ranks run it together: it returns at once, and a `Wait` completes its value."""
    updates: ClassVar[bool] = False
    """Whether it runs the optimizer; its value is the updated parameters."""
    changes_parameters: ClassVar[bool] = False
    """Whether it may run only when nothing reads the group's parameters any more, or hands its gradients over."""
    needs_only_inputs: ClassVar[bool] = False
    """Whether it may run as soon as its inputs are there; else, as soon as the group's gradients are, too."""
    in_place: ClassVar[bool] = False
    """Whether its value lies in the memory of its first input."""
    takes_clip: ClassVar[bool] = False
    """Whether the global gradient norm is taken of its first input."""
    takes_gradients: ClassVar[bool] = False
    """Whether it reads the group's gradients last, so that their memory is free behind it."""
    forms_gradients: ClassVar[bool] = False
    """Whether it forms the group's gradients from what ranks send in their place; no rank then computes its own."""
    touched: int | None = None
    """Elements that the optimizer is expected to update, where it can skip the others; `None`: all of them."""
    in_pieces: bool = False
    """Whether its value, where it is large, is formed only as it is used (`autopar.ops.products`)."""
    keeps_shards: bool = False
    """Whether each rank keeps its rows of the group's parameters between steps, and nobody else does."""
    momentum: float | None = None
    """The part of its momentum, kept from step to step, that each step adds to the gradients; `None` without one."""
    of_parameters: bool = False
    """Whether the state that it keeps is in units of parameters (what they still lack), not of gradients not sent."""
    makes_parameters: ClassVar[bool] = False
    """Whether its value is parameters that are sent for a later forward or backward pass."""
    subgroups: Subgroups = ()
    """Subgroups of ranks, each of which runs it by itself; empty: all ranks run it together."""
    queue: ClassVar[str] = ""
    """Calls of one queue run in the order of the plan's groups; empty where calls wait for what they need alone."""

    def value(self, at: Emission) -> Value:
        """Elements, dtype and layout of its result; by default, those of its first input."""
        return at.inputs[0].made

    @abstractmethod
    def write(self, site: Site, call: Call) -> Any:
        """Runs it, or writes it into a graph, as `site` does; returns its value there."""

    def behind(self, group: Group) -> int:
        """The position in the graph's compute behind which it may run; -1: before everything."""
        ready = max(group.ready, group.last_use) if self.changes_parameters else group.ready
        return -1 if self.needs_only_inputs else ready

    def needed(self, group: Group) -> int | None:
        """The position behind which the graph reads what it makes; `None` where no node of the graph does."""
        return None

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        """FLOPs, bytes and kernels on a rank's device; equal on ranks that hold as much, but for `differs_on`."""
        return NO_WORK

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        """Bytes that each rank allocates for its value; `None` where the value lies in its first input's memory."""
        return None if self.in_place else call.held_bytes(setting.world_size)

    def keeps(self, call: Call, setting: Setting) -> Bytes:
        """Bytes that each rank keeps from step to step for it, the optimizer's state not included."""
        return 0

    def state_key(self) -> str | None:
        """The name, within its group, of the tensor that it keeps from step to step; `None` where it keeps none."""
        return None

    def captured_elements(self, call: Call, rank: int) -> int:
        """Elements of its value that a rank holds for the batch that was captured."""
        return call.held_elements(rank)

    def passes_through(self, call: Call) -> bool:
        """Whether its value is one gradient's own memory, not a copy."""
        return False

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """Bytes of temporary memory that each rank allocates while it runs, beside its value."""
        return 0

    def freed_elements(self) -> int:
        """Elements of its first input whose memory is free behind it."""
        return 0

    def differs_on(self, call: Call) -> Sequence[int]:
        """Ranks whose `work` differs from that of other ranks with as many elements of its value and inputs."""
        return ()

    def sender(self, call: Call) -> int | None:
        """The rank that has its value before it is sent to the others; `None` where no rank does."""
        return None

    def sends(self, call: Call) -> Call | None:
        """The call of a `Collective` that this call is, or runs within itself; `None` where it sends nothing."""
        return call if self.is_collective else None

    def waits_for(self, call: Call) -> Call | None:
        """The call of the collective that this call completes; `None` where it completes none."""
        return None

    def when_sent(self) -> Operation:
        """The operation to use in its place where a collective takes its value."""
        return self

    def replaces(self, group: Group) -> Sequence[str]:
        """Names of the graph's nodes that it replaces, so that they are not computed."""
        return ()

    def makes(self, group: Group) -> Sequence[str]:
        """Names of replaced nodes whose values it computes itself, in another way."""
        return ()

    def gathers(self, group: Group) -> Sequence[str]:
        """Names of the sharded parameters that it makes whole for a pass that reads them."""
        return ()


@dataclass(slots=True, eq=False)
class Call:
    """An operation in a step, with its inputs and its value, as which strategies pass it on."""

    index: int
    """Its index among all calls of the step."""
    op: Operation
    inputs: tuple[Call, ...]
    group: Group | None
    """Its sync group; `None` where it belongs to the whole step."""
    made: Value
    by: int | None = None
    """A deadline that its strategy has chosen: it runs behind this position, unless what it needs is there only later.
    `None`: as soon as it may; a wait, as late as its value is needed."""
    deferred: bool = False
    """Of a collective: begun as a step ends, completed in the next one. Of a wait or a store: of the step before."""
    communicator: int = 0
    """Of a collective, as the schedule decides by the group and the context alone: each has a channel of its own."""

    @property
    def elements(self) -> int:
        return self.made.elements

    @property
    def dtype(self) -> str:
        return self.made.dtype

    @property
    def layout(self) -> Layout:
        return self.made.layout

    @property
    def bytes(self) -> int:
        return self.made.elements * DTYPE_BYTES[self.made.dtype]

    @property
    def is_pending(self) -> bool:
        """Whether its value is complete only behind a `Wait`."""
        return self.op.is_collective

    @property
    def completes_step_before(self) -> bool:
        return self.deferred and not self.op.is_collective

    @property
    def members(self) -> Sequence[Member]:
        return () if self.group is None else self.group.members

    @property
    def owner_group(self) -> Group:
        assert self.group is not None, f"{self.op.name} belongs to a sync group"
        return self.group

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.made.dtype)  # type: ignore[no-any-return]

    @property
    def is_sharded(self) -> bool:
        """Whether no two ranks hold the same element."""
        return is_sharded(self.made.layout)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements that each rank holds of a sharded value, by rank; else empty."""
        return shard_sizes(self.made.layout)

    def held_elements(self, rank: int) -> int:
        return held_elements(self.made.layout, self.made.elements, rank)

    def held_by_rank(self, world_size: int) -> Elements:
        """Elements that each rank holds, by rank."""
        return held_by_rank(self.made.layout, self.made.elements, world_size)

    def held_bytes(self, world_size: int) -> Bytes:
        """Bytes that each rank holds, as one number where all hold as many."""
        return DTYPE_BYTES[self.made.dtype] * self.held_by_rank(world_size) if self.is_sharded else self.bytes

    @property
    def key(self) -> tuple[object, ...]:
        """Calls with equal keys cost the same: what is declared may depend on all but members' names and positions."""
        g = self.group
        of_group = g and (g.kinds if self.op.reads_members else len(g.members), g.dtype)
        return self.op, self.made, self.communicator, tuple((i.op, i.made) for i in self.inputs), of_group


class Site(ABC):
    """Where operations run: a graph that is being written, or at once. Values there are nodes, or tensors."""

    rank: int
    world_size: int
    device: torch.device
    is_last: bool = True
    """Whether the batch is the last, or only, one of its step."""
    scale: Any = None
    """What gradients are multiplied with as they are packed, where the backward pass did not scale them."""
    parameters: dict[str, torch.nn.Parameter]
    shards: dict[str, torch.Tensor]
    """This rank's rows of the parameters that are sharded between steps."""
    max_norm: float | None = None
    loss_scale: Any = None
    """The scale that the loss was multiplied with (`ops.gradients.LossScale`); `None` where it was not."""

    @abstractmethod
    def value_of(self, call: Call) -> Any:
        """The value of an earlier call."""

    @abstractmethod
    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Calls `function(*args, **kwargs)`; returns its result."""

    @abstractmethod
    def call_method(self, name: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of the first argument."""

    @abstractmethod
    def call_module(self, name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """Calls a module, which is kept under that name."""

    @abstractmethod
    def module_of(self, name: str, make: Callable[[], torch.nn.Module]) -> Any:
        """A module that several operations of a group share, made by the first of them."""

    @abstractmethod
    def notes(self, group: Group) -> dict[Any, Any]:
        """A dict in which operations of a group leave what later operations of the group read."""

    @abstractmethod
    def channel(self, subgroups: Any = None, communicator: int = 0) -> Any:
        """The name of the process group in which this rank runs a collective; by default, that of all ranks."""

    @abstractmethod
    def computed(self, node: str) -> Any:
        """The value of a node of the model's graph."""

    @abstractmethod
    def rows(self, node: str, dimension: int = 0) -> Any:
        """The size of a dimension of a node's value, whether the node was computed yet or not."""

    @abstractmethod
    def replace(self, node: str, value: Any) -> None:
        """Puts a value in the place of a node of the model's graph, for those that read it behind here."""

    @abstractmethod
    def local_gradient(self, name: str) -> Any:
        """This rank's gradient of a parameter, once it is complete."""

    @abstractmethod
    def gradient(self, name: str, value: Any) -> Any:
        """A parameter's gradient `value`, with those of earlier micro-batches added."""

    def instead(self, node: str, input_node: str) -> Any:
        """The value that a node of the model's graph reads in the place of its input `input_node`."""
        return self.computed(input_node)

    def owns(self, name: str) -> bool:
        """Whether a collective may overwrite a local gradient: nobody else reads its memory."""
        return False

    def has_earlier(self, name: str) -> bool:
        """Whether a gradient of earlier micro-batches is added to this parameter's."""
        return False

    def earlier_terms(self, name: str) -> list[tuple[Any, Any]]:
        """The factors of a parameter's structured gradient that earlier micro-batches have left."""
        return []

    def terms_of(self, name: str) -> list[tuple[Any, Any]]:
        """The left and the right factor of each term of a parameter's structured gradient, of this batch."""
        raise NotImplementedError("parts of gradients are found in a model's graph")

    def product(self, call: Call, name: str, value: Any) -> Any:
        """A gradient that is made as a `Product`: computed here, unless that may be done in pieces, as it is used."""
        if call.op.in_pieces and self.is_last and not self.has_earlier(name):
            return value
        return self.gradient(name, self.call_method("whole", (value,)))

    def deliver(self, call: Call, value: Any) -> Any:
        """Hands a synchronized gradient over to the user, as the parameter's `grad`."""
        raise NotImplementedError("only a program without an optimizer delivers gradients")

    def part(self, group: int, pieces: Any) -> Any:
        """The optimizer over fragments of a sync group, by its index."""
        raise NotImplementedError("only a program with an optimizer updates parameters")

    def stored(self, group: Group, sender: int | None) -> Any:
        """What writes a group's received parameters into the model; `None` on the rank that has sent them."""
        raise NotImplementedError("only a program with an optimizer updates parameters")

    def clipped(self, call: Call) -> list[tuple[bool, Any]]:
        """What this rank holds of the gradients that are clipped; for each, whether no other rank holds it."""
        held = ((i, self.value_of(i)) for i in call.inputs if i.held_elements(self.rank))
        return [(i.is_sharded, value) for i, value in held if value is not None]

    def mesh(self) -> str:
        """The name of the connections between the ranks and the serving hosts."""
        raise NotImplementedError("nothing is sent without a process group")

    def rows_of(self, name: str) -> Sequence[tuple[Any, Any]]:
        """The left and the right factor of each term of the gradient of a table whose rows are sharded."""
        return ()

    def look_up(self, node: str, rows: Any, places: Any) -> None:
        """Has a lookup of the model's graph read other rows, by other indices."""
        raise NotImplementedError("lookups are nodes of a model's graph")

    def replace_parameter(self, names: Sequence[str], value: Any, views: bool) -> None:
        """Puts a value in the place of a parameter, by all its names; with `views`, views of it are made again."""
        raise NotImplementedError("parameters are read by a model's graph")

    def strides(self, name: str) -> tuple[int, ...]:
        """The strides of the whole parameter, as the graph was captured with it."""
        return self.parameters[name].stride()

    def begin_step_sum(self, of: str) -> Any:
        """Begins to sum the batches' weights, or their parts of the loss, over ranks."""
        raise NotImplementedError("a number of the whole step is summed within a step")

    def end_step_sum(self, of: str, value: Any) -> Any:
        """Completes the sum that `begin_step_sum` has begun; returns the sum."""
        raise NotImplementedError("a number of the whole step is summed within a step")

    def state(self, call: Call, key: str) -> Any:
        """The tensor that a `State` asks for, by its name in the group; `None` where this rank has no part of it."""
        raise NotImplementedError("only a program with an optimizer has state that lives from step to step")

    def deferred_of(self, call: Call) -> Any:
        """Completes the collective that the step before has begun, and stores its result."""
        raise NotImplementedError("only a program with an optimizer has parameters on their way")

    def sum_parts(self, wait: Call, parts: Any, dtype: torch.dtype) -> Any:
        """The sum, in `dtype`, of what a reduce-scatter has received."""
        raise NotImplementedError

    def empty(self, call: Call) -> Any:
        """Uninitialized memory for a call's whole value."""
        return self.call(torch.empty, (call.elements,), {"dtype": call.torch_dtype, "device": self.device})

    def message(self, call: Call) -> list[Any]:
        """A flat value of parts for each rank, with the elements that go to and come from each rank."""
        return list(self.value_of(call))
