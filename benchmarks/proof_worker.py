"""What a rank of `benchmarks.proof` measures: first steps with a proof and without one, eager steps, and guards."""

from __future__ import annotations

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.runtime.base_program import BaseProgram
from autopar.runtime.compiled import Check
from autopar.runtime.drop_in.module import SyncedModule
from autopar.runtime.program import Program
from benchmarks.overhead_worker import DROPOUT, Step, own_loop
from benchmarks.zoo import Entry, sizes
from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.batches import generator, masked, tokens
from benchmarks.zoo.plain import LSTM, cross_entropy

WARM_STEPS = 3
"""Eager steps of a round that count, behind one that does not."""
LOOKS = 200
WAYS = ("step", "drop-in")


def _transformer() -> Entry:
    fields = {"num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
              "vocab_size": 8192}  # fmt: skip
    batch = masked(64, 8192, padded=False)
    made = Architecture("bert, 12 layers", "BertConfig", "BertForMaskedLM", batch, fields).entry("encoder")
    return replace(made, batch_size=8)


def _lines(n: int, seed: int) -> Any:
    ids = tokens(generator(seed), n, 9, 2000)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


MODELS = (
    _transformer(),
    sizes.entries(scaled=True)[-1],
    Entry("lstm", "plain", lambda p: LSTM(p, width=256, vocabulary=2000), _lines, cross_entropy, batch_size=64),
)
"""A transformer, a convolutional network and a recurrent one."""


def eager_step(entry: Entry, batch: Any) -> Step:
    """A step as users write it, on this rank's batch alone."""
    model = entry.build(DROPOUT)
    return own_loop(entry, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch)


def made(entry: Entry, batch: Any, way: str, check: Check) -> tuple[Step, BaseProgram]:
    """A program that has taken no step, and how it takes one."""
    model = entry.build(DROPOUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    settings: dict[str, Any] = {"strategy": "ddp", "unused_parameters": "freeze", "check": check}
    if way == "step":
        program = autopar.optimize(model, example_inputs=batch, loss_fn=entry.loss_fn, optimizer=optimizer, **settings)
        assert isinstance(program, Program)
        return lambda: program.step(batch).item(), program
    module = autopar.optimize(model, example_inputs=batch if entry.loss_fn is None else batch[0], **settings)
    assert isinstance(module, SyncedModule) and isinstance(module.program, BaseProgram)
    return own_loop(entry, module, optimizer, batch), module.program


def measure(rank: int, ranks: int, name: str, way: str, rounds: int, file: str) -> None:
    """Measures one model; rank 0 writes its figures into a file, as JSON."""
    warnings.simplefilter("ignore")
    entry = next(e for e in MODELS if e.name == name)
    batch = entry.batch(entry.batch_size, 1 + rank)
    eager, told = eager_step(entry, batch), Clocks()
    program: BaseProgram | None = None
    for i in range(-1, rounds):
        order: tuple[Check, ...] = ("first", "never") if i % 2 else ("never", "first")
        for check in order:
            step, program = made(entry, batch, way, check)
            told.take(check, step, i >= 0)
            del step
        eager()
        told.several("eager", eager, i >= 0)
    assert program is not None
    if rank == 0:
        figures = {"elapsed_s": told.elapsed_s, "cpu_s": told.cpu_s, **looks(program)}
        Path(file).write_text(json.dumps(figures))
    dist.barrier()


class Clocks:
    """Seconds of steps, by what they are of: elapsed, and of this process on any core."""

    def __init__(self) -> None:
        self.elapsed_s: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def take(self, name: str, step: Step, counts: bool = True) -> None:
        """Times one step, which all ranks begin together."""
        gc.collect()
        dist.barrier()
        clocks = time.perf_counter, time.process_time
        before = [clock() for clock in clocks]
        step()
        for of, clock, began in zip((self.elapsed_s, self.cpu_s), clocks, before, strict=True):
            if counts:
                of.setdefault(name, []).append(clock() - began)

    def several(self, name: str, step: Step, counts: bool) -> None:
        """Times `WARM_STEPS`, and keeps the median."""
        each = Clocks()
        for _ in range(WARM_STEPS):
            each.take(name, step)
        if counts:
            self.elapsed_s.setdefault(name, []).append(statistics.median(each.elapsed_s[name]))
            self.cpu_s.setdefault(name, []).append(statistics.median(each.cpu_s[name]))


def looks(program: BaseProgram) -> dict[str, float]:
    """Microseconds of what is looked at before each step, as a median: what Python held, and tensors and hooks."""
    (compiled,) = program._compiled
    guards = compiled.joint.guards
    assert guards is not None and guards.changed() is None
    return {"guards_us": _median_us(guards.changed), "tensors_us": _median_us(program._unchanged.check)}


def _median_us(look: Callable[[], object]) -> float:
    taken = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        look()
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)
