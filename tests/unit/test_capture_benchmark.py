"""The capture benchmark finds what is wrong: a differing step, an error, a dead worker; and lists it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.capture import outcomes, report
from benchmarks.examine import (
    LOSS_TOLERANCE,
    UPDATE_TOLERANCE,
    Outcome,
    attempt,
    loss_error,
    reason,
    update_error,
)
from benchmarks.zoo import Entry, find
from benchmarks.zoo.huggingface import ENTRIES
from benchmarks.zoo.plain import ENTRIES as PLAIN


def _update(before: torch.Tensor, wrong: torch.Tensor, right: torch.Tensor) -> float:
    return update_error(before, before - wrong, before - right)


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_a_wrong_update_is_seen_however_small_the_gradient(size: float) -> None:
    g = torch.Generator().manual_seed(0)
    before, gradient = torch.randn(100, generator=g), size * torch.randn(100, generator=g)
    assert _update(before, gradient, gradient) == 0
    assert _update(before, torch.zeros(100), gradient) == pytest.approx(1, abs=0.01)
    assert _update(before, gradient / 2, gradient) == pytest.approx(0.5, abs=0.01)
    assert _update(before, 1.01 * gradient, gradient) > UPDATE_TOLERANCE
    one_element_off = gradient.clone()
    one_element_off[3] += size / 10
    assert _update(before, one_element_off, gradient) > UPDATE_TOLERANCE


def test_rounding_is_no_error() -> None:
    before = torch.randn(100, generator=torch.Generator().manual_seed(0))
    nothing, noise = torch.zeros(100), torch.full((100,), 2e-9)
    assert _update(before, noise, nothing) == 0
    assert loss_error(4.850001, 4.85) < LOSS_TOLERANCE < loss_error(4.8502, 4.85)


def test_not_a_number_is_not_equal() -> None:
    assert not update_error(torch.ones(2), torch.full((2,), torch.nan), torch.ones(2)) <= UPDATE_TOLERANCE
    assert not loss_error(float("nan"), 1.0) <= LOSS_TOLERANCE


class Broken(nn.Module):
    """Branches on a value."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if y.sum() > 0:
            y = -y
        return y


def test_a_model_that_cannot_be_captured_runs_eagerly_with_the_line_that_breaks_it() -> None:
    like = find(PLAIN, "tied-mlp")
    outcome = attempt(Entry("broken", "plain", Broken, like.batch, like.loss_fn))
    assert outcome.name == "broken"
    assert outcome.failure == "" and outcome.planned
    assert outcome.eager.startswith("CaptureError: the model cannot be captured as one graph")
    assert "test_capture_benchmark.py:" in outcome.eager
    assert "if y.sum() > 0" in outcome.eager
    assert "/" not in outcome.eager.partition("(")[2].partition(":")[0]


@pytest.mark.parametrize("name", ["tied-mlp", "lstm", "segformer", "git"])
def test_a_model_that_can_be_captured_steps_as_eager(name: str) -> None:
    """SegFormer records its hidden states; GIT has modules that could record, outside of any that does."""
    outcome = attempt(find((*PLAIN, *ENTRIES), name))
    assert outcome.failure == outcome.eager == ""
    assert outcome.nodes > 10
    assert outcome.optimize_s > 0
    assert outcome.planned


def test_reason_is_one_line() -> None:
    assert reason(ValueError("too long\nby far")) == "ValueError: too long"
    assert reason(ValueError("")) == "ValueError: no message"


def test_a_worker_that_dies_is_the_failure_of_its_architecture_alone() -> None:
    unknown = [Entry(name, "plain", Broken, lambda n, seed: {}) for name in ("no-such", "nor-such")]
    found = list(outcomes(unknown, jobs=1))
    assert [(o.name, o.failure) for o in found] == [
        (e.name, f"exit code 1: KeyError: \"no model '{e.name}' in the zoo\"") for e in unknown
    ]


def test_the_report_lists_failures_last_and_counts_the_rest() -> None:
    found = [
        Outcome("bert", "encoder", failure="ValueError: no"),
        Outcome("detr", "detection", 10, 20, 1.0, "all_reduce: 1 ms", 0.0, 0.0, eager="CaptureError: a branch"),
        Outcome("gpt2", "decoder", 10, 20, 1.0, "all_reduce: 1 ms", 1e-7, 2e-6, unreached=("a",)),
    ]
    result = report(found, required=2)
    assert [row[0] for row in result.rows] == ["gpt2", "detr", "bert"]
    assert result.rows[0][-1] == "equal: loss 1e-07, update 2e-06; 1 parameters get no gradient"
    assert result.rows[1][-1] == "runs eagerly, equal: loss 0e+00, update 0e+00: CaptureError: a branch"
    assert result.rows[2][-1] == "FAILED: ValueError: no"
    assert result.notes[0] == (
        "1 of 3 architectures are captured and equal: 1 decoder. 1 run eagerly, and are equal: detr."
    )
    assert [t.met for t in result.targets] == [False, False]
    assert report(found[1:], required=1).short == []
