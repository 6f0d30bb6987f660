"""What operators take on the device at hand, each measured once and kept.

In `~/.cache/autopar` (`$XDG_CACHE_HOME/autopar`, or `$AUTOPAR_CACHE` where that is set), one file for each device and
version of torch and, on processors, number of cores that the process may use, of threads, and of ranks that computed at
once, in all and on this machine. Machines may share that folder. Remove it to have everything measured again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import FunctionType
from typing import Any, ClassVar, Final, Literal

import torch
import torch.fx

from autopar.errors import SpecError
from autopar.spec.detect import cores, processor
from autopar.spec.json_file import JsonFile

VARIABLE = "AUTOPAR_CACHE"
SCHEMA_VERSION: Final = 1


class OperatorTimes(JsonFile):
    """Seconds of each distinct operator."""

    VERSION: ClassVar[int] = SCHEMA_VERSION
    noun: ClassVar[str] = "table of operator times"
    COMMAND: ClassVar[str] = "autopar plan --measure-compute"

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    seconds: dict[str, float]
    """By `operator_key`; the mean where a graph had several that are alike, so that its sum is kept."""

    @classmethod
    def of(cls, device: torch.device, ranks: int = 1) -> OperatorTimes:
        """What is known of a device while so many ranks compute at once; nothing where no file can be read."""
        name = device_name(device, ranks)
        with suppress(SpecError, RuntimeError):
            return cls.load(_path(name))
        return cls(device=name, seconds={})

    def add(self, seconds: Mapping[str, list[float]]) -> None:
        """Keeps what was not known; where no file can be written, it is measured again the next time."""
        known = self.model_copy(update={"seconds": {k: fmean(v) for k, v in seconds.items()} | self.seconds})
        with suppress(OSError, SpecError, RuntimeError):
            path = _path(self.device)
            path.parent.mkdir(parents=True, exist_ok=True)
            known.save(path)


def operator_key(node: torch.fx.Node) -> str:
    """An operator with everything that its time depends on but the values: shapes, number formats, other arguments."""
    args = node.args
    if getattr(node.target, "namespace", "") == "autopar":  # among ranks, whose group has another name in each program
        args = tuple(a for a in args if not isinstance(a, str))
    named = [f"{key}={_described(value)}" for key, value in node.kwargs.items()]
    # A function of autopar's own goes by its name: its address is another one in each process.
    target = node.target.__name__ if isinstance(node.target, FunctionType) else node.target
    return f"{target}({', '.join([_described(a) for a in args] + named)})"


def _described(argument: Any) -> str:
    if isinstance(argument, torch.fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
        return str(value)
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_described, argument))}]"
    return str(argument)


def device_name(device: torch.device, ranks: int = 1) -> str:
    """The device, with what else decides how fast it is: ranks that compute at once may share the processor's cores,
    and a container may have but some of them."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    at_once = f", {ranks} ranks at once" if ranks > 1 else ""
    if at_once and (here := os.environ.get("LOCAL_WORLD_SIZE")):
        at_once += f", {here} of them here"
    return f"{processor()}, {cores()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}{at_once}"


def _path(device: str) -> Path:
    """Raises `RuntimeError` where nothing says which folder is the user's."""
    given, shared = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    folder = Path(given) if given else Path(shared) / "autopar" if shared else Path.home() / ".cache" / "autopar"
    return folder / f"operators-{hashlib.sha256(device.encode()).hexdigest()[:12]}.json"
