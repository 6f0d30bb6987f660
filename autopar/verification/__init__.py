"""Proof that a distributed program computes what one process computes.

N gloo ranks run the program, one process trains eagerly, on the same global batches; loss, every gradient, every
parameter and every buffer are compared after each step. Dropout is switched off: its random streams differ by design.

    differences     what is found, and how large a difference rounding explains
    job             what every process is told, and the model, optimizer and batches that each makes of it
    rank_buffers    the buffers that each rank has, as the definition in docs/semantics.md says
    reference       the single process
    rank            a rank
    verify          starts them all
"""

from __future__ import annotations

from autopar.verification.differences import ROUNDED_TOLERANCE, StepDifference, Verification
from autopar.verification.processes import IMPORTED_ONCE, start_method
from autopar.verification.verify import refusal, verify

__all__ = [
    "IMPORTED_ONCE",
    "ROUNDED_TOLERANCE",
    "StepDifference",
    "Verification",
    "refusal",
    "start_method",
    "verify",
]
