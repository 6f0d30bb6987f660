"""What the suites consist of: which workloads on which clusters, against whom, and how much is measured."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import PEERS
from benchmarks.peers.case import Effort
from benchmarks.suite import workload_named
from benchmarks.suite.clusters import case_named

MAIN_PEERS = (
    "ddp",
    "ddp_sparse",
    "fsdp2",
    "zero_redundancy",
    "autodist_Parallax",
    "ddp_fp16",
)


@dataclass(frozen=True)
class Suite:
    """A set of comparisons."""

    name: str
    cases: tuple[tuple[str, tuple[str, ...]], ...]
    """Clusters, each with its workloads."""
    peers: tuple[str, ...]
    effort: Effort
    limit_s: float | None = None
    """No case begins that would end after this time, were it as long as those before it; what is left out is
    reported."""

    def chosen(self, only: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The cases of which `only` names the `WORKLOAD/CLUSTER`, any that there are; or else the `WORKLOAD` or the
        `/CLUSTER` of this suite. All of them where it is empty.

        Raises `KeyError`, with the nearest right name, where it names none.
        """
        if not only:
            return self.cases
        found: dict[str, dict[str, None]] = {}
        for text in only:
            workload, _, cluster = text.partition("/")
            if workload:
                workload_named(workload)
            if cluster and case_named(cluster).virtual:
                raise KeyError(f"cluster '{cluster}' has virtual compute, which peers cannot run on")
            mine = [(c, w) for c, ws in self.cases for w in ws if cluster in ("", c) and workload in ("", w)]
            for c, w in [(cluster, workload)] if workload and cluster else mine:
                found.setdefault(c, {})[w] = None
            if not mine and not (workload and cluster):
                raise KeyError(f"suite '{self.name}' has no case of '{text}'; name one as WORKLOAD/CLUSTER")
        return tuple((cluster, tuple(workloads)) for cluster, workloads in found.items())


QUICK = Suite(
    name="quick",
    cases=(("4x1g", ("gpt2", "dlrm", "vgg")), ("2x2-1g", ("dlrm", "vgg"))),
    peers=MAIN_PEERS,
    effort=Effort(rounds=5, slow_rounds=1, rounds_s=40.0, block_s=1.0, block_steps=2, search_time_s=3.0, tune=False),
    limit_s=570.0,
)
FULL = Suite(
    name="full",
    cases=(
        ("4x1g", ("bert", "gpt2", "llama", "resnet50", "vgg")),
        ("4x200m", ("dlrm", "lstm", "moe")),
        ("3x1g-1x200m", ("gpt2", "detr")),
        ("2x2-1g", ("bert", "llama", "lstm", "detr", "faces")),
        ("4x1g-2-servers", ("resnet50", "vgg", "dlrm", "moe", "faces")),
    ),
    peers=tuple(PEERS),
    effort=Effort(rounds=4, slow_rounds=1, rounds_s=40.0, block_s=2.0, block_steps=2, search_time_s=5.0),
)
"""Every workload on two clusters whose compute is real, as peers need it; `--only` takes any other pair."""
SUITES = {s.name: s for s in (QUICK, FULL)}
