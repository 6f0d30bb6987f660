"""One measurement of `benchmarks.overhead --compile`, in processes of its own: prints its figures as a line of JSON.

python -m benchmarks.compiled_worker {steps|autopar|torch|ranks} MODEL
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import interleave
from benchmarks.zoo import Entry, compiled, find

BUCKET_MIB = 1
"""Of gradients, on two ranks, for autopar and for DDP: at least ten buckets of each model."""
START_TIMEOUT_S = 1800.0

Step = Callable[[], object]


def autopar_step(entry: Entry, compile: bool, strategy: str | None = None) -> tuple[Step, Any]:
    """A step of autopar's, and its program."""
    import autopar

    model, batch = entry.build(), _batch(entry)
    program = autopar.optimize(
        model,
        autopar.ClusterSpec.local(_world_size()),
        example_inputs=batch,
        loss_fn=entry.loss_fn,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        unused_parameters="freeze",
        strategy=strategy,
        check="never",
        compile=compile,
        timeout_s=START_TIMEOUT_S,
    )
    return lambda: program.step(batch).item(), program


def torch_step(entry: Entry) -> Step:
    """A step with the model and the loss compiled by torch.compile, and torch's fused AdamW, which is as fast as a
    compiled one and takes no time to compile."""
    model, batch = entry.build(), _batch(entry)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    runs: nn.Module = model
    if _world_size() > 1:
        runs = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, find_unused_parameters=False)
    loss_of = torch.compile(lambda data: entry.loss(runs, data))

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item())

    return step


def steps(entry: Entry, rounds: int) -> dict[str, Any]:
    """Steps of one thread, in turns, in seconds of the processor: what other processes take away is not in them."""
    contestants = {
        "autopar": autopar_step(entry, False)[0],
        "autopar, compiled": autopar_step(entry, True)[0],
        "torch.compile": torch_step(entry),
    }
    return {"seconds": dict(interleave(contestants, rounds, clock=time.process_time).seconds)}


def compile_seconds(entry: Entry, what: str) -> dict[str, Any]:
    """From the model to the end of the first step: seconds of the processor, of this process and of the C++ compiler's,
    and the wall's."""
    entry.loss(entry.build(), _batch(entry))  # imports and PyTorch's own first use
    began, before = time.perf_counter(), _processor_seconds()
    regions = None
    if what == "torch":
        torch_step(entry)()
    else:
        step, program = autopar_step(entry, True)
        step()
        compiler = program.settings.compiler
        regions = [compiler.regions, len(compiler.known)]
    spent = _processor_seconds() - before
    return {"processor_s": spent, "wall_s": time.perf_counter() - began, "regions": regions}


def ranks(entry: Entry, rounds: int) -> dict[str, Any]:
    """Steps on two ranks on this machine, in turns: of each, the time of the slower rank."""
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory(prefix="autopar-compiled-") as folder:
        start_processes(_rank, (entry.name, rounds, folder), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
        found: list[dict[str, Any]] = [json.loads((Path(folder) / str(r)).read_text()) for r in range(2)]
    names = found[0]["seconds"]
    slower = {n: [max(pair) for pair in zip(*(f["seconds"][n] for f in found), strict=True)] for n in names}
    return found[0] | {"seconds": slower}


def _rank(rank: int, name: str, rounds: int, folder: str) -> None:
    from datetime import timedelta

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    limit, meet_at = timedelta(seconds=START_TIMEOUT_S), f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=2, timeout=limit)
    entry = find(compiled.entries(), name)
    step, program = autopar_step(entry, True, f"all_reduce_{BUCKET_MIB}MiB")
    contestants = {"autopar, compiled": step, "DDP, torch.compile": torch_step(entry)}

    def together(one: Step) -> Step:
        def run() -> None:
            one()
            dist.barrier()

        return run

    found = interleave({n: together(s) for n, s in contestants.items()}, rounds)
    compiler = program.settings.compiler
    regions = [compiler.regions, len(compiler.known)]
    result = {"seconds": dict(found.seconds), "groups": len(program.plan.groups), "regions": regions}
    (Path(folder) / str(rank)).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _batch(entry: Entry) -> Any:
    return entry.batch(entry.batch_size, 1 + int(os.environ.get("RANK", "0")))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _processor_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


@click.command()
@click.argument("what", type=click.Choice(["steps", "autopar", "torch", "ranks"]))
@click.argument("name")
@click.option("--rounds", default=9)
def main(what: str, name: str, rounds: int) -> None:
    """Prints one measurement as a line of JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    entry = find(compiled.entries(), name)
    if what == "steps":
        result = steps(entry, rounds)
    elif what == "ranks":
        result = ranks(entry, rounds)
    else:
        result = compile_seconds(entry, what)
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
