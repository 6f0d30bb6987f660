"""What a worker process does: runs cases, of which it is told in JSON, until it is told to end."""

from __future__ import annotations

import json
import logging
import os
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CollectiveError, TracingError, VerificationError
from autopar.runtime.job.process_group import Group, join
from autopar.runtime.job.servers import serve_here
from autopar.runtime.program import Program
from autopar.testing.cases import SERVERS
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.compare import EXACT, difference, digest, finite, judge
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.outcome import Outcome
from benchmarks.fuzz.plans import as_text
from benchmarks.fuzz.source import Built, build
from benchmarks.fuzz.training import Record, Weighting, eager, prepare, run, said

PATIENCE_S = 15.0
"""How long a rank waits for another one."""


def work(rank: int, world_size: int, port: int, connection: Connection, patience: float = 1.0) -> None:
    """The life of a worker. `patience`: how many times as long as usual it waits for other ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    group = _group(rank, world_size, port, patience * PATIENCE_S)
    connection.send_bytes(b"ready")
    while True:
        told = json.loads(connection.recv_bytes())
        if told is None:
            break
        case = Case.loads(told["case"]) if "case" in told else generate(told["name"])
        outcome = run_case(case, group)
        answer = outcome.as_dict()
        if outcome.is_finding or told.get("echo"):
            answer["case"] = case.dumps()
        connection.send_bytes(json.dumps(answer).encode())
    os._exit(0)


def _group(rank: int, world_size: int, port: int, timeout_s: float) -> Group:
    if world_size == 1:
        return Group(0, 1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * timeout_s))
    if rank == 0:
        serve_here(SERVERS)
    return join(timeout_s)


def run_case(case: Case, group: Group) -> Outcome:
    """Trains a case eagerly and with autopar, on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(case, group)


def _run(case: Case, group: Group) -> Outcome:
    if case.must_refuse:
        return _refused(case, group)
    try:
        built = build(case)
        expected = eager(built)
        usable = finite(expected)
        if sum(map(len, case.samples)) > 1:
            eager(built, "equal")  # every rank's batch must do for itself
    except Exception as e:  # whatever the case's own code raises
        return Outcome("unusable", _words(e))
    if not usable:
        return Outcome("unusable", "eager training leads to numbers that are not finite")
    if max(expected.losses, default=0.0) > 4 * (1 + abs(expected.losses[0])):  # where each rounding grows, too
        return Outcome("unusable", "eager training diverges")
    record, groups = Record(), ""
    try:
        with said(record):
            prepared = prepare(built, group)
            if case.plan_seed or case.groups:
                groups = as_text(prepared.plan.groups)
            found = run(prepared, group)
        found.warned += record.warned
        warned = "; ".join(dict.fromkeys(found.warned))
        is_local = case.world_size == 1 and len(case.samples[0]) == 1
        seen = judge(built, _of_all_ranks(case, found, expected), expected, buffers=is_local)
        bits = digest(found) if isinstance(prepared.program, Program) or group.world_size > 1 else ""
        if seen is None:
            return Outcome("equal", "", warned, groups, bits, drawn=tuple(found.drawn))
        if not is_local and _is_as_traced(built, found):  # with a plan of several ranks, nothing is proved first
            return Outcome("refused", f"TracingError: PyTorch's own tracing, too: {seen.where}", groups=groups)
        as_ddp = group.world_size > 1 and any(_is_as_ddp(built, found, w) for w in ("equal", "samples"))
        return Outcome("wrong", f"{seen.where} is off by {seen.size:.1e}", warned, groups, bits, as_ddp, seen.size)
    except TracingError as e:  # not autopar's fault, and it was found
        return Outcome("refused", _words(e), groups=groups)
    except VerificationError as e:
        return Outcome("disproved", _words(e), groups=groups)
    except CollectiveError as e:  # all ranks are alive
        return Outcome("crashed", _words(e), groups=groups)
    except AutoparError as e:
        return Outcome("refused", _words(e), groups=groups)
    except Exception as e:  # a crash is what is looked for
        return Outcome("crashed", f"{_words(e)} [{_place(e)}]", groups=groups)
    finally:
        torch._dynamo.reset()


def _of_all_ranks(case: Case, found: Record, expected: Record) -> Record:
    """The record with what is a rank's own as expected: losses, outputs and gradients of inputs of the drop-in."""
    if case.entry != "module" or case.world_size == 1:
        return found
    return replace(found, outputs=expected.outputs, inputs=expected.inputs, losses=expected.losses)


def _is_as_ddp(built: Built, found: Record, weighting: Weighting) -> bool:
    """Whether numbers are those of ranks that each train on their own batch, and average their gradients."""
    expected = eager(built, weighting)
    return judge(built, _of_all_ranks(built.case, found, expected), expected, False, weighting) is None


def _is_as_traced(built: Built, found: Record) -> bool:
    """Whether numbers are those of the model as PyTorch traces it, without autopar: a write through an expanded view is
    lost there. Users are refused by the proof of the first step."""
    if built.case.eager:
        return False
    try:
        traced = eager(built, traced=True)
    except Exception:  # whatever PyTorch raises of what it cannot trace
        return False
    return difference(_of_all_ranks(built.case, found, traced), traced, EXACT, False) is None


def _refused(case: Case, group: Group) -> Outcome:
    """Of a case that autopar must refuse, or warn of where ranks' batches differ in shape."""
    record = Record()
    try:
        built = build(case)
        with said(record):
            run(prepare(built, group), group)
        if not _ranks_matter(built):
            return Outcome("equal")
    except CollectiveError as e:
        return Outcome("crashed", _words(e))
    except AutoparError as e:
        return Outcome("refused", _words(e))
    except Exception as e:
        return Outcome("crashed", f"{_words(e)} [{_place(e)}]")
    finally:
        torch._dynamo.reset()
    warned = next((w for w in record.warned if "compute different things" in w), "")
    return Outcome("wrong", "ranks that differ were trained without a word", warned, as_ddp=True)


def _ranks_matter(built: Built) -> bool:
    """Whether what ranks do otherwise, by the global `RANK`, leads to other numbers: nothing may read it."""
    ranks = range(built.case.world_size)
    first, *others = (eager(replace(built, first={**built.first, "RANK": rank})) for rank in ranks)
    return any(difference(other, first, 0.0, True) is not None for other in others)


def _words(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"[:600]


def _place(e: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def answer_of(text: bytes) -> dict[str, Any]:
    """What a worker has said."""
    told: dict[str, Any] = json.loads(text)
    return told
