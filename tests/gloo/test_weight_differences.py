"""Weight differences on real ranks are what is written down, and what they cost is declared."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost_models.analytic import AnalyticCostModel
from autopar.errors import PlanError
from autopar.ops.context import Context
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies.lowering import lower_plan
from tests.gloo.ranks import run_worlds
from tests.gloo.weight_differences import CASES, everything
from tests.tiers import sizes
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

Worlds = dict[int, list[dict[str, Any]]]
NAMES = tuple(ParameterSlice(name=name) for name, _ in MLP)
LAST = 0.02023629505543019
"""The loss of step 40, on two ranks."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """By world size and rank."""
    folder = str(tmp_path_factory.mktemp("weight_differences"))
    return run_worlds(everything, dict.fromkeys(sizes(2, 3, also=(1, 4)), (folder,)))


@pytest.mark.parametrize("n", sizes(2, 3, also=(1, 4)))
@pytest.mark.parametrize("name", CASES)
def test_programs_do_what_the_algorithm_says(worlds: Worlds, name: str, n: int) -> None:
    of_ranks = [found["off"][name] for found in worlds[n]]
    assert max(off for off, _ in of_ranks) < 1e-10, of_ranks
    assert len({bits for _, bits in of_ranks}) == 1, "replicas differ, if only in their last bits"


def test_gradients_in_16_bits_are_taken_for_rounded(worlds: Worlds) -> None:
    """Each step is compared with the model run eagerly, as exactly as 16 bits are; differences get other codes."""
    offs, bits = zip(*(found["rounded"] for found in worlds[2]), strict=True)
    assert 0 < max(offs) < 1e-2 and len(set(bits)) == 1


def test_a_run_goes_on_from_what_it_has_saved(worlds: Worlds) -> None:
    """Bit for bit on as many ranks; on others, with the same that parameters lack."""
    sums = [{k: v for k, v in found["saved"].items() if k != "off"} for found in worlds[2]]
    assert all(found["saved"]["off"] == 0 for found in worlds[2]) and sums[0] == sums[1] and any(sums[0].values())
    for found in worlds[3]:
        assert found["loaded"] == pytest.approx(sums[0], rel=1e-9, abs=1e-12)


def test_it_learns(worlds: Worlds) -> None:
    losses = worlds[2][0]["losses"]
    assert losses[-1] < 0.1 * losses[0]
    assert losses[-1] == pytest.approx(LAST, rel=1e-6)


def test_models_in_16_bits_train(worlds: Worlds) -> None:
    for found in worlds[2]:
        assert found["narrow"]["apart"] == 0
        assert found["narrow"]["moved"] > 0 and found["narrow"]["fell"] > 0.5


def test_what_it_cannot_do_is_refused() -> None:
    group = SyncGroup(strategy="weight_differences", members=NAMES)
    with pytest.raises(PlanError, match="every=4"):
        lower_plan([group.model_copy(update={"every": 4})], training_graph(MLP), Context(4))
    with pytest.raises(PlanError, match="not elementwise"):
        lower_plan([group], training_graph(MLP), Context(4, elementwise_update=False))


def test_it_is_less_to_send_and_is_priced() -> None:
    """Its bytes, and the passes on the device, beside ZeRO stage 1."""
    graph, context = training_graph(MLP), Context(4)
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    names = ("partitioned_parameter_server", "weight_differences")
    groups = [SyncGroup(strategy=name, members=NAMES) for name in names]
    exact, mine = (pricer.estimate(lower_plan([group], graph, context)) for group in groups)
    assert 0.6 < mine.sent_bytes[0] / exact.sent_bytes[0] < 0.66
    assert mine.compute_s > exact.compute_s
