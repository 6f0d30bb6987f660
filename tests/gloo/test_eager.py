"""Models that cannot be captured, on several ranks: equal to one process, whatever a rank has no gradient of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import ignored, unused
from tests.gloo.eager import everything
from tests.gloo.ranks import run_ranks, run_worlds


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, {1: (), 2: (), 3: ()})


def test_steps_are_those_of_one_process(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for n, ranks in worlds.items():
        for found in ranks:
            wrong = {k: off for k, off in found["steps"].items() if off > (0.05 if "bf16" in k else 1e-12)}
            assert found["steps"] and wrong == {}, (n, wrong)


def test_targets_that_later_batches_ignore_do_not_count() -> None:
    for found in run_ranks(3, ignored.everything):
        assert max(found) <= 1e-12


def test_a_drop_in_leaves_the_gradients_of_one_process(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(max(found["module"]) <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_a_checkpoint_of_one_plan_goes_on_under_another(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["resumed"] <= 1e-14 for ranks in worlds.values() for found in ranks)


def test_a_model_that_writes_to_its_parameters_is_refused_where_ranks_would_drift_apart(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    assert worlds[1][0]["refused"] == ""
    for found in (*worlds[2], *worlds[3]):
        assert "writes to its parameter 'table.weight'" in found["refused"]
        assert "drift apart" in found["refused"]


def test_where_a_drop_in_is_not_one_process_as_ddp_is_not_that_is_said_once(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for n, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            assert len(found["told"]) == (0 if n == 1 else 2 if rank == 0 else 1), found["told"]
            assert sum("'table.weight'" in words for words in found["told"]) == (n > 1)


def test_parameters_without_a_gradient_hold_nothing_up_and_are_not_sent_where_no_rank_has_one() -> None:
    ranks = run_ranks(2, unused.everything)
    for found in ranks:
        assert max(found["apart"]) < 1e-6
        # Layers that the example did not use stand between those that it did.
        assert found["order"] == ["last.weight", *(f"layers.{i}.weight" for i in (3, 2, 1, 0)), "first.weight"]
        logs = found["logs"]
        assert [log.count("sum") for log in logs] == [6, 4, 4, 6, 3, 3, 6]
        # From the second step on, all but the first layer's sum are begun before its gradient comes, whatever this rank
        # leaves out.
        assert [log.index("first") for log in logs[1:]] == [log.count("sum") - 1 for log in logs[1:]]


@pytest.mark.parametrize("n", [2, 3])
def test_groups_of_layers_that_no_rank_uses_do_nothing_under_any_plan(n: int) -> None:
    for found in run_ranks(n, unused.in_branches):
        assert {name: apart <= 1e-15 for name, (apart, _) in found.items()} == dict.fromkeys(found, True)
        for _, calls in found.values():
            # All batches of the sixth step ask for one layer; in the fourth and the last, some for four.
            assert calls[5] < min(calls[3], calls[6])


def test_a_function_that_gives_a_parameter_no_gradient_is_as_in_one_process() -> None:
    assert max(run_ranks(2, unused.given_none)) <= 1e-15


def test_a_backward_pass_that_all_losses_begin_within_their_own_counts_and_one_of_some_is_refused() -> None:
    assert all(apart <= 1e-15 and not said for apart, said in run_ranks(2, unused.checkpointed_in_the_loss, 2))
    told = [said for _, said in run_ranks(2, unused.checkpointed_in_the_loss, 1)]
    assert all(told) and "on some ranks and not on others" in told[0]


def test_what_owners_sum_for_the_clipping_norm_is_sent_by_all_ranks_though_none_has_a_gradient_of_it() -> None:
    assert max(run_ranks(2, unused.clipped)) <= 1e-12


def test_gradients_that_are_changed_between_passes_are_averaged_whichever_ranks_use_their_parameters() -> None:
    assert max(run_ranks(2, unused.changed_between)) <= 1e-12


def test_late_parameters_are_received_as_the_forward_pass_first_uses_them(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for found in (found["receives"] for n in (2, 3) for found in worlds[n]):
        assert {"last.weight", "last.bias"} <= set(found["during"]["first"])
        assert "first.weight" not in found["during"]["first"]
        assert "last.weight" not in found["during"]["last"]
        assert found["read"] <= 1e-12 and found["off"] <= 1e-12


def test_compiled_functions_and_torchscript_read_late_parameters_that_have_arrived(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    assert all(max(found["compiles"]) <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_rows_of_tables_that_were_looked_up_are_all_that_is_sent(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(max(found["rows"]) <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_ranks_may_communicate_in_the_forward_pass_and_hold_other_buffers_until_they_take_rank_0_s(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for found in (found["meets"] for ranks in worlds.values() for found in ranks):
        assert found["off"] <= 1e-12 and found["queue"] == 0 and found["cache"]


def test_one_of_two_models_may_be_frozen_while_the_other_trains(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["adversarial"] <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_a_local_update_without_a_gradient_of_the_ranks_own_is_said_once(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for n in (2, 3):
        for found in worlds[n]:
            (said,) = found["alone"]
            assert "has no gradient of 'cold." in said or "has no gradient of 'warm." in said


def test_a_rank_that_has_every_gradient_does_not_wait_to_hear_what_others_have() -> None:
    """All hear of it behind the next step, so that they agree on whether to ask beforehand from then on."""
    assert run_ranks(2, unused.waits) == [[0, 1, 1, 1], [0, 1, 2, 0]]
