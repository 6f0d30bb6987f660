"""The suite: what its workloads must hold, that their batches are everyone's, and that its clusters can be planned."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from benchmarks.suite import WORKLOADS, workload_named
from benchmarks.suite.__main__ import main, report
from benchmarks.suite.clusters import CLUSTERS, case_named
from benchmarks.suite.facts import Facts
from benchmarks.zoo import words
from benchmarks.zoo.pictures import scenes
from benchmarks.zoo.workload import Workload
from benchmarks.zoo.zipf import zipf

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda w: w.name)
every_sparse_workload = pytest.mark.parametrize(
    "workload", [w for w in WORKLOADS.values() if w.sparse], ids=lambda w: w.name
)


def _unallocated(name: str) -> nn.Module:
    with torch.device("meta"):
        return workload_named(name).model()


def _tensors(batch: object) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]


def _equal(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(_tensors(a), _tensors(b), strict=True))


def _one_step(workload: Workload, model: nn.Module) -> torch.Tensor:
    optimizer = workload.optimizer(model)
    loss = workload.loss(model, workload.batch(0, 0))
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_the_ten_workloads_are_there() -> None:
    assert list(WORKLOADS) == ["bert", "gpt2", "llama", "resnet50", "vgg", "dlrm", "lstm", "moe", "faces", "detr"]
    with pytest.raises(KeyError, match="no workload 'gpt' in the suite; did you mean 'gpt2'"):
        workload_named("gpt")


@every_workload
def test_a_workload_is_of_a_size_that_four_ranks_can_bear(workload: Workload) -> None:
    model = _unallocated(workload.name)
    assert model.training
    assert 2e6 <= sum(p.numel() for p in model.parameters() if p.requires_grad) <= 60e6
    assert not [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    held = {p for group in workload.optimizer(model).param_groups for p in group["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}


@every_workload
def test_batches_follow_from_step_and_rank_alone(workload: Workload) -> None:
    batch = workload.batch(3, 1)
    assert _equal(batch, workload.batch(3, 1))
    assert not _equal(batch, workload.batch(3, 2))
    assert not _equal(batch, workload.batch(4, 1))
    assert flatten(batch).signature == flatten(workload.batch(4, 2)).signature


@pytest.mark.parametrize(("name", "vocabulary"), [("bert", 30_522), ("gpt2", 50_257)])
def test_vocabularies_are_tied(name: str, vocabulary: int) -> None:
    model = _unallocated(name)
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    assert inputs.weight is head.weight
    assert inputs.weight.shape[0] == vocabulary


@pytest.mark.parametrize(("name", "vocabulary"), [("llama", 32_000), ("moe", 32_000), ("lstm", 33_278)])
def test_vocabularies_are_not_tied(name: str, vocabulary: int) -> None:
    large = [n for n, p in _unallocated(name).named_parameters() if p.dim() == 2 and p.shape[0] == vocabulary]
    assert len(large) == 2


def test_queries_share_keys() -> None:
    attention = _unallocated("llama").get_submodule("model.layers.0.self_attn")
    keys, queries = attention.get_parameter("k_proj.weight"), attention.get_parameter("q_proj.weight")
    assert 4 * keys.shape[0] == queries.shape[0]


def test_experts_are_mixed() -> None:
    experts = _unallocated("moe").get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert experts.shape[0] == 8


def test_tables_have_a_million_rows_and_are_read_unevenly() -> None:
    tables = [p for n, p in _unallocated("dlrm").named_parameters() if n.startswith("tables.")]
    assert len(tables) >= 4
    assert max(len(t) for t in tables) >= 1_000_000
    inputs, _ = workload_named("dlrm").batch(0, 0)
    ids = inputs["categories"]
    for column, table in zip(ids.T, tables, strict=True):
        assert column.max() < len(table)
    _, counts = ids[:, 0].unique(return_counts=True)
    assert counts.max() > 20 * counts.float().mean()


def test_faces_are_of_200_000_people() -> None:
    head = _unallocated("faces").get_submodule("head")
    assert isinstance(head, nn.Linear)
    assert head.bias is None
    assert head.out_features >= 200_000


def test_resnet_is_the_published_one() -> None:
    assert sum(p.numel() for p in _unallocated("resnet50").parameters()) == 25_557_032


def test_vgg_is_mostly_linear_layers() -> None:
    model = _unallocated("vgg")
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert linear > 0.9 * sum(p.numel() for p in model.parameters())


def test_the_detector_leaves_out_only_its_look_for_overflows() -> None:
    model = _unallocated("detr")
    assert {type(m).__name__ for m in model.modules() if not m.training} == {"DetrEncoderLayer"}
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["vgg", "faces"])
def test_weights_are_the_same_everywhere(name: str) -> None:
    state = torch.get_rng_state()
    one, other = workload_named(name).model(), workload_named(name).model()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@every_sparse_workload
def test_sparse_gradients_train_the_same_model(workload: Workload) -> None:
    assert workload.sparse_model is not None
    dense, sparse = workload.model(), workload.sparse_model()
    torch.testing.assert_close(_one_step(workload, sparse), _one_step(workload, dense))
    assert any(p.grad is not None and p.grad.is_sparse for p in sparse.parameters())
    for p, q in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_gradients_have_their_structures_in_the_graph() -> None:
    def structures(name: str) -> dict[str, str]:
        w = workload_named(name)
        return {p.name: p.structure for p in training_graph(w.model(), flatten(w.batch(0, 0)), w.loss_fn).parameters}

    tables = {s for n, s in structures("dlrm").items() if n.startswith("tables.")}
    assert tables == {"rows"}
    linear = {s for n, s in structures("vgg").items() if n.startswith("classifier.") and n.endswith("weight")}
    assert linear == {"factors"}


def test_numbers_follow_zipfs_law() -> None:
    numbers = zipf(np.random.default_rng(0), 1000, 200_000, exponent=1.2)
    assert 0 <= numbers.min() <= numbers.max() < 1000
    counts = np.sort(np.bincount(numbers, minlength=1000))[::-1]
    places = np.array([10, 30, 100, 300])
    slope = np.polyfit(np.log(places), np.log(counts[places - 1]), 1)[0]
    assert slope == pytest.approx(-1.2, abs=0.1)


def test_words_are_numbered_by_frequency() -> None:
    text = words.text()
    counts = np.bincount(text)
    assert counts[: words.SPECIAL].sum() == 0
    assert (np.diff(counts[words.SPECIAL :]) <= 0).all()
    assert len(counts) >= 50_000
    few = words.windows(0, 0, 16, 32, vocabulary=100)
    assert few.shape == (16, 32)
    assert few.max() < 100
    assert (few == words.UNKNOWN).any()


def test_every_sequence_has_as_many_masked_words() -> None:
    batch = workload_named("bert").batch(0, 0)
    predicted = batch["labels"] != -100
    assert set(predicted.sum(1).tolist()) == {10}
    assert (batch["input_ids"][predicted] == words.MASK).float().mean() > 0.5
    assert not (batch["input_ids"][~predicted] == words.MASK).any()


def test_boxes_hold_the_digits_from_left_to_right() -> None:
    batch = scenes(0, 0, 8, 96, objects=3)
    drawn = batch["pixel_values"][:, 0] > -0.5
    for image, boxes in zip(drawn, batch["boxes"], strict=True):
        assert all(a[0] <= b[0] for a, b in pairwise(boxes))
        outside = image.clone()
        for x, y, w, h in (boxes * 96).round().int().tolist():
            left, top = x - w // 2 - 1, y - h // 2 - 1
            region = (slice(max(top, 0), top + h + 3), slice(max(left, 0), left + w + 3))
            assert image[region].any()
            outside[region] = False
        assert not outside.any()


ISSUE = {
    "4x1g": [1000.0] * 4,
    "4x200m": [200.0] * 4,
    "3x1g-1x200m": [1000.0] * 3 + [200.0],
    "2x2-1g": [1000.0] * 2,
    "4x1g-2-servers": [1000.0] * 4 + [2000.0] * 2,
    "8x10g-virtual": [10_000.0] * 8,
}


@pytest.mark.parametrize(("name", "mbit_per_s"), ISSUE.items())
def test_the_clusters_asked_for_have_their_rates(name: str, mbit_per_s: list[float]) -> None:
    hosts = CLUSTERS[name].cluster.all_hosts
    sent = [h.send_bytes_per_s for h in hosts]
    assert [s * 8 / 1e6 for s in sent if s is not None] == mbit_per_s
    assert sent == [h.receive_bytes_per_s for h in hosts]


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_whole(name: str) -> None:
    case = case_named(name)
    cluster = case.cluster
    topology = Topology(cluster)
    assert 2 <= topology.world_size <= 16
    assert ClusterSpec.loads(cluster.to_yaml()) == cluster
    assert all((d.kind == "cpu") != case.virtual for h in cluster.all_hosts for d in h.devices)
    assert (case.slowdown > 1) == case.virtual


def test_a_cluster_may_serve_have_two_ranks_a_host_or_two_rates() -> None:
    assert len(CLUSTERS["4x1g-2-servers"].cluster.serving_hosts) == 2
    assert [r.host.name for r in CLUSTERS["2x2-1g"].cluster.ranks] == ["host-0", "host-0", "host-1", "host-1"]
    uneven = CLUSTERS["4-uplink"].cluster.all_hosts[0]
    assert uneven.send_bytes_per_s != uneven.receive_bytes_per_s
    assert len(CLUSTERS) >= 10
    with pytest.raises(KeyError, match="no cluster '4x1' in the suite; did you mean '4x1g'"):
        case_named("4x1")


def test_the_table_names_what_failed() -> None:
    facts = Facts(
        name="small",
        about="",
        parameters=10,
        parameter_bytes=40,
        largest="weight",
        largest_shape=(2, 4),
        largest_share=0.8,
        structures={"rows": 1, "dense": 1},
        structure_bytes={"rows": 32, "dense": 8},
        nodes=7,
        capture_s=0.1,
        peak_memory_bytes=100,
        step_s=0.05,
    )
    result = report([facts], [("large", "out of memory")], required=2)
    assert [row[0] for row in result.rows] == ["small", "large"]
    assert "1 dense (20%), 1 rows (80%)" in result.rows[0]
    assert "out of memory" in result.rows[1][1]
    assert [t.value for t in result.short] == [1]


def test_the_command_names_the_nearest_workload() -> None:
    result = CliRunner().invoke(main, ["--only", "bertt"])
    assert result.exit_code == 2
    assert "did you mean 'bert'" in result.output
