"""The strategy that CONTRIBUTING.md shows keeps its promises; one that does not is found out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.errors import ConformanceError, PlanError
from autopar.strategies import STRATEGIES
from autopar.testing import Conformance, check_strategy
from tests.tiers import thorough

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
FORGETFUL = """
from autopar.strategies.base import Options, Strategy


class Forgetful(Strategy):
    name = "forgetful"
    summary = "sums on rank 0, which updates, and tells nobody"

    def options(self, context):
        return [Options()]

    def lower(self, group, options, emit):
        emit.update(emit.wait(emit.reduce(emit.pack(group), 0)), group)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported, here and by the ranks; what they register is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(STRATEGIES)
    yield tmp_path
    STRATEGIES.clear()
    STRATEGIES.update(before)
    for name in ("two_phase", "forgetful"):
        sys.modules.pop(name, None)


def test_the_example_keeps_its_promises(modules: Path) -> None:
    example = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert example is not None
    (modules / "two_phase.py").write_text(example[1])
    lines: list[str] = []
    found = check_strategy("two_phase:TwoPhase", worlds=(1, 2), progress=lines.append)
    found.raise_if_broken()
    assert {f.kind for f in found.findings} >= {"equality", "order", "parity"}
    assert "two_phase on 2 ranks: dense" in lines
    assert "keeps its promises" in str(found)


@thorough
def test_one_that_does_not_is_found_out(modules: Path) -> None:
    (modules / "forgetful.py").write_text(FORGETFUL)
    found = check_strategy("forgetful:Forgetful", worlds=(2,))
    assert {f.kind for f in found.broken} == {"equality"}
    assert all("differs by" in f.said for f in found.broken)
    with pytest.raises(ConformanceError, match="forgetful: does not keep its promises"):
        found.raise_if_broken()


def test_what_is_no_strategy_is_said_at_once(modules: Path) -> None:
    with pytest.raises(PlanError, match="did you mean 'all_reduce'"):
        check_strategy("all_reduced")
    with pytest.raises(PlanError, match=r"Expected package\.module:Class"):
        check_strategy("autopar.strategies:AllReduced")
    with pytest.raises(PlanError, match="is no strategy"):
        check_strategy("autopar.strategies:Context")


def test_nothing_looked_at_is_not_a_promise_kept() -> None:
    with pytest.raises(ConformanceError, match="applies to nothing"):
        Conformance("none", ()).raise_if_broken()
