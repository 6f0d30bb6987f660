"""What a user is told about a model that cannot be captured: the cause, the line, and what to do."""

from __future__ import annotations

import ast
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CaptureError, SignatureError
from autopar.ir.compat import plain_arguments

_RAISED = re.compile(r"raised exception (\w+)\((.*)\)\s*$", re.MULTILINE)
"""How Dynamo's message names an exception that the traced code itself raised."""
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (\S+)\n\s*(.*)$', re.MULTILINE)
"""How a message shows one frame of a stack."""
_INTERNAL = tuple(
    str(folder) for folder in (Path(torch.__file__).parent, Path(__file__).resolve().parents[1], "<frozen")
)
_STANDARD = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Place:
    """A line that was running."""

    file: str
    line: int
    function: str
    source: str
    column: int | None = None
    """Where in the line; `None` where that is not known."""

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}, in {self.function}"
        return f"{at}: {self.source}" if self.source else at


@dataclass(frozen=True)
class _Cause:
    """One reason for which PyTorch cannot trace a model."""

    pattern: str
    """Of PyTorch's message."""
    said: str
    """`{0}` is what a group of the pattern has found."""
    remedy: str


_CAUSES = tuple(
    _Cause(*row)
    for row in (
        (
            r"failed to run FX node with fake tensors[\s\S]*?got (.*?)(?:\n|$)",
            "PyTorch refuses an operator: {0}",
            "The model does not take a batch of these shapes and dtypes: run model(batch) by itself to see it there.",
        ),
        (
            r"Data-dependent branching|Could not guard on data-dependent expression",
            "a branch depends on a tensor's value",
            "Choose with torch.where or torch.cond, or decide before the step and pass the decision in the batch as a "
            "bool.",
        ),
        (
            r"(aten\.(?:nonzero|_unique2|unique\w*|masked_select|repeat_interleave|bincount|linalg_lstsq)[\w.]*)",
            "the shape of a result depends on a tensor's values ({0})",
            "Keep shapes fixed: multiply by the mask or use torch.where in place of x[mask], or compute the indices "
            "before the step and pass them in the batch.",
        ),
        (
            r"Dynamic shape operator",
            "the shape of a result depends on a tensor's values",
            "Keep shapes fixed with torch.where or a mask, or compute the indices before the step and pass them in the "
            "batch.",
        ),
        (
            r"aten\._local_scalar_dense|tolist\(\)|Tensor\.item|has a non-Tensor output whose value is dependent",
            "a tensor's value is made a number of Python's (by item(), float(), int(), bool() or tolist())",
            "Go on with the tensor itself, or compute the number before the step and pass it in the batch.",
        ),
        (
            r"mutating a non-functional tensor",
            "it writes in place to a tensor that is neither a parameter nor a buffer",
            "Register the tensor with register_buffer(name, tensor): the captured step keeps buffers up to date.",
        ),
        (
            r"[Ss]parse Tensor",
            "it reads a sparse tensor, which PyTorch cannot trace",
            "Hold its indices and values as tensors of their own, and use index_add or scatter_add.",
        ),
        (
            r"[Mm]odule-level backwards? hooks",
            "a module has a backward hook, which PyTorch cannot trace",
            "Remove it, or register hooks on tensors instead: output.register_hook(...) in forward.",
        ),
        (
            r"torch\.autograd\.grad|\.backward\(\)",
            "the model computes gradients in its forward pass",
            "torch.func.grad, and torch.autograd.grad(..., create_graph=True) of parameters, can be captured.",
        ),
        (
            r"requires_grad_\(\)",
            "the model sets requires_grad of a tensor in its forward pass",
            "Use tensor.detach() to stop gradients, torch.func.grad for those of an input, and freeze parameters "
            "before the program is made.",
        ),
        (
            r"`(?:<unknown module>\.)?(Random\.\w+?)\.?`|(RandomState\.\w+) of RandomState\("
            r"|built-in method (\w+) of numpy\.random",  # PyTorch 2.11
            "it calls {0}, whose numbers differ in every step, and a graph would hold the first",
            "Draw with torch.rand and its like, or before the step, and pass the numbers in the batch.",
        ),
        (
            r"pack_padded_sequence|pack_sequence|PackedSequence",
            "it packs sequences, and the shapes of packed ones depend on a tensor's values",
            "Run the layer on padded sequences, and mask what lies behind their ends.",
        ),
        (
            r"marked that the function `([^`]*)`"
            r"|does not know how to trace (?:[\w ]+ )?`(?:<unknown module>\.)?([^`]*?)\.?`"
            r"|Called `([\w.]+)\(",
            "it calls {0}, which PyTorch cannot trace",
            "Call it before the step and pass the result in the batch, or wrap it as a torch.library.custom_op.",
        ),
    )
)
_OTHERWISE = (
    "Control flow that depends on a tensor's value, and calls out of PyTorch, cannot be captured: use "
    "torch.where or torch.cond, move the code out of forward, or freeze the flag that selects it."
)


