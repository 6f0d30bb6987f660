"""When parts of a batch are looked at, to see what the loss is, and with which parameters.

A term across samples may be switched on by what no graph shows, as by a buffer's value, or where there is no graph. So
batches are looked at again from time to time, by all ranks in the same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.runtime.compiled import Check
from autopar.runtime.lasting import Lasting
from autopar.runtime.proofs.proof import free_bytes
from autopar.runtime.proofs.subject import summed

_AGAIN, _LATER = 8, 4
"""The step in which a batch is looked at again, and how many times as many steps lie before the next such one: a look
takes about as long as a step."""


class LossLooks:
    """Of one program, on one rank."""

    def __init__(self, lasting: Lasting, check: Check) -> None:
        self._lasting = lasting
        self._check = check
        self._steps = 0
        self._next = _AGAIN

    def begin_step(self) -> bool:
        """Counts a step; returns whether all ranks look at their batches in it, besides in the first one."""
        self._steps += 1
        is_due = self._steps == self._next
        if is_due:
            self._next *= _LATER
        return is_due

    @contextlib.contextmanager
    def whole(self, together: bool) -> Iterator[bool]:
        """While it is open, the model can be run, if it says so. `together`: whether all ranks enter it."""
        if self._lasting.rows.is_spread() and not (together and self._fits()):
            yield False
            return
        with self._lasting.gathered():
            yield True

    def _fits(self) -> bool:
        """Whether all ranks have the memory for the whole model, and may take it. By all ranks together."""
        if self._check == "never":
            return False
        model = self._lasting.model
        free, needed = free_bytes(self._lasting.device), sum(p.numel() * p.element_size() for p in model.parameters())
        return not summed(torch.tensor(float(free is not None and free < 2 * needed)), self._lasting.group)
