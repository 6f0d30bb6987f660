"""The data card: how the trials were taken, how many there are of what, and how noisy they are. All of it is computed
from the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, quantiles, stdev

from benchmarks.harness import markdown_table
from benchmarks.trials.records import Dataset, Trial

WITHIN = 0.05
"""Two medians of the same trial that differ by less than this fraction agree."""
FOLDS = 4

_HOW = """\
A trial runs one plan for one workload on one cluster in `autopar.lab`: hosts are network namespaces on one machine,
their links shaped to the cluster's rates; latencies are not emulated. The ranks are processes that live on from trial
to trial. With **virtual** compute (`autopar.runtime.virtual`) communication is real and each stretch of compute is
slept through, as long as the analytic cost model says that the cluster's device takes for it; with **real** compute the
model is trained, by ranks that share the machine's cores. `dilation` says how many times slower than the cluster the
lab ran: links' rates were divided by it, and sleeps multiplied; what the host and the library add to a collective is
not scaled. Plans are those of the builders, random walks from them, and random partitions with random strategies,
owners, shares, slices and number formats; most of them are no good ones. Plain DDP is run in every choice, that is for
each workload on a cluster at each speed and with each clipping.

A step lasts from the last rank's end of the step before to the last rank's end of it. A trial's first step is not
counted (the first two with real compute); then come 10 steps, or as many as fit into 1.5 s, but at least 3. The step
time is their median. Cells with more than 40 trials were taken at one speed and without clipping, so that all their
plans are one choice, and 3 to 7 s were for their steps. Bytes are counted by the hosts' interfaces, headers included;
memory is the resident peak, by rank. A trial says itself whether it was noisy, and why: other processes or the
hypervisor took more than 0.15 cores, or its steps differ. The machine's speed varies by itself, by a factor of up to
2.5 over minutes; trials say what 100,000 additions in Python took just before. TCP found its rate by Reno, as in every
lab. With sharded parameters, trials from before 22 November 2026, 22:00, slept longer than the model says now, which
then had a price for letting go of what was gathered: 0.8 % of the step on average, in a few small models a tenth."""


@dataclass(frozen=True)
class Noise:
    """How much repeats of the same trial differ."""

    trials: int
    """That were run more than once."""
    median_cv: float
    """Coefficient of variation of the medians of one trial: the middle one, and that which nine in ten stay below."""
    high_cv: float
    agreeing: float
    """Part of the pairs of a trial and a repeat of it that differ by less than `WITHIN`."""


def noise(data: Dataset, keep: Callable[[Trial], bool] = lambda t: True) -> Noise | None:
    """Over the trials that `keep` says yes to; `None` where none of them was repeated."""
    kept = [[t.step_time_s for t in trials if keep(t)] for trials in data.repeats().values()]
    groups = [times for times in kept if len(times) > 1]
    if not groups:
        return None
    variations = [stdev(times) / mean(times) for times in groups]
    pairs = [abs(b / a - 1) <= WITHIN for times in groups for a, b in pairwise(times)]
    high = quantiles(variations, n=10, method="inclusive")[-1] if len(variations) > 1 else variations[0]
    return Noise(len(groups), median(variations), high, sum(pairs) / len(pairs))


def folds(names: Iterable[str], count: int = FOLDS) -> list[list[str]]:
    """Names split into parts, one of which is held out at a time: every `count`-th in alphabetical order, so that the
    split does not change with the number of trials."""
    ordered = sorted(set(names))
    return [part for i in range(count) if (part := ordered[i::count])]


def card(data: Dataset) -> str:
    """The card, as Markdown."""
    good = [t for t in data.trials if t.ok]
    parts = [
        "# Trials of plans in the lab",
        f"{len(data.trials)} trials, {len(good)} of them good, of {len({t.key for t in data.trials})} different plans, "
        f"over {len({t.graph for t in data.trials})} workloads and {len({t.cluster for t in data.trials})} clusters.",
        "## How they were taken",
        _HOW,
        *([_calibrations(data)] if data.calibrations else []),
        _sessions(data),
        "## What there is",
        markdown_table(("workload", "trials", "real", "median step", "about"), _workloads(data, good)),
        markdown_table(("cluster", "trials", "real", "dilation", "about"), _clusters(data, good)),
        markdown_table(("strategy", "plans with it", "groups"), _strategies(good)),
        markdown_table(("plan from", "trials"), [(k, str(n)) for k, n in Counter(t.plan for t in good).most_common()]),
        markdown_table(
            ("outcome", "trials"), [(k, str(n)) for k, n in Counter(t.status for t in data.trials).most_common()]
        ),
        "## Noise",
        _noise(data),
        "## Splits",
        "To judge a cost model on what it has not seen, hold out one part at a time.",
        markdown_table(
            ("part", "workloads", "trials"), _parts([g.workload for g in data.graphs.values()], good, data.workload)
        ),
        markdown_table(
            ("part", "clusters", "trials"), _parts([c.cluster for c in data.clusters.values()], good, data.cluster_name)
        ),
        "## How to read them",
        "`benchmarks.trials.records.Dataset.load()` reads all records; `data.program(trial)` is the lowered plan, "
        "`data.graph(trial)` the tables of the graph, `data.cluster(trial)` the cluster. Lines are JSON, of the kinds "
        "`session`, `graph`, `cluster`, `trial` and `calibration`; their fields are described in "
        "`benchmarks/trials/records.py`.",
    ]
    return "\n\n".join(parts) + "\n"


def _calibrations(data: Dataset) -> str:
    different = {c.calibration.model_dump_json() for c in data.calibrations.values()}
    took = sorted(c.calibration.took_s for c in data.calibrations.values())
    return (
        f"`calibrations.jsonl.xz` holds {len(data.calibrations)} calibrations of the lab (`autopar calibrate`): for "
        "each cluster with virtual compute at each speed it was run at, taken for no particular trial. Clusters "
        f"that differ in nothing but devices are the same lab: {len(different)} of them are different. "
        f"They took {took[0]:.0f} to {took[-1]:.0f} s each: labs of 8 ranks were given 40 s, the others 10."
    )


def _sessions(data: Dataset) -> str:
    rows = []
    for session in data.sessions.values():
        trials = [t for t in data.trials if t.session == session.session]
        if not trials:
            continue
        load = median(t.others_cores for t in trials)
        versions = ", ".join(f"{k} {v}" for k, v in session.versions.items())
        machine = f"{session.cores} cores ({session.processor}), {session.memory_gib:g} GiB"
        rows.append((session.date, str(len(trials)), machine, versions, f"{load:.2f}"))
    return markdown_table(("date", "trials", "machine", "versions", "cores taken by others"), rows)


def _workloads(data: Dataset, good: Sequence[Trial]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for graph in sorted(data.graphs.values(), key=lambda g: g.workload):
        trials = [t for t in good if t.graph == graph.digest]
        step = f"{1e3 * median(t.step_time_s for t in trials):.0f} ms" if trials else ""
        rows.append((graph.workload, str(len(trials)), _real(trials), step, graph.about))
    return rows


def _clusters(data: Dataset, good: Sequence[Trial]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for cluster in sorted(data.clusters.values(), key=lambda c: c.cluster):
        trials = [t for t in good if t.cluster == cluster.digest]
        seen = sorted({t.dilation for t in trials})
        dilation = f"{seen[0]:g} to {seen[-1]:g}" if len(seen) > 1 else "".join(f"{d:g}" for d in seen)
        rows.append((cluster.cluster, str(len(trials)), _real(trials), dilation, cluster.about))
    return rows


def _real(trials: Sequence[Trial]) -> str:
    return str(sum(t.compute == "real" for t in trials))


def _strategies(good: Sequence[Trial]) -> list[Sequence[str]]:
    plans, groups = Counter[str](), Counter[str]()
    for trial in good:
        named = [str(g[0]) for g in trial.groups]
        groups.update(named)
        plans.update(set(named))
    return [(name, str(n), str(groups[name])) for name, n in plans.most_common()]


def _noise(data: Dataset) -> str:
    rows = []
    calm = sum(not t.noise for t in data.trials if t.ok)
    for what, keep in (
        ("all", lambda t: True),
        ("those that do not say they were noisy", lambda t: not t.noise),
        ("of them, virtual compute", lambda t: not t.noise and t.compute == "virtual"),
        ("of them, real compute", lambda t: not t.noise and t.compute == "real"),
    ):
        found = noise(data, keep)
        if found is not None:
            shown = (f"{found.median_cv:.1%}", f"{found.high_cv:.1%}", f"{found.agreeing:.0%}")
            rows.append((what, str(found.trials), *shown))
    said = f"{calm} of the {sum(t.ok for t in data.trials)} good trials do not say that they were noisy."
    if not rows:
        return f"{said} No trial was repeated."
    return f"{said}\n\n" + markdown_table(
        ("trials that were repeated", "number", "variation, median", "variation, 90 % below", "pairs within 5 %"), rows
    )


def _parts(names: Iterable[str], good: Sequence[Trial], name: Callable[[Trial], str]) -> list[Sequence[str]]:
    count = Counter(name(t) for t in good)
    return [
        (chr(ord("A") + i), ", ".join(part), str(sum(count[n] for n in part))) for i, part in enumerate(folds(names))
    ]
