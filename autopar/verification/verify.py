"""Starts the ranks and the single process of a verification, and reads what they have found."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from autopar.errors import SpecError
from autopar.runtime.job.ports import held_port
from autopar.runtime.model.eager import loss_of
from autopar.search.builders import builder_named
from autopar.spec.plan import Plan
from autopar.verification import rank, reference
from autopar.verification.differences import StepDifference, Verification, worst_of
from autopar.verification.job import (
    OWN,
    Factory,
    Job,
    OptimizerFactory,
    batches,
    build,
    check_comparable,
    plan_in_dtype,
)
from autopar.verification.processes import start_method


def sgd_with_momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer of a verification: one with state, and no normalization that would hide an error."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def verify(
    make: Factory,
    *,
    plan: Plan | None = None,
    strategy: str | None = None,
    world_size: int | None = None,
    steps: int = 5,
    dtype: str = "float64",
    samples: tuple[int, ...] | None = None,
    make_optimizer: OptimizerFactory = sgd_with_momentum,
    clip_grad_norm: float | None = None,
    micro_batches: int = 1,
    tolerance: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Verification:
    """Compares `world_size` gloo ranks with one process over several optimizer steps.

    Args:
        make: returns model, example inputs and, where the model returns no loss, `loss_fn`.
        dtype: what parameters, buffers and inputs are converted to, "float64" or "float32"; "own" leaves all as it is
            made, and finds what only shows in those dtypes.
        samples: how many samples each rank's batches have; by default unequal ones, as equal ones hide errors of
            weighting. Batches are drawn from the rows of the example inputs.
        tolerance: by default what rounding explains in the coarsest dtype that a gradient flows through.
        settings: for `autopar.optimize`.

    Raises:
        SpecError: the model runs in its own dtypes, and not in `dtype`; or the plan is lossy, stale or local.
        PlanError: no plan is called `strategy`.
    """
    if dtype not in ("float64", "float32", OWN):
        raise SpecError(f"dtype is '{dtype}', expected 'float64', 'float32' or '{OWN}'")
    if plan is not None:
        check_comparable(plan)
    if strategy is not None:
        builder_named(strategy)
    n = world_size or (plan.cluster.world_size if plan is not None else 4)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder, held_port() as port:
        job = Job(
            make,
            folder,
            n,
            steps,
            dtype,
            samples or tuple(2 + r % 2 for r in range(n)),
            None if plan is None else plan_in_dtype(plan, dtype).model_dump_json(),
            strategy,
            make_optimizer,
            clip_grad_norm,
            micro_batches,
            tolerance,
            seed,
            port,
            settings,
        )
        context: Any = start_processes(  # type: ignore[no-untyped-call]
            _process, (job,), nprocs=n + 1, join=False, start_method=start_method()
        )
        try:
            while not context.join(timeout=1.0):
                pass
        except Exception as e:
            if why := refusal(make, dtype, seed):
                raise SpecError(f"the model does not run in {dtype} ({why}): verify it with dtype='{OWN}'") from e
            raise
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        found = [json.loads((Path(folder) / f"rank{r}.json").read_text()) for r in range(n)]
    rows = tuple(worst_of(StepDifference(**f["steps"][s]) for f in found) for s in range(steps))
    first = found[0]
    return Verification(n, dtype, first["computed_in"], first["tolerance"], rows, tuple(first["notes"]))


def refusal(make: Factory, dtype: str, seed: int = 0) -> str | None:
    """Why the model cannot be trained in a dtype that it was not built in, in the words of PyTorch; `None` where it
    can, and where it cannot be trained in its own either."""
    if dtype == OWN or (why := _failure(make, dtype, seed)) is None:
        return None
    return why if _failure(make, OWN, seed) is None else None


def _failure(make: Factory, dtype: str, seed: int) -> str | None:
    job = Job(make, "", 1, 1, dtype, (2,), None, None, sgd_with_momentum, None, 1, None, seed, 0)
    with torch.random.fork_rng(devices=[]):
        built = build(job)
        try:
            loss = loss_of(built.model, built.loss_fn, batches(job, built.example, 0, 0)[0])
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as e:
            return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    return None


def _process(index: int, job: Job) -> None:
    torch.set_num_threads(1)
    if index == job.world_size:
        reference.run(job)
    else:
        rank.run(index, job)
