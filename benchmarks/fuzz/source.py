"""The source of a case, and the module that it makes."""

from __future__ import annotations

import inspect
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.fuzz import prelude
from benchmarks.fuzz.case import Case

_made = itertools.count()


def render(case: Case, dtype: str | None = None) -> str:
    """The Python source of a case's model, batches, loss and optimizer."""
    in_model = case.form not in ("loss_fn", "loss_module")
    taken = [n for n, _ in case.inputs] + ([n for n, _ in case.targets] if in_model else [])
    head = inspect.getsource(prelude).partition("DTYPE = torch.float64")[2]
    head = f"DTYPE = torch.{dtype or case.dtype}{head}"
    last = {
        "tensor": "return {loss}",
        "dict": 'return {{"logits": out, "loss": {loss}}}',
        "attribute": "return Output(loss={loss}, logits=out)",
    }.get(case.form, "return out")
    body = [*case.forward, f"out = {case.output}", last.format(loss=case.loss)]
    lines = [
        "import copy",
        "import io",
        "import os",
        "import tempfile",
        "from dataclasses import dataclass",
        "from typing import Any",
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        head.strip(),
        "\n\nclass Model(nn.Module):",
        "    def __init__(self):",
        *_indented(["super().__init__()", *case.init], 8),
        "",
        f"    def forward({', '.join(['self', *taken])}):",
        *_indented(body, 8),
        "\n\ndef batch(n, seed):",
        f"    inputs = {_dictionary(case.inputs)}",
    ]
    if in_model:
        lines += [f"    return {{**inputs, **{_dictionary(case.targets)}}}"]
    else:
        lines += [f"    return inputs, {_dictionary(case.targets)}", "", ""]
        named = [f'{n} = target["{n}"]' for n, _ in case.targets]
        if case.form == "loss_module":
            lines += ["class Loss(nn.Module):", "    def __init__(self):", "        super().__init__()"]
            lines += [
                "        self.t = parameter((), 99)",
                "        self.weight = 1.0",
                "",
                "    def forward(self, out, target):",
            ]
            lines += _indented([*named, f"return (1 + 0.1 * self.t) * ({case.loss})"], 8)
        else:
            lines += ["def loss_fn(out, target):", *_indented([*named, f"return {case.loss}"], 4)]
    lines += ["\n\ndef make_optimizer(parameters):", f"    return {case.optimizer}", ""]
    return "\n".join(lines)


def _indented(statements: Sequence[str], by: int) -> list[str]:
    return [" " * by + line for s in statements for line in s.split("\n")]


def _dictionary(entries: Sequence[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{n}": {e}' for n, e in entries) + "}"


@dataclass(frozen=True)
class Built:
    """A case's parts, fresh ones on every call."""

    case: Case
    space: dict[str, Any]
    first: dict[str, Any]
    """The globals as they are before a training, which an event may change."""

    def model(self) -> nn.Module:
        self.space.update(self.first)
        made: nn.Module = self.space["Model"]()
        return made.train()

    def loss_fn(self) -> Any:
        """`None` where the model computes its loss."""
        if self.case.form == "loss_module":
            return self.space["Loss"]()
        return self.space.get("loss_fn")

    def batch(self, samples: int, seed: int) -> Any:
        return self.space["batch"](samples, seed)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.space["make_optimizer"](parameters)
        return made

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.case.schedule:
            return None
        return eval(self.case.schedule, {"torch": torch, "optimizer": optimizer})

    def event(self, step: int, **held: Any) -> None:
        """Does what the case says happens before a step, to what `held` names."""
        for when, line in self.case.events:
            if when == step:
                self.space.update(held)
                whole = getattr(held.get("program"), "gathered", nullcontext) if ".data." in line else nullcontext
                with whole():  # as parameters are to be changed whose rows are elsewhere
                    exec(line, self.space)


def build(case: Case, dtype: str | None = None) -> Built:
    """Runs the case's source. `dtype`: another working dtype than the case's."""
    text, name = render(case, dtype), f"fuzz-{case.name.replace('/', '-')}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    number = next(_made)
    module = types.ModuleType(f"fuzz_case_{number}")
    sys.modules[module.__name__] = module  # TorchDynamo looks globals up in the module of a frame's name, and keeps it
    sys.modules.pop(f"fuzz_case_{number - 8}", None)
    space = vars(module)
    exec(compile(text, name, "exec"), space)
    return Built(case, space, dict(space))


def trainable(model: nn.Module, loss_fn: Any) -> list[nn.Parameter]:
    """The parameters that an optimizer is given, each once."""
    owners = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    return [p for owner in owners for p in owner.parameters() if p.requires_grad]


Tree = dict[str, torch.Tensor]


def map_batch(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with every tensor changed."""
    if isinstance(batch, dict):
        return {k: change(v) for k, v in batch.items()}
    return tuple({k: change(v) for k, v in part.items()} for part in batch)


def joined(batches: Sequence[Any]) -> Any:
    """Batches, concatenated along the samples."""
    if isinstance(batches[0], dict):
        return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    return tuple({k: torch.cat([b[i][k] for b in batches]) for k in batches[0][i]} for i in range(2))


def renamed(text: str, old: str, new: str) -> str:
    """Text with a variable, or an attribute such as `self.p1`, replaced."""
    return re.sub(rf"(?<![\w.]){re.escape(old)}\b", lambda _: new, text)
