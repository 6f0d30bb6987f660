"""Everything autopar raises on purpose.

AutoparError
 |- SpecError                 a file or value the user wrote cannot be used
 |   |- ClusterSpecError      ... in a cluster description
 |   `- PlanError             ... in a plan file
 |       `- PlanMismatchError the plan is for another model, cluster or world size
 |- CaptureError              the model cannot be captured as one training graph
 |   |- UnusedParameterError  trainable parameters get no gradient from the loss
 |   `- SignatureError        a batch does not fit what was captured
 |- CompileError              the step cannot be compiled on this machine (`compile=True`)
 |- OptimizerError            the optimizer cannot be used with this model or plan
 |- InfeasibleError           no plan satisfies the constraints
 |- CollectiveError           ranks disagree, or a rank is late or gone
 |- LabUnavailable            this machine cannot emulate a cluster (`autopar.lab`)
 |- VerificationError         the distributed program differs from the single process
 |   `- TracingError          ... since PyTorch's own tracing of the model gives other numbers than running it
 `- ConformanceError          a strategy breaks a promise (`autopar.testing`)

AutoparWarning              autopar goes on, as DDP would, where the numbers may not be what a user expects

Each message says what, where, what was expected, and what to do. Everything here derives
from `ValueError` or `RuntimeError` as well, so that code unaware of autopar can catch it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoparError(Exception):
    """Base class of all errors that autopar raises on purpose."""


class SpecError(AutoparError, ValueError):
    """A file or value written by the user cannot be used."""


class ClusterSpecError(SpecError):
    """A cluster description cannot be used."""


class PlanError(SpecError):
    """A plan file cannot be used."""


class PlanMismatchError(PlanError):
    """A plan was made for another model, cluster or world size."""


class CaptureError(AutoparError, RuntimeError):
    """The model cannot be captured as one training graph."""


class UnusedParameterError(CaptureError):
    """Trainable parameters get no gradient from the loss."""


class SignatureError(CaptureError, ValueError):
    """A batch does not fit the signature of the captured model."""


class CompileError(AutoparError, RuntimeError):
    """The step cannot be compiled on this machine: no C++ compiler, or a failure of PyTorch's compiler."""


class OptimizerError(AutoparError, ValueError):
    """The optimizer cannot be used with this model or with this plan."""


class InfeasibleError(AutoparError, ValueError):
    """No plan satisfies the constraints, which the message names."""


class CollectiveError(AutoparError, RuntimeError):
    """Ranks disagree about the program, or one of them is late or gone."""


class VerificationError(AutoparError, RuntimeError):
    """The distributed program does not compute what the single process computes."""


class TracingError(VerificationError):
    """PyTorch's own tracing of the model gives other numbers than running it, with or without autopar."""


class ConformanceError(AutoparError, RuntimeError):
    """A strategy breaks a promise that every strategy makes."""


class AutoparWarning(UserWarning):
    """autopar goes on, as DDP would, where the numbers may not be what the user expects. Said once, on rank 0; to be
    stopped instead, use `warnings.simplefilter("error", autopar.AutoparWarning)`."""


def among(word: str, known: Iterable[str], what: str = "known") -> str:
    """Returns "; did you mean 'x'? known: x, y", or "; known: x, y" where none is near."""
    names = list(known)
    return f"{did_you_mean(word, names) or ';'} {what}: {', '.join(names) or 'none'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the nearest of `known`, or an empty string where none is near. One that differs
    in upper and lower case alone is nearest."""
    names = list(known)
    near = [n for n in names if n.casefold() == word.casefold()] or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
