"""Constraints: memory that is kept free, parameters that are pinned to a strategy, strategies that are forbidden."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import autopar
from autopar.cli.app import app
from autopar.cli.constraints import constraint_options
from autopar.cli.model_argument import load_model
from autopar.cost_models import AnalyticCostModel
from autopar.errors import AutoparWarning, InfeasibleError, PlanError, SpecError
from autopar.planning import Planner
from autopar.runtime.compiled import Settings
from autopar.search import Budget, Constraints, Problem, build_plan, price, search, search_result
from autopar.search.builders import BUILDERS, builder_named
from autopar.search.moves import Neighbourhood
from autopar.search.recorded import constraints_of
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan, partition_problems
from autopar.spec.topology import topology_of
from autopar.strategies import STRATEGIES, Context
from autopar.training import Training
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

GRAPH = training_graph(MLP)
"""24 MiB of parameters."""
FOUR = cpu_hosts(4)


def described(size: str) -> str:
    devices = f"{{kind: cpu, memory: {size}}}"
    return f"{{hosts: [{{name: a, count: 4, devices: {devices}}}], network: {{bandwidth: 1 Gbit/s}}}}"


def memory(size: str) -> ClusterSpec:
    return ClusterSpec.loads(described(size))


def problem(pin: Mapping[str, str], forbid: Sequence[str] = ()) -> Problem:
    made = Context(4).on(FOUR)
    asked = Constraints.of(pin=pin, forbid=forbid)
    return Problem(GRAPH, FOUR, topology_of(FOUR), made, AnalyticCostModel(), constraints=asked)


def searched(cluster: ClusterSpec = FOUR, evaluations: int = 12, **asked: object) -> Plan:
    budget = Budget(evaluations=evaluations)
    kept = Constraints.of(**asked)  # type: ignore[arg-type]
    return search(GRAPH, cluster, Context(cluster.world_size), budget=budget, constraints=kept)


def strategies(plan: Plan, name: str) -> set[str]:
    return {g.strategy for g in plan.groups if any(m.name == name for m in g.members)}


def test_a_tenth_of_the_memory_is_kept_free() -> None:
    """DDP takes 115 to 121 MiB; of 125 MiB a tenth is not to be had."""
    loose, kept = (searched(memory("125 MiB"), memory_reserve=r) for r in (0.0, 0.1))
    assert loose.memory is not None and kept.memory is not None and kept.prediction is not None
    assert kept.memory.peak_bytes == kept.prediction.peak_memory_bytes <= 0.9 * (125 << 20)
    assert (kept.memory.short_bytes, loose.memory.short_bytes) == (0, 0)
    assert "12.5 MiB of it are kept free" in " ".join(kept.explain().split())
    notes = {a.name: a.note for a in kept.alternatives}
    assert "less memory free than is to be kept free" in notes["ddp"]
    assert not {a.name: a.note for a in loose.alternatives}["ddp"]


def test_a_plan_that_fits_is_returned_where_none_keeps_as_much_free() -> None:
    least = searched(memory("1 GiB"), memory_reserve=0.999).memory
    assert least is not None and least.short_bytes > 0 == least.over_bytes
    alternatives = searched(memory("1 GiB")).alternatives
    assert least.peak_bytes <= min(a.prediction.peak_memory_bytes for a in alternatives)


def test_memory_is_that_of_the_device_with_the_least_to_spare() -> None:
    hosts = "{name: a, devices: {kind: cpu, memory: 2 GiB}}, {name: b, devices: {kind: cpu, memory: 300 MiB}}"
    cluster = ClusterSpec.loads(f"{{hosts: [{hosts}], network: {{bandwidth: 1 Gbit/s}}}}")
    use = build_plan("PS", GRAPH, cluster, Context(2)).memory  # whose owner is the other rank
    assert use is not None
    assert (use.rank, use.device_bytes, use.reserve_bytes) == (1, 300 << 20, 30 << 20)


def test_a_plan_that_is_given_takes_no_pins() -> None:
    plan = searched(evaluations=1)
    with pytest.raises(SpecError, match=r"pin is .*, and plan is given"):
        autopar.plan(nn.Linear(2, 1), FOUR, plan=plan, pin={"*": "all_reduce"})


def test_fewer_samples_are_advised_only_where_they_help() -> None:
    """200 MiB of activations: the leanest plan takes about 230 MiB, with half of the samples 130."""
    graph = training_graph(MLP, live_bytes=200 << 20)
    with pytest.raises(InfeasibleError, match=r"fits: 4 samples on each rank in place of 8 \(about 1\d\d MiB\); or "):
        search(graph, memory("200 MiB"), Context(4), budget=Budget(evaluations=1))
    with pytest.raises(InfeasibleError) as refused:
        search(graph, memory("20 MiB"), Context(4), budget=Budget(evaluations=1))
    assert "samples on each rank" not in str(refused.value)


@pytest.mark.parametrize("name", [n for n in BUILDERS if n not in ("hierarchical", "servers")])
def test_every_seed_goes_by_the_pins(name: str) -> None:
    pinned = problem({"*.weight": "sharded_parameters", "2.*": "parameter_server(owner=2)"})
    built = builder_named(name)(GRAPH.parameters, pinned.context, FOUR)
    groups = pinned.rules.applied(built)
    assert pinned.rules.admit(groups)
    assert not partition_problems(groups, GRAPH.model.parameters)
    used = {m.name: (g.strategy, g.options) for g in groups for m in g.members}
    assert used["1.weight"][0] == "sharded_parameters"
    assert used["2.weight"] == used["2.bias"] == ("parameter_server", {"owner": 2})
    assert pinned.rules.applied(groups) == groups


def test_the_search_never_unpins() -> None:
    plan = searched(pin={"0.*": "parameter_server", "5.weight": "partitioned_parameter_server"}, evaluations=60)
    assert strategies(plan, "0.weight") == strategies(plan, "0.bias") == {"parameter_server"}
    assert strategies(plan, "5.weight") == {"partitioned_parameter_server"}
    assert any("pinned by 0.*=parameter_server" in g.reason for g in plan.groups)
    assert {a.name for a in plan.alternatives} >= {"ddp", "zero1 (pinned)", "PS (pinned)"}


def test_what_is_called_ddp_is_ddp_as_it_is_without_pins() -> None:
    pin = {"*": "parameter_server(owner=0)"}
    plan, ddp = searched(pin=pin), build_plan("ddp", GRAPH, FOUR, Context(4))
    pinned = build_plan("ddp", GRAPH, FOUR, Context(4), constraints=Constraints.of(pin=pin))
    assert pinned.name == "ddp (pinned)"
    others = {a.name: a for a in plan.alternatives}
    assert others["ddp"].prediction == ddp.prediction != pinned.prediction == others["ddp (pinned)"].prediction
    assert "does not keep to what was pinned" in others["ddp"].note and not others["ddp (pinned)"].note
    assert "Predicted slower than ddp, which takes 0." in " ".join(plan.explain().split())
    told: list[str] = []
    kept = Constraints.of(pin=pin)
    search(
        GRAPH, FOUR, Context(4), budget=Budget(evaluations=1), constraints=kept, progress=lambda *a: told.append(a[0])
    )
    assert all(one.endswith(" of ddp's step") and not one.endswith("0.00 of ddp's step") for one in told)
    assert all(c.name != "ddp" for c in search_result(GRAPH, FOUR, Context(4), constraints=kept).candidates)


def test_a_plan_records_what_was_pinned_and_forbidden() -> None:
    plan = searched(pin={"0.*": "parameter_server(owner=1)"}, forbid=["sharded_parameters"])
    kept = constraints_of(Plan.loads(plan.model_dump_json()))
    assert [str(pin) for pin in kept.pins] == ["0.*=parameter_server(owner=1)"]
    assert kept.forbidden == {"sharded_parameters"} and kept.memory_reserve == pytest.approx(0.1)
    bare = plan.model_copy(update={"pins": (), "forbidden": ()})
    assert (bare.digest, bare.basis) == (plan.digest, plan.basis)
    assert not {"pins", "forbidden", "lessons"} & json.loads(bare.model_dump_json()).keys(), "as older files are"
    again = price(plan, GRAPH, FOUR, Context(4))
    assert (again.pins, again.forbidden) == (plan.pins, plan.forbidden)
    unpinned = plan.model_copy(update={"groups": build_plan("ddp", GRAPH, FOUR, Context(4)).groups})
    assert price(unpinned, GRAPH, FOUR, Context(4)).pins == ()


def test_options_that_a_pin_leaves_out_are_the_searchs() -> None:
    rules = problem({"0.weight": "parameter_server", "1.weight": "parameter_server(owner=0)"}).rules
    assert rules.allow("parameter_server", {"owner": 3}, ["0.weight"])
    assert rules.allow("parameter_server", {}, ["1.weight"])  # whose default is 0
    assert not rules.allow("parameter_server", {"owner": 3}, ["1.weight"])


def test_moves_offer_nothing_that_is_forbidden() -> None:
    near = Neighbourhood(problem({"0.weight": "all_reduce"}, ["parameter_server"]))
    assert "parameter_server" not in near.choices
    groups, draw = builder_named("ddp")(GRAPH.parameters, near.problem.context, FOUR), random.Random(0)
    for _ in range(50):
        found = near.switch_all(groups, draw)
        assert found is None or near.problem.rules.admit(found)


def test_forbidden_strategies_are_in_no_plan() -> None:
    plan = searched(forbid=["all_reduce", "sufficient_factors"])
    assert not {g.strategy for g in plan.groups} & {"all_reduce", "sufficient_factors"}
    assert "ddp" not in {a.name for a in plan.alternatives}
    with pytest.raises(InfeasibleError, match="'ddp' uses all_reduce, which is forbidden"):
        build_plan("ddp", GRAPH, FOUR, Context(4), constraints=Constraints.of(forbid=["all_reduce"]))


def test_where_all_seeds_are_forbidden_what_is_left_is_planned() -> None:
    left = "parameter_server"
    plan = searched(forbid=[s for s in STRATEGIES if s != left], evaluations=3)
    assert {g.strategy for g in plan.groups} == {left}
    with pytest.raises(
        InfeasibleError, match=r"no strategy is left for parameter '0.weight'\. Forbidden: all_reduce, "
    ):
        searched(forbid=list(STRATEGIES))


def test_a_plan_by_name_takes_pins() -> None:
    asked = Constraints.of(pin={"0.weight": "parameter_server"})
    late = build_plan("ddp+delay=1", GRAPH, FOUR, Context(4), fidelity="stale", constraints=asked)
    assert {(g.delay, len(late.groups) > 1) for g in late.groups} == {(1, True)}
    plan = build_plan("ddp", GRAPH, FOUR, Context(4), constraints=asked)
    assert strategies(plan, "0.weight") == {"parameter_server"}
    assert strategies(plan, "1.weight") == {"all_reduce"}


def test_with_one_rank_there_is_nothing_to_pin() -> None:
    one = cpu_hosts(1)
    plan = searched(one, pin={"*": "class_sharded_head"}, forbid=["all_reduce"])
    assert plan.cluster.world_size == 1


@pytest.mark.parametrize(
    "pin, said",
    [
        ({"0.weigth": "all_reduce"}, "pin '0.weigth=all_reduce': no parameter of Synthetic .* did you mean '0.weight'"),
        ({"0": "all_reduce"}, r"did you mean '0\.\*'\?"),
        ({"0.weight": "al_reduce"}, "pin '0.weight': unknown strategy 'al_reduce'; did you mean 'all_reduce'"),
        ({"*": "sparse_rows"}, "pin '.*': '0.weight' cannot use sparse_rows: "),
        ({"*": "parameter_server(owner=7)"}, "owner is rank 7, there are 4 ranks"),
        ({"*": "parameter_server(ovner=1)"}, "no option 'ovner'; did you mean 'owner'"),
        ({"*": "parameter_server(owner)"}, "option 'owner' has no value"),
        ({"*": "all_reduce(wire=bfloat16)"}, "is 'rounded', but only 'exact' is allowed"),
    ],
)
def test_pins_that_cannot_be_used_are_refused_before_the_search(pin: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        problem(pin).rules.admit(())


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"forbid": ["all_reduc"]}, "forbid: unknown strategy 'all_reduc'; did you mean 'all_reduce'"),
        ({"forbid": ["all_reduce"], "pin": {"*": "all_reduce"}}, "all_reduce is forbidden; leave one of the two out"),
        ({"memory_reserve": 1.0}, "memory_reserve is 1.0, expected a part"),
        ({"memory_reserve": -0.1}, "memory_reserve is -0.1"),
    ],
)
def test_what_cannot_be_asked_is_said(asked: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Constraints.of(**asked)  # type: ignore[arg-type]


MODEL_FILE = """\
import torch
from torch import nn


