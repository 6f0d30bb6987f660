"""One measurement of `benchmarks.overhead`, in a process of its own: prints its figures as a line of JSON.

python -m benchmarks.overhead_worker {time|eager|autopar} MODEL
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click
import torch
import torch.multiprocessing as mp

from autopar.lab import memory
from benchmarks.harness import interleave
from benchmarks.zoo import Entry, find, sizes

DROPOUT = 0.1
"""The architectures' own default."""
MEMORY_STEPS = 4
"""Steps after which peak memory is read: the second already holds the optimizer's state from the first."""

Step = Callable[[], object]


def eager_step(entry: Entry, fused: bool | None = None) -> Step:
    """A training step as users write it, with AdamW as users write it."""
    model, batch = entry.build(DROPOUT), entry.batch(entry.batch_size, 1)
    return own_loop(entry, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused), batch)


def own_loop(entry: Entry, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    """The body of a training loop as users write it; it waits for the loss."""

    def step() -> float:
        optimizer.zero_grad()
        loss = entry.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def autopar_step(entry: Entry) -> tuple[Step, float]:
    """The rewritten step, and the seconds that capture, planning and rewriting took together."""
    import autopar

    model, batch = entry.build(DROPOUT), entry.batch(entry.batch_size, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    began = time.perf_counter()
    program = autopar.optimize(
        model,
        autopar.ClusterSpec.local(1),
        example_inputs=batch,
        loss_fn=entry.loss_fn,
        optimizer=optimizer,
        unused_parameters="freeze",
    )
    optimize_s = time.perf_counter() - began
    return lambda: program.step(batch).item(), optimize_s


def time_steps(name: str, scaled: bool, rounds: int) -> dict[str, Any]:
    """Eager, eager with a fused AdamW, and rewritten steps, in turns. Each has a process of its own: in one process
    they would share an allocator, and each would find memory that the others have freed."""
    with contextlib.ExitStack() as stack:
        contestants = {one: stack.enter_context(_apart(one, name, scaled)) for one in CONTESTANTS}
        return asdict(interleave(contestants, rounds))


@contextlib.contextmanager
def _apart(contestant: str, name: str, scaled: bool) -> Iterator[Step]:
    """Starts a process that builds a contestant; yields a function that has it take one step, and waits for that."""
    context = mp.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_serve, args=(contestant, name, scaled, its), daemon=True)
    process.start()
    its.close()  # so that a process that dies is noticed

    def step() -> None:
        mine.send(True)
        mine.recv()

    try:
        mine.recv()
        yield step
    finally:
        mine.close()
        process.join()


def _serve(contestant: str, name: str, scaled: bool, pipe: Any) -> None:
    """Builds a contestant, and takes a step for each request until the pipe is closed."""
    warnings.simplefilter("ignore")
    step = CONTESTANTS[contestant](find(sizes.entries(scaled), name))
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while pipe.recv():
            step()
            pipe.send("done")


CONTESTANTS: dict[str, Callable[[Entry], Step]] = {
    "eager": eager_step,
    "eager fused": lambda entry: eager_step(entry, fused=True),
    "autopar": lambda entry: autopar_step(entry)[0],
}


def measure_memory(entry: Entry, rewritten: bool) -> dict[str, Any]:
    """Peak resident memory of this process: from its start, and from the first step on; and what was resident then."""
    step, optimize_s = autopar_step(entry) if rewritten else (eager_step(entry), 0.0)
    setup = memory.peak_bytes()
    memory.reset_peak()
    before = memory.peak_bytes()
    for _ in range(MEMORY_STEPS):
        step()
    steps = memory.peak_bytes()
    return {
        "process_bytes": max(setup, steps),
        "steps_bytes": steps,
        "before_steps_bytes": before,
        "optimize_s": optimize_s,
    }


@click.command()
@click.argument("what", type=click.Choice(["time", "eager", "autopar"]))
@click.argument("name")
@click.option("--scaled", is_flag=True)
@click.option("--rounds", default=9)
def main(what: str, name: str, scaled: bool, rounds: int) -> None:
    """Prints one measurement as a line of JSON."""
    warnings.simplefilter("ignore")
    entry = find(sizes.entries(scaled), name)
    result = time_steps(name, scaled, rounds) if what == "time" else measure_memory(entry, what == "autopar")
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