def own_error(e: BaseException) -> AutoparError | None:
    """An error of autopar's own that was raised inside the traced code, which Dynamo reports as one of its own."""
    found = _RAISED.search(str(e))
    kinds = {k.__name__: k for k in (CaptureError, SignatureError)}
    if found is None or found[1] not in kinds:
        return None
    shown = plain_arguments(found[2])
    try:
        message = str(ast.literal_eval(shown))
    except (ValueError, SyntaxError):
        message = shown
    return kinds[found[1]](message)


def was_raised(e: BaseException) -> bool:
    """Whether the traced code itself raised the error."""
    return _RAISED.search(str(e)) is not None


def let_go_of_frames(e: BaseException | None) -> None:
    """Clears the local variables of all frames that an error, or one that it came of, has passed through."""
    done: set[int] = set()
    while e is not None and id(e) not in done:
        traceback.clear_frames(e.__traceback__)
        done.add(id(e))
        e = e.__cause__ or e.__context__


def is_rank_0() -> bool:
    """Whether this process says what all ranks would say."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0)


def stack_files(e: BaseException) -> list[str]:
    """The files whose lines were running, PyTorch's own among them."""
    return [f.filename for f in getattr(e, "real_stack", None) or ()]


def places(e: BaseException) -> list[Place]:
    """The lines that were running, the innermost last; those of PyTorch's and autopar's own are left out."""
    stack = getattr(e, "real_stack", None)
    if stack:
        found = [Place(f.filename, f.lineno or 0, f.name, f.line or "", f.colno) for f in stack]
    else:
        found = [Place(f[1], int(f[2]), f[3], f[4]) for f in _FRAME.finditer(str(e))]
    if not found:
        found = [Place(f.filename, f.lineno or 0, f.name, f.line or "") for f in traceback.extract_tb(e.__traceback__)]
    return [p for p in found if not p.file.startswith(_INTERNAL)]


def refusal(e: BaseException, what: str) -> CaptureError:
    """Says where in the user's code the capture broke, why, and what to do."""
    where = _users(places(e))
    at = "" if where is None else f"\n  at {where}"
    text = str(e).strip()
    raised = _RAISED.search(text)
    if raised:
        reason = f"it raised {raised[1]}({plain_arguments(raised[2])})"
        remedy = "The model itself raises this for such a batch."
    else:
        reason, remedy = _cause(text) or (_first_lines(text) or type(e).__name__, _OTHERWISE)
    return CaptureError(f"{what}: {reason}{at}\n  {remedy}")


def _users(found: Sequence[Place]) -> Place | None:
    """The innermost line that is not the standard library's, or else the innermost."""
    of_users = [p for p in found if not p.file.startswith(_STANDARD) or "site-packages" in p.file]
    return next(reversed(of_users or found), None)


def _cause(text: str) -> tuple[str, str] | None:
    for cause in _CAUSES:
        found = re.search(cause.pattern, text)
        if found:
            return cause.said.format(next((g for g in found.groups() if g), "")), cause.remedy
    return None


def _first_lines(text: str) -> str:
    """What PyTorch says, less its advice to those who call torch.compile."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("Hint:")]
    return "; ".join(lines[:3])
