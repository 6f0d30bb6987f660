"""`autopar doctor`: what this machine offers."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import click

from autopar.cli.console import json_option, result, result_json, result_table, standard_options

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for."""

    name: str
    state: Literal["ok", "no", "fails"]
    """`no`: not there, and not needed for all work; `fails`: autopar cannot work without it."""
    value: str
    note: str = ""
    """What follows from it."""


@click.command("doctor")
@json_option
@standard_options
def command(as_json: bool) -> None:
    """Show what this machine offers: torch, backends, devices, cores, memory, and the torchrun environment.

    Exits with 2 where autopar cannot work here.
    """
    findings = examine()
    broken = [f for f in findings if f.state == "fails"]
    if as_json:
        result_json({"usable": not broken, "findings": [asdict(f) for f in findings]})
    else:
        result_table(("what", "found", "value", "note"), [(f.name, f.state, f.value, f.note) for f in findings], "llll")
        result("autopar cannot work here: " + "; ".join(f.name for f in broken) if broken else "autopar can work here.")
    if broken:
        click.get_current_context().exit(2)


def examine() -> list[Finding]:
    """Looks at everything."""
    return [_python(), *_torch(), *_machine(), *_lab(), _torchrun()]


def _python() -> Finding:
    old = sys.version_info < (3, 11)
    return Finding("python", "fails" if old else "ok", platform.python_version(), "3.11 is needed" if old else "")


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as e:  # a broken installation raises OSError and others
        return [Finding("torch", "fails", "cannot be imported", f"{type(e).__name__}: {e}")]
    found = [Finding("torch", "ok", str(torch.__version__))]
    gloo = dist.is_available() and dist.is_gloo_available()
    found.append(
        Finding("gloo", "ok", "available", "ranks on CPUs")
        if gloo
        else Finding("gloo", "fails", "not in this build of torch", "`autopar verify` and ranks on CPUs need it")
    )
    nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    found.append(
        Finding("nccl", "ok", "available", "ranks on CUDA devices")
        if nccl
        else Finding("nccl", "no", "not available", "needed only for ranks on CUDA devices")
    )
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            memory = properties.total_memory / 2**30
            found.append(Finding(f"cuda:{i}", "ok", f"{properties.name}, {memory:.1f} GiB"))
    else:
        found.append(Finding("cuda", "no", "no device", "plans for other machines can still be made here"))
    return found


def _machine() -> list[Finding]:
    from autopar.spec.detect import cores, free_memory_bytes, memory_bytes

    found = [Finding("cores", "ok", f"{cores()} usable of {os.cpu_count() or cores()}")]
    memory, free = memory_bytes(), free_memory_bytes()
    if memory is not None and free is not None:
        found.append(Finding("memory", "ok", f"{free / 2**30:.1f} GiB free of {memory / 2**30:.1f} GiB"))
    return found


def _lab() -> list[Finding]:
    """What it takes to lay out several hosts, with shaped links, on this machine."""
    why = "needed only to emulate several hosts on this machine"
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    found = [Finding("root", "ok", "yes") if root else Finding("root", "no", "no", why)]
    for tool in ("ip", "tc", "bridge"):
        path = shutil.which(tool)
        found.append(Finding(tool, "ok", path) if path else Finding(tool, "no", "not found", f"iproute2; {why}"))
    return found


def _torchrun() -> Finding:
    values = {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
    if not values:
        return Finding("torchrun", "no", "not under torchrun", "this process is a world of one")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in values]
    text = " ".join(f"{name}={value}" for name, value in values.items())
    return (
        Finding("torchrun", "fails", text, f"{', '.join(missing)} not set")
        if missing
        else Finding("torchrun", "ok", text)
    )
