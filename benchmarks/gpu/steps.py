"""The time of a step on one rank: autopar beside eager PyTorch, torch.compile and DistributedDataParallel, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.placed import cluster_of, moved, one_rank, synchronize
from benchmarks.gpu.setting import Setting
from benchmarks.harness import interleave
from benchmarks.zoo import Entry, find, sizes

MODELS = {"resnet-50": 64, "gpt2-small": 16, "bert-base": 32}
"""Samples of a batch on the device. ResNet-50 needs torch alone, the others `transformers`."""
LIMITS = {"eager": 1.0, "DDP": 1.0}
"""Of autopar's step, in theirs; as `benchmarks.overhead` has it for processors. [Not measured on a GPU yet.]"""
BLOCK, ROUNDS = 5, 12
"""Steps that are timed as one, since a device runs behind its host; and how many such blocks count."""

Step = Callable[[], object]


def entry_of(name: str, small: bool) -> tuple[Entry, int]:
    """A model of the zoo, and the samples of its batch."""
    entries = sizes.entries(scaled=small)
    entry = find(entries, f"{name}, scaled down" if small else name)
    return entry, 2 if small else MODELS[name]


def filler(name: str) -> Callable[[Findings, Setting], None]:
    """What measures one model."""
    return partial(_fill, name)


def _fill(name: str, findings: Findings, setting: Setting) -> None:
    torch.set_float32_matmul_precision("high")
    entry, samples = entry_of(name, setting.small)
    batch = moved(entry.batch(samples, 1), setting.device)
    rounds = 2 if setting.small else ROUNDS
    steps: dict[str, Step] = {}
    with one_rank("nccl" if setting.device == "cuda" else "gloo", setting.device):  # which DDP needs
        for what, build in _BUILDERS.items():
            _built(name, what, lambda build=build: build(entry, batch, setting.device), steps, findings, setting)  # type: ignore[misc]
        _timed(f"{name}, {samples} samples", steps, rounds, findings, setting)
        for what, limit in LIMITS.items():
            findings.target(f"{name}: autopar's step, in those of {what}", findings.data["ratios"].get(what), limit)
        if setting.small:  # inductor takes minutes on few cores
            return
        _built(name, COMPILED, lambda: _compiled(entry, batch, setting.device), steps, findings, setting)
        pair = {what: step for what, step in steps.items() if what in ("autopar", COMPILED)}
        if COMPILED in pair:
            _timed(f"{name}, {samples} samples", pair, rounds, findings, setting)


def _built(
    name: str,
    what: str,
    build: Callable[[], Step],
    steps: dict[str, Step],
    findings: Findings,
    setting: Setting,
) -> None:
    """Adds a step to `steps` once it has run; a row where it fails: the others are measured all the same."""
    start = time.perf_counter()
    try:
        step = build()
        step()
        synchronize(setting.device)
    except Exception as e:
        findings.row(f"{name}: {what}", f"not measured: {type(e).__name__}: {str(e).strip()[:300]}")
        return
    findings.data[f"{what}: first step s"] = round(time.perf_counter() - start, 2)
    steps[what] = step


def _timed(what: str, steps: dict[str, Step], rounds: int, findings: Findings, setting: Setting) -> None:
    """Times steps in turns, and adds a row for each."""
    ratios = findings.data.setdefault("ratios", {})
    if not steps:
        return
    block = 1 if setting.small else BLOCK
    timings = interleave({k: partial(_block, s, block, setting.device) for k, s in steps.items()}, rounds)
    findings.data.setdefault("seconds of a block", {}).update({k: list(v) for k, v in timings.seconds.items()})
    findings.data["steps of a block"] = block
    for each in steps:
        found = f"{timings.time(each).median / block * 1e3:.2f} ms"
        if each != "autopar" and "autopar" in steps:
            ratios[each] = timings.ratio("autopar", each).median
            found += f"; autopar takes {timings.ratio('autopar', each):.3f} of it"
        findings.row(f"{what}: {each}", found)


def _block(step: Step, count: int, device: str) -> None:
    for _ in range(count):
        step()
    synchronize(device)


def trainer(entry: Entry, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    """A training step as users write it; waits for nothing."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = entry.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def adamw(model: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
    """The same optimizer for all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def _eager(entry: Entry, batch: Any, device: str, fused: bool | None = None) -> Step:
    model = entry.build().to(device)
    return trainer(entry, model, adamw(model, fused), batch)


def _compiled(entry: Entry, batch: Any, device: str) -> Step:
    model = entry.build().to(device)
    return trainer(entry, torch.compile(model), adamw(model, True), batch)  # type: ignore[arg-type]


def _ddp(entry: Entry, batch: Any, device: str) -> Step:
    model = entry.build().to(device)
    return trainer(entry, DistributedDataParallel(model, gradient_as_bucket_view=True), adamw(model), batch)


def autopar_step(entry: Entry, batch: Any, device: str, fused: bool | None = None) -> Step:
    """The rewritten step."""
    model = entry.build().to(device)
    program = autopar.optimize(
        model,
        cluster_of(1, device),
        example_inputs=batch,
        loss_fn=entry.loss_fn,
        optimizer=adamw(model, fused),
        unused_parameters="freeze",
        time_budget_s=2.0,
    )
    return partial(program.step, batch)


_BUILDERS: dict[str, Callable[[Entry, Any, str], Step]] = {
    "autopar": autopar_step,
    "autopar, fused AdamW": partial(autopar_step, fused=True),
    "eager": _eager,
    "eager, fused AdamW": partial(_eager, fused=True),
    "DDP": _ddp,
}
COMPILED = "torch.compile, fused AdamW"
"""It is built last, beside autopar alone: what was measured before is there where compiling takes too long."""
