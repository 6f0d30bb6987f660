"""The demo's arithmetic: pairs, spreads, bytes and losses, from blocks of steps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.demo.outcome import Outcome
from benchmarks.demo.task import BATCH_SIZE, SEQUENCE_LENGTH, workload
from benchmarks.harness import Spread
from benchmarks.interleaved import Block
from benchmarks.peers import peer_named
from benchmarks.peers.entrants import Entrant
from benchmarks.peers.outcome import CaseOutcome, Entry
from benchmarks.zoo.named import any_workload

Sent = tuple[float, ...] | None


def _entry(name: str, losses: tuple[float, ...], *blocks: tuple[list[float], Sent]) -> Entry:
    """A system that took a step to warm up, then `blocks` of timed steps."""
    entrant = Entrant(name, peer_named(name), {}, [], losses=dict(enumerate(losses)))
    entrant.blocks = {i: Block(name, 0, tuple(times), (), sent) for i, (times, sent) in enumerate(blocks)}
    return Entry(name, "exact", entrant.measured())


def _case(ddp_losses: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0), sent: Sent = (10.0, 30.0)) -> CaseOutcome:
    """Three steps: a pair of blocks of two steps, and one of one step."""
    entries = (
        _entry("autopar", (4.0, 3.0, 2.0, 1.0), ([1.0, 3.0], sent), ([2.0], (40.0, 60.0) if sent else None)),
        _entry("ddp", ddp_losses, ([4.0, 4.0], sent), ([1.0], sent)),
    )
    return CaseOutcome("demo", "demo", "two hosts", True, "here", entries, {})


def _outcome(ddp_losses: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0), sent: Sent = (10.0, 30.0)) -> Outcome:
    return Outcome.of(_case(ddp_losses, sent))


def test_ratios_are_over_blocks_of_the_same_round() -> None:
    assert _outcome().ratio == Spread(median=1.25, lower=0.875, upper=1.625)
    assert _outcome().autopar.median_step_s == 2.0


def test_bytes_are_weighted_by_the_steps_of_a_block() -> None:
    outcome = _outcome()
    assert outcome.autopar.sent_bytes == ((10 * 2 + 40) / 3 + (30 * 2 + 60) / 3) / 2
    assert outcome.autopar.sent_bytes_most == (30 * 2 + 60) / 3
    assert outcome.ddp.sent_bytes == 20.0


def test_who_did_not_run_is_named_with_the_reason() -> None:
    whole = _case()
    alone = CaseOutcome("demo", "demo", "", True, "", whole.entries[:1], {"ddp": "failed: no memory"})
    with pytest.raises(ValueError, match="ddp did not run: failed: no memory"):
        Outcome.of(alone)


def test_shortfalls_name_what_is_missed() -> None:
    assert _outcome().shortfalls() == []
    off = _outcome(ddp_losses=(4.0, 3.0, 2.5, 1.0))
    assert off.loss_difference == pytest.approx(0.2)
    assert off.shortfalls() == ["losses differ by 2.0e-01 of DDP's, target 1e-03"]


@pytest.mark.parametrize("sent", [(10.0, 30.0), None])
def test_the_table_and_the_file_hold_the_figures(sent: Sent, tmp_path: Path) -> None:
    outcome = _outcome(sent=sent)
    text = io.StringIO()
    Console(width=100, file=text).print(outcome.table("two ranks"))
    assert "1.25x" in text.getvalue()
    assert ("not counted" in text.getvalue()) == (sent is None)
    outcome.save(tmp_path / "results.json", {"rate": "1 Gbit/s"})
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["rate"] == "1 Gbit/s"
    assert record["ratio"]["median"] == 1.25
    assert record["ddp"]["sent_bytes"] == (20.0 if sent else None)


def test_ranks_make_the_job_again_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "to kens.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    job = workload(path, seed=3)
    again = any_workload(job.name)
    assert again.name == job.name
    assert (again.batch(2, 1)["input_ids"] == job.batch(2, 1)["input_ids"]).all()
    assert job.batch(2, 1)["input_ids"].shape == (BATCH_SIZE, SEQUENCE_LENGTH)
    assert (workload(path, seed=4).batch(2, 1)["input_ids"] != job.batch(2, 1)["input_ids"]).any()
