"""The graphs of a program: each with what it is valid for, found again as long as that holds.

They are as many as `optimize(max_captures=...)` says; the one that was used longest ago goes first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import nn

from autopar.errors import AutoparWarning, CaptureError, PlanMismatchError, SignatureError
from autopar.ir.batch import Batch
from autopar.ir.constants import Constant
from autopar.ir.guards import Guards, global_state
from autopar.ir.refusals import is_rank_0
from autopar.ir.served import Shapes, Sizes
from autopar.ir.training_graph import TrainingGraph
from autopar.spec.plan import Plan

Compiled = TypeVar("Compiled")

MOST_CHANGES = 3
"""Batches in succession, of a signature that was captured before, that may need a capture of their own since something
that Python holds has changed. What changes at every step is named rather than captured for ever."""


MOST_CAPTURES = 32
"""Captures that a program keeps unless it is told otherwise: each holds its graphs, 20 to 36 MB for a GPT-2 of 12
layers."""


@dataclass(frozen=True, eq=False)
class _Entry(Generic[Compiled]):
    key: Hashable
    kind: Hashable
    guards: Guards | None
    sizes: Sizes | None
    compiled: Compiled


class Captures(Generic[Compiled]):
    """What was made of each capture, by the batch's signature and what Python held."""

    def __init__(self, says: bool, most: int, let_go: Callable[[Compiled], None]) -> None:
        """`says`: whether this rank is the one that tells the user. `most`: how many are kept. `let_go`: is told of
        those that are not."""
        self._says = says
        self._most = most
        self._let_go = let_go
        self._entries: list[_Entry[Compiled]] = []
        """In the order of their last use."""
        self._changes = self._values = 0
        self._reason = ""

    def find(self, key: Hashable, kind: Hashable, shapes: Shapes, counts: bool = True) -> Compiled | None:
        """What was made for this key, or for all batches of this kind that have such shapes, where all that the model
        reads is as it was then; else `None`.

        Raises `CaptureError` where that was so for the last `MOST_CHANGES` batches, too, or where as many batches as
        graphs are kept have held other values each, unless it is not to count.
        """
        entries = self._of(key, kind, shapes)
        for entry in entries:
            reason = None if entry.guards is None else entry.guards.changed()
            if reason is None:
                self._changes = self._values = 0
                self._entries.remove(entry)
                self._entries.append(entry)
                return entry.compiled
            self._reason = reason
        if entries and counts:
            self._changes += 1
            if self.keep_changing:
                raise CaptureError(
                    f"something that the model or the loss reads has changed before each of the last {self._changes} "
                    f"batches, and each time the step had to be captured again: {self._reason}. Keep what changes at "
                    "every step in a tensor: a buffer of the model, or a part of the batch; or pass capture='never', "
                    "with which the model runs as it is"
                )
        elif counts and self._is_another_value(kind):
            self._values += 1
            if self.keep_changing:
                raise CaptureError(
                    f"each of the last {self._values} batches held another value beside its tensors, such as a number "
                    "or a name, and each time the step had to be captured again. Pass it as a tensor where the model "
                    "reads it, and leave it out where not; or pass capture='never', with which the model runs as it is"
                )
        return None

    def _is_another_value(self, kind: Hashable) -> bool:
        """Whether batches of this kind hold a value beside their tensors that none before has held."""
        kinds = {e.kind for e in self._entries}
        return kind not in kinds and any(_of_any_value(other) == _of_any_value(kind) for other in kinds)

    def has_read_the_same(self, kind: Hashable) -> bool:
        """Whether there is a capture of a batch of this kind, of whatever sizes, of which all that the model reads is
        as it was then."""
        return any(e.kind == kind and (e.guards is None or e.guards.changed() is None) for e in self._entries)

    @property
    def keep_changing(self) -> bool:
        """Whether something that Python holds has changed before each of the last batches, or values in these."""
        return self._changes > MOST_CHANGES or self.values_change

    @property
    def values_change(self) -> bool:
        """Whether each of the last batches has held another value beside its tensors."""
        return self._values > self._most

    def made_for(self, key: Hashable, kind: Hashable, shapes: Shapes) -> Compiled | None:
        """What was made for such batches and used last, whatever has changed since."""
        return next((e.compiled for e in self._of(key, kind, shapes)), None)

    def _of(self, key: Hashable, kind: Hashable, shapes: Shapes) -> list[_Entry[Compiled]]:
        return [
            e
            for e in reversed(self._entries)
            if (e.key == key if e.sizes is None else e.key == kind and e.sizes.hold(shapes))
        ]

    def remove(self, compiled: Compiled) -> None:
        """Lets go of what was made of a capture."""
        self._entries = [e for e in self._entries if e.compiled is not compiled]
        self._let_go(compiled)

    def add(
        self, key: Hashable, kind: Hashable, guards: Guards | None, compiled: Compiled, sizes: Sizes | None = None
    ) -> None:
        """Keeps what was made of a capture, and lets go of what was used longest ago where there is no room for it.
        Warns, once, of what the captured code does besides computing."""
        lost = [] if guards is None else guards.lost
        if lost and self._says:
            self._says = False
            shown = ", ".join(f"'{w}'" for w in lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            warnings.warn(
                f"running the model sets or changes {shown}, which the captured step does not do: what reads it "
                "outside of the model finds what was there before. Return it from forward, or keep it in a buffer",
                AutoparWarning,
                stacklevel=2,
            )
        self._entries.append(_Entry(key if sizes is None else kind, kind, guards, sizes, compiled))
        while len(self._entries) > self._most:
            self._let_go(self._entries.pop(0).compiled)

    def __iter__(self) -> Iterator[Compiled]:
        return iter([e.compiled for e in self._entries])


def signature_key(model: nn.Module, batch: Batch, hooks: Hashable = ()) -> tuple[Hashable, Hashable]:
    """What a captured graph is valid for, besides its guards: the batch's signature, which of its tensors require a
    gradient, the hooks of the model's modules, and PyTorch's global state. And the same of all batches that differ in
    sizes alone."""
    rest = (tuple(t.requires_grad for t in batch.tensors), model.training, hooks, global_state())
    return (batch.signature, *rest), (batch.signature.of_any_size, *rest)


def _of_any_value(key: Hashable) -> Hashable:
    """A key of `signature_key`, whatever the batch holds beside its tensors."""
    assert isinstance(key, tuple)
    signature, *rest = key
    leaves = tuple(x.kind if isinstance(x, Constant) else x for x in signature.leaves)
    return replace(signature, leaves=leaves), *rest


def check_trained(plan: Plan, later: TrainingGraph) -> None:
    """Raises `PlanMismatchError` where a later capture has gradients of other parameters than the plan."""
    before = {p.name: p.trainable for p in plan.model.parameters}
    other = [p for p in later.model.parameters if before.get(p.name, p.trainable) is not p.trainable]
    if other:
        has = "a gradient" if other[0].trainable else "no gradient"
        raise PlanMismatchError(
            f"this step's loss has {has} of parameter '{other[0].name}', unlike the first one's. A captured step "
            'trains what its plan trains, each time: capture="never" leaves out in each step what no rank\'s loss uses'
        )


def check_batches(
    batches: Sequence[Batch], device: torch.device, is_first: bool, eager: bool = False, is_scaled: bool = False
) -> None:
    """Raises `SignatureError` where a batch asks for what a step that runs as one program cannot do; where the model
    runs eagerly, it can. Warns, at the first step, of an autocast that needs a loss that is scaled."""
    if not eager and any(t.requires_grad for b in batches for t in b.tensors):
        raise SignatureError(
            "a tensor of the batch requires a gradient, which a step that runs as one program does not hand back: "
            "detach it, or leave the optimizer out of optimize() and use the module in your own loop"
        )
    kind = device.type
    needs_scaling = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
    if is_first and needs_scaling and not is_scaled and is_rank_0():
        warnings.warn(
            "program.step runs under float16 autocast and scales no loss, so small gradients become 0: pass "
            "loss_scale='dynamic' to autopar.optimize, or use bfloat16",
            AutoparWarning,
            stacklevel=3,
        )
