"""Drop-in modules that are frozen for a while, as a discriminator is for its generator's update."""

from __future__ import annotations

from tests.gloo.adversarial import against_one_process
from tests.gloo.ranks import run_ranks


def test_a_discriminator_may_be_frozen_whole_for_the_generator_s_update() -> None:
    for worst, captures, said in run_ranks(2, against_one_process):
        assert worst < 1e-12
        assert captures == 1
        assert "'0.weight' was trained when the plan was made, and is frozen now" in said
        assert "All parameters of a drop-in module may be frozen for a while" in said
