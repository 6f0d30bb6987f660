"""The collector: takes trials into a journal, goes on where it stopped, and repeats what it has taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.lab import unavailable_reason
from benchmarks.trials.making.collect import Collector
from benchmarks.trials.making.journal import Journal
from benchmarks.trials.records import Dataset
from tests.tiers import thorough

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


@thorough
def test_trials_are_collected_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    for most in (5, 2):
        with Journal(path) as journal:
            assert Collector(journal, one_choice=True).run(5.0, ["small-bag"], ["2x100m", "4xt4-10g"], most) == most
    data = Dataset.load(path)
    assert len(data.trials) == 7 and len(data.graphs) == 1 and len(data.sessions) == 2
    assert {data.cluster_name(t) for t in data.trials} == {"2x100m", "4xt4-10g"}
    for trial in data.trials:
        assert trial.status == "ok", trial.error
        assert trial.order_hash == data.program(trial).order_hash
        assert len(trial.sent_bytes) == len({place.host.name for place in data.cluster(trial).ranks})
        assert (len(trial.peak_memory_bytes) > 0) == (trial.compute == "real")
    begun = {(data.cluster_name(t), t.compute): t.plan for t in reversed(data.trials)}
    assert set(begun.values()) == {"ddp"}, "each choice begins with the plan that others are compared with"
    first = [t for t in data.trials if not t.repeat]
    assert len({t.key for t in first}) == len(first), "a trial that was taken is not taken as a new one again"
