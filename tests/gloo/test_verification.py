"""`autopar.verify`: which faults it finds, and that it finds none where there is none."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import VerificationError
from autopar.verification.job import Factory
from tests.gloo import verified


@pytest.fixture(autouse=True)
def _faults_stay_in_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_buffers_of_every_kind_are_each_ranks_as_defined() -> None:
    found = autopar.verify(verified.statistics, strategy="zero1", world_size=2, steps=2, micro_batches=2)
    assert found.passed, found.steps
    said = "; ".join(found.notes)
    assert "reads and writes (mean) are rank 0's" in said
    assert "only writes (last, norms.0.num_batches_tracked, norms.0.running_mean and 6 more)" in said


@pytest.mark.parametrize(("make", "named"), [(verified.unshared, "mean"), (verified.miscounted, "seen")])
def test_a_fault_that_only_a_buffer_shows_is_found(make: Factory, named: str) -> None:
    found = autopar.verify(make, strategy="ddp", world_size=2, steps=1, check="never")
    (step,) = found.steps
    assert max(step.loss, step.gradient, step.parameter) <= found.tolerance
    assert not found.passed and step.worst == named
    with pytest.raises(VerificationError, match=rf"in buffers \(most in '{named}'\)"):
        found.raise_if_failed()


def test_the_models_own_dtype_shows_what_float64_hides() -> None:
    def largest(make: Factory, dtype: str) -> float:
        found = autopar.verify(make, strategy="ddp", world_size=2, steps=3, check="never", dtype=dtype)
        return max(s.largest for s in found.steps) / found.tolerance

    assert largest(verified.wrong_in_sixteen_bits, "float64") <= 1
    assert largest(verified.wrong_in_sixteen_bits, "own") > 1
    assert largest(verified.sixteen_bits, "own") <= 1
