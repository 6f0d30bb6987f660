"""The capture benchmark's two processes: a model goes through them, one that is unknown is said to be so."""

from __future__ import annotations

from benchmarks.capture.team import Team
from tests.tiers import thorough


@thorough
def test_a_team_tries_models_one_after_another() -> None:
    team = Team()
    try:
        assert team.attempt("no-such").failure.startswith("KeyError: \"no model or family 'no-such'\"")
        outcome = team.attempt("gpt2")
        assert (outcome.kind, outcome.said, len(outcome.runs)) == ("equal", "", 6)
        team._ranks[1].kill()
        assert team.attempt("bert").kind == "crashed"
    finally:
        team.stop()