def wide():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, (torch.ones(8, 256), torch.zeros(8, dtype=torch.long)), nn.functional.cross_entropy
"""


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "constrained_model.py"
    path.write_text(MODEL_FILE)
    return f"{path}:wide"


def cluster_file(tmp_path: Path, size: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(described(size))
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


def test_a_plan_by_name_that_does_not_fit_is_exit_code_3(model_file: str, tmp_path: Path) -> None:
    """1 MiB of parameters: replicas with AdamW's state take 4 MiB and more."""
    done = run(model_file, "--cluster", cluster_file(tmp_path, "4 MiB"), "--strategy", "ddp")
    assert done.exit_code == 3, done.output
    said = done.stderr
    assert "plan 'ddp' does not fit: it needs" in said and "MiB too much" in said
    assert "optimizer state 2.09 MiB" in said and "gradients" in said
    assert "With this it fits: the strategy '" in said and "; or devices with" in said


def test_the_same_plan_is_run_with_a_warning() -> None:
    """As DDP would, `optimize` tries it."""
    model = nn.Linear(1024, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = Settings(nn.functional.mse_loss)
    training = Training(model, (torch.ones(4, 1024), torch.ones(4, 256)), settings, optimizer, "step")
    training.settle()
    roomy = Planner("ddp", may_not_fit=True).plan(training, memory("1 GiB")).memory
    assert roomy is not None
    tight = f"{1.05 * roomy.peak_bytes / 2**20:.2f} MiB"
    for size, said in (("3 MiB", "more than there is"), (tight, r"memory_reserve=0\.04\d .* asks for no more")):
        with pytest.warns(AutoparWarning, match=said):
            plan = Planner("ddp", may_not_fit=True).plan(training, memory(size))
        assert (plan.name, plan.recompute) == ("ddp", "none")
    with pytest.raises(InfeasibleError, match="does not fit"):
        Planner("ddp").plan(training, memory("3 MiB"))


def test_the_command_takes_constraints_and_precision(model_file: str, tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    done = run(
        *(model_file, "--cluster", "local:4", "--time-budget", "0.1", "-o", out, "--memory-reserve", "25%"),
        *("--pin", "0.*=parameter_server(owner=1)", "--forbid", "hierarchical_all_reduce", "--dtype", "bfloat16"),
    )
    assert done.exit_code == 0, done.output
    plan = Plan.load(out)
    assert strategies(plan, "0.weight") == {"parameter_server"}
    assert {p.dtype for p in plan.model.parameters} == {"bfloat16"}
    assert plan.memory is not None and plan.memory.reserve_bytes == plan.memory.device_bytes // 4
    assert run(model_file, "--cluster", "local:2", "--memory-reserve", "10").exit_code == 2
    assert run(model_file, "--cluster", "local:2", "--pin", "0.weight").exit_code == 2
    forbidden = run(model_file, "--cluster", "local:2", "--strategy", "ddp", "--forbid", "all_reduce")
    assert forbidden.exit_code == 3, forbidden.output
    assert run(model_file, "--plan", out, "--forbid", "all_reduce").exit_code == 2


@pytest.mark.parametrize(
    ("said", "pattern", "strategy"),
    [
        ("d.q=r=all_reduce", "d.q=r", "all_reduce"),
        ("d.q=r=parameter_server(owner=0)", "d.q=r", "parameter_server(owner=0)"),
        ("*=all_reduce(wire=bfloat16", "*", "all_reduce(wire=bfloat16"),
    ],
)
def test_names_of_pinned_parameters_may_hold_an_equals_sign(said: str, pattern: str, strategy: str) -> None:
    command = click.Command("any", params=list(constraint_options(lambda: None).__click_params__))  # type: ignore[attr-defined]
    assert command.make_context("any", ["--pin", said]).params["pin"] == {pattern: strategy}


def test_a_model_in_16_bits_takes_half(model_file: str) -> None:
    made = load_model(model_file, weights=False, dtype="bfloat16")
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert [t.dtype for t in made.example_inputs] == [torch.bfloat16, torch.int64]
    assert torch.get_default_dtype() == torch.float32


def test_autocast_is_in_the_graph_and_in_the_price() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).to("meta")
    inputs = (torch.ones(64, 2048), torch.ones(64, 2048))
    cluster = ClusterSpec.loads("hosts: [{name: a, devices: 1 x A100-80GB}]")

    def compute_s(autocast: bool) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            plan = autopar.plan(model, cluster, example_inputs=inputs, loss_fn=nn.functional.mse_loss, strategy="ddp")
        assert plan.prediction is not None and {p.dtype for p in plan.model.parameters} == {"float32"}
        return plan.prediction.compute_s

    assert compute_s(True) != compute_s(False)
