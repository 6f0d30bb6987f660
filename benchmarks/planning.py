"""How long planning takes, and in how much memory: models of many layers and tables, clusters of many ranks.

    python -m benchmarks.planning [--check] [--only NAME]

Models are made without weights. Each case is planned in a process of its own; the capture is timed apart.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
import transformers
from torch import nn

from autopar.planning import Planner
from autopar.runtime.compiled import Settings
from autopar.spec.cluster import ClusterSpec
from autopar.training import Training
from benchmarks.harness import Report, Target, options, publish
from benchmarks.plots import Plot, check_can_draw

CAPTURE_S, MEMORY_GB = 60.0, 4.0
BUDGET_S = 2.0
SPENT = 0.8
"""Part of the time that a case may take: the search may take it, and what follows is short."""


class Tables(nn.Module):
    """A recommender: many tables, of which each sample looks up some rows, and a small network behind."""

    def __init__(self, tables: int, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.last = nn.Linear(256, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        scores: torch.Tensor = self.last(self.top(found))
        return scores.squeeze(1)


def _tokens(samples: int, length: int) -> tuple[Any, Any]:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}, None


def _bert(layers: int = 24) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    return transformers.BertForMaskedLM(config)


def _gpt(layers: int, width: int, length: int = 2048) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 128, n_positions=length, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _clicks(samples: int, tables: int) -> tuple[Any, Any]:
    ids = torch.randint(0, 100_000, (samples, tables), generator=torch.Generator().manual_seed(0))
    return (ids, torch.rand(samples)), nn.functional.binary_cross_entropy_with_logits


@dataclass(frozen=True)
class Case:
    """What is planned."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]
    """A rank's, and the loss function."""
    hosts: int
    devices: int = 8
    limit_s: float | None = None

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec.loads(
            f"hosts: [{{name: host, count: {self.hosts}, devices: {self.devices} x H100-80GB}}]\n"
            "network: {bandwidth: 400 Gbit/s, latency: 10 us}\n"
        )


_TEXT, _LONG = partial(_tokens, 8, 512), partial(_tokens, 1, 2048)
TARGETS = {
    "bert-large, 64 ranks": Case(_bert, _TEXT, 8, limit_s=1.0),
    "llama-3-8b, 64 ranks": Case(_llama, _LONG, 8, limit_s=3.0),
    "gpt-175b, 1024 ranks": Case(partial(_gpt, 96, 12_288), _LONG, 128, limit_s=15.0),
    "500 tables, 128 ranks": Case(partial(Tables, 500), partial(_clicks, 64, 500), 16, limit_s=5.0),
}
BY_LAYERS = {f"gpt, {n} layers": Case(partial(_gpt, n, 1024), _LONG, 8) for n in (6, 12, 24, 48, 96)}
BY_RANKS = {f"bert-large, {8 * n} ranks": Case(_bert, _TEXT, n) for n in (1, 2, 4, 16, 32, 64, 128)}
CASES = {**TARGETS, **BY_LAYERS, **BY_RANKS}


def measured(name: str, budget_s: float) -> dict[str, Any]:
    """Seconds, bytes and the plan's figures of one case, in this process."""
    case = CASES[name]
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = case.make()
    batch, loss_fn = case.batch()
    began, began_cpu = time.perf_counter(), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    training = Training(model.train(), batch, Settings(loss_fn=loss_fn, unused_parameters="freeze"), optimizer, "step")
    training.graph()
    captured, captured_cpu = time.perf_counter(), time.process_time()
    priced = 0

    def progress(what: str, count: int, best_s: float) -> None:
        nonlocal priced
        priced = count

    plan = Planner(time_budget_s=budget_s, progress=progress).plan(training, case.cluster)
    ended, ended_cpu = time.perf_counter(), time.process_time()
    assert plan.prediction is not None
    return {
        "capture_s": captured - began,
        "capture_cpu_s": captured_cpu - began_cpu,
        "plan_s": ended - captured,
        "plan_cpu_s": ended_cpu - captured_cpu,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "priced": priced,
        "groups": len(plan.groups),
        "recompute": plan.recompute,
        "plan": plan.name,
        "step_s": plan.prediction.step_time_s,
    }


def add(report: Report, name: str, found: dict[str, Any]) -> None:
    """A row, and the targets of a case."""
    case = CASES[name]
    gigabytes = found["peak_bytes"] / 1e9
    report.data[name] = found
    report.rows.append(
        [
            name,
            f"{found['capture_s']:.1f} ({found['capture_cpu_s']:.1f})",
            f"{found['plan_s']:.2f} ({found['plan_cpu_s']:.2f})",
            f"{gigabytes:.2f}",
            str(found["priced"]),
            f"{found['plan']}, {found['groups']} groups"
            + ("" if found["recompute"] == "none" else f", recompute {found['recompute']}"),
            f"{1e3 * found['step_s']:.1f}",
        ]
    )
    if case.limit_s is not None:
        report.targets += [
            Target(f"{name}: planning", found["plan_s"], case.limit_s, unit="s"),
            Target(f"{name}: capture", found["capture_s"], CAPTURE_S, unit="s"),
            Target(f"{name}: memory in all", gigabytes, MEMORY_GB, unit="GB"),
        ]


def plots(found: dict[str, Any]) -> list[Plot]:
    """Of the cases that were measured: CPU-seconds by layers and by ranks, in all and for ten of the plans priced."""
    by_layers = {int(name.split()[1]): found[name] for name in BY_LAYERS if name in found}
    names = [*BY_RANKS, "bert-large, 64 ranks"]
    by_ranks = {CASES[name].cluster.world_size: found[name] for name in names if name in found}
    drawn = []
    for name, title, of in (("layers", "GPT on 64 ranks", by_layers), ("ranks", "BERT-large", by_ranks)):
        lines = {
            "planning": [(x, f["plan_cpu_s"]) for x, f in of.items()],
            "ten of the plans that it prices": [(x, 10 * f["plan_cpu_s"] / f["priced"]) for x, f in of.items()],
        }
        if of:
            drawn.append(Plot(name, f"Planning {title}, by {name}", name, "CPU-seconds", lines))
    return drawn


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="Of these cases alone.")
@options
def main(only: tuple[str, ...], **output: Any) -> None:
    if output["save"]:
        check_can_draw()
    columns = ["case", "capture, s (CPU)", "planning, s (CPU)", "memory, GB", "plans priced", "plan", "step said, ms"]
    report = Report("planning", "Planning: seconds and memory, by layers and by ranks", columns)
    for name in only or CASES:
        click.echo(name, err=True)
        budget_s = CASES[name].limit_s or BUDGET_S
        told = [sys.executable, "-m", "benchmarks.planning_worker", name, str(SPENT * budget_s)]
        done = subprocess.run(told, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        add(report, name, json.loads(done.stdout.splitlines()[-1]))
    report.notes.append(
        "Each case in a process of its own, on one thread; hosts of 8 H100-80GB at 400 Gbit/s each. Models have no "
        "weights; GPT has no dropout. Memory is the most that the process held, capture and PyTorch's libraries "
        f"included. The search is given {SPENT:.0%} of a case's limit, or of {BUDGET_S:g} s where it has none."
    )
    report.plots += plots(report.data)
    sys.exit(publish(report, command="python -m benchmarks.planning", **output))


if __name__ == "__main__":
    main()
