"""Beside the best plan there is: small random jobs that exhaustive search settles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from statistics import mean

from autopar.search.searchers import DEFAULT, SEARCHERS
from benchmarks.harness import Report, Target
from benchmarks.search_quality.instances import instance
from benchmarks.search_quality.job import EVALUATIONS, found
from benchmarks.search_quality.part import Asked, Figures, Kept

INSTANCES, WITHIN, LEAST_WITHIN = 100, 0.01, 95
MOST_EVALUATIONS = 20_000
"""Plans that exhaustive search may price; instances that it does not settle with them are passed over."""
EXACT = "exhaustive"
EQUAL = 1e-9
"""Times whose ratio differs from 1 by less are equal: sums in another order."""


def run(report: Report, kept: Kept, asked: Asked) -> None:
    """A row for each searcher, and one for each instance that the default misses; then the targets."""
    cases = list(_settled(kept)) if not asked.cases else [(int(c), _kept(kept, int(c))) for c in asked.cases]
    passed = [number for number, figures in cases if not figures["settled"]]
    cases = [(number, figures) for number, figures in cases if figures["settled"]]
    report.data["optimum"] = dict(cases)
    for name in SEARCHERS:
        if name == EXACT or not cases:
            continue
        ratios = [figures["step_s"][name] / figures["step_s"][EXACT] for _, figures in cases]
        near = sum(ratio <= 1 + WITHIN for ratio in ratios)
        said = f"{near} of {len(ratios)} within {WITHIN:.0%}, {sum(r <= 1 + EQUAL for r in ratios)} equal or better"
        ratio = f"{mean(ratios):.4f}, at most {max(ratios):.4f}"
        report.rows.append(("optimum", f"{len(ratios)} small jobs", f"{name}: {said}", "the optimum", ratio))
    for number, figures in cases:
        ratio = figures["step_s"][DEFAULT] / figures["step_s"][EXACT]
        if ratio > 1 + WITHIN or asked.cases:
            said = f"{figures['about']}: {1e3 * figures['step_s'][DEFAULT]:.4g} ms"
            beside = f"{1e3 * figures['step_s'][EXACT]:.4g} ms"
            report.rows.append(("optimum", f"optimum/{number}", said, beside, f"{ratio:.4f}"))
    ratios = [figures["step_s"][DEFAULT] / figures["step_s"][EXACT] for _, figures in cases]
    worse = [n for n, f in cases if f["step_s"][DEFAULT] > f["best_seed_s"] * (1 + EQUAL)]
    if not asked.cases:
        near = sum(ratio <= 1 + WITHIN for ratio in ratios)
        report.targets.append(Target(f"optimum: of {INSTANCES} within {WITHIN:.0%}", near, LEAST_WITHIN, "at least"))
    report.targets.append(Target("optimum: worse than the best seed", len(worse), 0))
    report.notes.append(
        f"optimum: every searcher prices at most {EVALUATIONS} plans beside the seeds; exhaustive search prices whole "
        f"parameters in all groups under all choices, and settles an instance within {MOST_EVALUATIONS} plans or it is "
        f"passed over: {', '.join(map(str, passed)) or 'none'}. A ratio below 1 is that of a plan that slices "
        f"parameters. `--only optimum/NUMBER` runs one again."
    )


def _settled(kept: Kept) -> Iterator[tuple[int, Figures]]:
    """Instances by number until enough are settled, with those that are not between them."""
    settled = 0
    for number in count():
        figures = _kept(kept, number)
        yield number, figures
        settled += bool(figures["settled"])
        if settled == INSTANCES:
            return


def _kept(kept: Kept, number: int) -> Figures:
    return kept.of(f"optimum/{number}", lambda: measured(number))


def measured(number: int) -> Figures:
    """Step times of one instance by searcher, and that of the best seed, in seconds."""
    job = instance(number)
    exact = found(job, EXACT, MOST_EVALUATIONS)
    others = [name for name in SEARCHERS if name != EXACT] if exact.settled else []
    return {
        "about": job.about,
        "settled": exact.settled,
        "priced": exact.priced,
        "best_seed_s": exact.best_seed_s,
        "step_s": {EXACT: exact.step_s, **{name: found(job, name).step_s for name in others}},
    }
