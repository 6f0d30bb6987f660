"""What a compressor updates with and what it keeps add up to the gradients, or the first step says so."""

from __future__ import annotations

from tests.extension import feedback
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes


def test_the_first_step_shows_compressors_that_lose_something_or_make_something_up() -> None:
    found = run_worlds(feedback.everything, dict.fromkeys(sizes(2, also=(1, 3)), ()))
    for n, of_ranks in found.items():
        for rank, said in enumerate(of_ranks):
            assert said["passes"] == [], (n, rank)
    for said in found[2]:
        assert len(said["refusals"]) == 2
        for step, text in enumerate(said["refusals"]):
            assert text.startswith(f"step {step}: what is updated with, and the change of what ranks keep"), text
            assert all(f"'{name}'" in text for name in feedback.WRONG), text
    assert len(found[2][0]["unseen"]) == 2
    for group, unseen in enumerate(found[2][0]["unseen"]):
        assert f"group {group}, 'unkept_signs': the ranks' own gradients are compared" in unseen
        assert "keeps no residual" in unseen
    assert found[2][1]["unseen"] == []
