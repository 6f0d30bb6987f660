"""The data set's records: what is written is read again, plans come back as they were, and the card counts them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from autopar.cost_models import ADAMW
from autopar.ir.tables import GraphTables
from autopar.lab.load import Load
from autopar.lab.trial import Comparison, TrialResult, drift, relative_spread
from autopar.spec.plan import ParameterSlice, SyncGroup, partition_problems
from benchmarks.suite.clusters import ClusterCase
from benchmarks.trials.card import card, folds, noise
from benchmarks.trials.groups import decode, encode
from benchmarks.trials.making.cells import Cell
from benchmarks.trials.making.clusters import clusters, renamed
from benchmarks.trials.making.journal import Journal, digest, pack
from benchmarks.trials.records import DATA, Cluster, Dataset, Graph, Session, Trial, read
from benchmarks.zoo.captured import Captured
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

LAYERS = tuple((name, tuple(extent // 2 for extent in shape)) for name, shape in MLP)
GRAPH = training_graph(LAYERS, rows=("0.weight",))
CASE = ClusterCase("4x1g", "Four hosts.", cpu_hosts)
CELL = Cell(Captured("mlp", GRAPH, ADAMW, sparse_update=False), CASE, "virtual")
NAMES = [p.name for p in GRAPH.parameters]


def _graph() -> Graph:
    tables = GraphTables.of(GRAPH)
    name = digest(tables.model_dump_json())
    return Graph(workload="mlp", about="An MLP.", digest=name, optimizer="AdamW", state_tensors=2, tables=tables)


def _cluster() -> Cluster:
    mark = CASE.cluster.fingerprint
    return Cluster(cluster="4x1g", about="Four hosts.", digest=mark.digest, summary=mark.summary, spec=mark.spec)


def _trial(index: int, step_us: tuple[int, ...] = (1000, 1100, 1200), **fields: object) -> Trial:
    drawn = CELL.draw(0, index)
    return Trial.model_validate(
        {
            "key": f"k{index}",
            "session": 0,
            "graph": _graph().digest,
            "cluster": _cluster().digest,
            "compute": "virtual",
            "dilation": drawn.dilation,
            "plan": drawn.origin,
            "groups": encode(drawn.groups, NAMES),
            "clip_grad_norm": drawn.clip,
            "status": "ok",
            "step_us": step_us,
            **fields,
        }
    )


def _write(path: Path, *trials: Trial) -> None:
    session = Session(
        session=0, date="2026-11-21", processor="CPU", cores=2, memory_gib=23.5, versions={"torch": "2.13"}
    )
    records: list[Session | Graph | Cluster | Trial] = [session, _graph(), _cluster(), *trials]
    with Journal(path) as journal:
        for record in records:
            journal.write(record)


def test_the_tables_of_a_graph_come_back_equal() -> None:
    assert GraphTables.model_validate_json(GraphTables.of(GRAPH).model_dump_json()).graph() == GRAPH


def test_groups_are_encoded_in_runs_and_slices() -> None:
    groups = (
        SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=NAMES[i]) for i in (5, 4, 3, 7, 8))),
        SyncGroup(
            strategy="parameter_server",
            members=(ParameterSlice(name=NAMES[0], dim=0, start=0, stop=100), ParameterSlice(name=NAMES[1])),
            options={"owner": 2},
        ),
    )
    encoded = encode(groups, NAMES)
    assert encoded == [["all_reduce", "5-3 7-8"], ["parameter_server", "0:0:0:100 1", {"owner": 2}]]
    assert decode(json.loads(json.dumps(encoded)), NAMES) == groups


def test_plans_that_are_drawn_are_valid_various_and_always_the_same() -> None:
    drawn = [CELL.draw(0, i) for i in range(60)]
    assert drawn == [CELL.draw(0, i) for i in range(60)]
    assert drawn[:20] != [CELL.draw(1, i) for i in range(20)]
    for one in drawn:
        assert not partition_problems(one.groups, GRAPH.model.parameters)
        assert decode(json.loads(json.dumps(encode(one.groups, NAMES))), NAMES) == one.groups
    groups = [g for one in drawn for g in one.groups]
    assert {g.strategy for g in groups} >= {"all_reduce", "parameter_server", "partitioned_parameter_server"}
    assert any(not m.whole for g in groups for m in g.members)
    assert {g.options.get("wire") for g in groups} >= {None, "bfloat16", "float16"}
    assert any("shares" in g.options for g in groups)
    assert len({one.dilation for one in drawn}) > 1
    assert any(one.clip for one in drawn) and not all(one.clip for one in drawn)


def test_what_is_written_is_read_again_and_can_be_lowered(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    trials = [_trial(i) for i in range(8)]
    _write(path, *trials)
    found = Dataset.load(path)
    assert found.trials == trials
    assert found.graphs == {_graph().digest: _graph()} and found.clusters == {_cluster().digest: _cluster()}
    for i, trial in enumerate(found.trials):
        assert found.groups(trial) == CELL.draw(0, i).groups
        assert found.program(trial).context.world_size == 4
        assert found.cluster(trial).fingerprint.digest == trial.cluster
        assert found.workload(trial) == "mlp" and found.cluster_name(trial) == "4x1g"
        assert found.optimizer(trial) == ADAMW
    assert found.graph(found.trials[0]) is found.graph(found.trials[1])
    assert found.trials[0].step_time_s == pytest.approx(1.1e-3)


def test_a_journal_is_continued_and_packed(tmp_path: Path) -> None:
    path, packed = tmp_path / "j.jsonl", tmp_path / "data" / "t.jsonl.xz"
    _write(path, _trial(0))
    with path.open("a") as file:
        file.write('{"kind":"trial","key"')  # killed while it wrote
    assert len(Dataset.load(path).trials) == 1
    _write(path, _trial(1))
    assert [t.key for t in Dataset.load(path).trials] == ["k0", "k1"]
    assert sum('"kind":"graph"' in line for line in path.read_text().splitlines()) == 1
    size = pack([path], packed)
    assert size == packed.stat().st_size
    assert Dataset.load(packed) == Dataset.load(path)


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"kind":"trial","key":"k"}\n')
    with pytest.raises(ValueError, match=r"j\.jsonl:1: no record"):
        list(read(path))


def test_the_card_counts_and_measures_noise(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    again = _trial(1, (1000, 1150, 1200), repeat=1)
    worse = _trial(2, (1500, 1500, 1500), repeat=1, noise="steps differ by 20%")
    failed = _trial(3, (), status="hung", error="ranks [1] were not done")
    _write(path, _trial(0), _trial(1), again, _trial(2), worse, failed)
    data = Dataset.load(path)
    found = noise(data)
    assert found is not None and found.trials == 2 and found.agreeing == 0.5
    calm = noise(data, lambda t: not t.noise)
    assert calm is not None and calm.trials == 1 and calm.agreeing == 1.0
    text = card(data)
    assert "6 trials, 5 of them good, of 4 different plans, over 1 workloads and 1 clusters" in text
    assert "| mlp | 5 | 0 | 1 ms | An MLP. |" in text
    assert "| ok | 5 |" in text and "| hung | 1 |" in text
    assert "4 of the 5 good trials do not say that they were noisy" in text


def test_folds_cover_every_name_once_and_do_not_depend_on_order() -> None:
    names = [f"m{i}" for i in range(11)]
    parts = folds(names)
    assert sorted(n for part in parts for n in part) == sorted(names)
    assert parts == folds(random.Random(0).sample(names, len(names)))


def test_clusters_are_renamed_without_changing_a_figure() -> None:
    cases = clusters()
    assert len(cases) >= 12
    for case in cases.values():
        names = [host.name for host in case.cluster.all_hosts]
        assert names == [f"host-{i}" for i in range(len(names))]
        assert renamed(case.cluster) == case.cluster


def test_a_trial_says_why_it_was_noisy() -> None:
    calm = Load(others_cores=0.0, stolen_cores=0.0, average=0.3)
    steady = (1.0, 1.01, 0.99, 1.0, 1.01, 0.99)
    assert TrialResult("ok", step_s=steady, load=calm).noise == ""
    assert "other processes" in TrialResult("ok", step_s=steady, load=Load(0.5, 0.0, 2.0)).noise
    assert "hypervisor" in TrialResult("ok", step_s=steady, load=Load(0.0, 0.5, 2.0)).noise
    assert "steps differ" in TrialResult("ok", step_s=(1.0, 1.2, 0.9, 1.3, 0.8, 1.0), load=calm).noise
    assert "later steps took +20%" in TrialResult("ok", step_s=(1.0, 1.0, 1.0, 1.2, 1.2, 1.2), load=calm).noise
    assert relative_spread((1.0, 1.0, 1.0)) == 0.0
    assert drift((2.0, 2.0, 1.0, 1.0)) == -0.5


def test_a_comparison_of_failed_trials_has_no_ratio() -> None:
    comparison = Comparison(TrialResult("ok"), TrialResult("hung", "rank 1 was late"))
    with pytest.raises(ValueError, match="b is hung: rank 1 was late"):
        _ = comparison.ratio


def test_every_record_of_the_data_set_is_read_and_refers_to_what_is_there() -> None:
    files = sorted(DATA.glob("*.jsonl.xz"))
    if not files:
        pytest.skip("no trials were collected yet")
    data = Dataset.load(*files)
    for trial in data.trials:
        assert trial.session in data.sessions
        program = data.program(trial)
        if trial.ok:
            assert program.order_hash == trial.order_hash
            assert trial.step_time_s > 0
    for cluster, _ in data.calibrations:
        assert cluster in data.clusters
    assert sum(path.stat().st_size for path in files) <= 10_000_000
