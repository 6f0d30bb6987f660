"""The demo's arithmetic: pairs, spreads, bytes and losses, from blocks of steps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.demo.compare import Block
from benchmarks.demo.outcome import Outcome


def _block(system: str, first: int, step_s: list[float], losses: list[float], sent: tuple[float, ...] | None) -> Block:
    return Block(system=system, first=first, step_s=tuple(step_s), losses=tuple(losses), sent_bytes=sent)


def _outcome(
    ddp_losses: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0), sent: tuple[float, ...] | None = (10.0, 30.0)
) -> Outcome:
    """One warm-up step, then three: a pair of blocks of two steps, and one of one step, the second led by DDP."""
    a, d = "autopar", "ddp"
    warm_up = [_block(a, 0, [9.0], [4.0], sent), _block(d, 0, [9.0], [ddp_losses[0]], sent)]
    timed = [
        _block(a, 1, [1.0, 3.0], [3.0, 2.0], sent),
        _block(d, 1, [4.0, 4.0], list(ddp_losses[1:3]), sent),
        _block(d, 3, [1.0], [ddp_losses[3]], sent),
        _block(a, 3, [2.0], [1.0], (40.0, 60.0) if sent else None),
    ]
    return Outcome.of(warm_up, timed)


def test_ratios_are_over_blocks_of_the_same_steps() -> None:
    outcome = _outcome()
    assert outcome.ratios == (4.0 / 2.0, 1.0 / 2.0)
    assert outcome.ratio == 1.25
    assert outcome.ratio_quartiles == (0.875, 1.625)


def test_step_time_leaves_the_warm_up_out_and_losses_do_not() -> None:
    outcome = _outcome()
    assert outcome.autopar.step_s == 2.0
    assert outcome.ddp.step_s == 4.0
    assert outcome.autopar.losses == (4.0, 3.0, 2.0, 1.0)


def test_bytes_are_weighted_by_the_steps_of_a_block() -> None:
    outcome = _outcome()
    assert outcome.autopar.sent_bytes == ((10 * 2 + 40) / 3 + (30 * 2 + 60) / 3) / 2
    assert outcome.autopar.sent_bytes_most == (30 * 2 + 60) / 3
    assert outcome.ddp.sent_bytes == 20.0


def test_a_block_without_its_partner_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        Outcome.of([], [_block("autopar", 0, [1.0], [1.0], None)])


def test_shortfalls_name_what_is_missed() -> None:
    assert _outcome().shortfalls() == []
    off = _outcome(ddp_losses=(4.0, 3.0, 2.5, 1.0))
    assert off.loss_difference == pytest.approx(0.2)
    assert off.shortfalls() == ["losses differ by 2.0e-01 of DDP's, target 1e-03"]


@pytest.mark.parametrize("sent", [(10.0, 30.0), None])
def test_the_table_and_the_file_hold_the_figures(sent: tuple[float, ...] | None, tmp_path: Path) -> None:
    outcome = _outcome(sent=sent)
    text = io.StringIO()
    Console(width=100, file=text).print(outcome.table("two ranks"))
    assert "1.25x" in text.getvalue()
    assert ("not counted" in text.getvalue()) == (sent is None)
    outcome.save(tmp_path / "results.json", {"rate": "1 Gbit/s"})
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["rate"] == "1 Gbit/s"
    assert record["ratios"] == [2.0, 0.5]
    assert record["ddp"]["sent_bytes"] == (20.0 if sent else None)
