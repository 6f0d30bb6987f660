"""`python -m benchmarks.fidelity.learn`: learns the correction that is shipped, and says what it is."""

from __future__ import annotations

import re
import textwrap
from collections import Counter

import click
import numpy as np

from autopar.cost_models.corrected import SHIPPED
from autopar.cost_models.correction import Correction
from autopar.cost_models.learning import COVERAGE
from benchmarks.fidelity.lab import Lab, Said, Table
from benchmarks.trials.records import Dataset

CARD = """\
# The learned correction

Written by `python -m benchmarks.fidelity.learn`, from the trials of `benchmarks/trials/data`; its card says how they
were measured. Used by `autopar.cost_models.CorrectedCostModel`, which `autopar plan` and `autopar.optimize` take where
a calibration of a cluster with gloo is given. Trees of scikit-learn's `GradientBoostingRegressor`, taken apart.

- Learned from {samples} trials with virtual compute that did not call themselves noisy, each simulated with the
  calibration of the cluster at its speed: {workloads} workloads ({workload_names}), {clusters} clusters
  ({cluster_names}).
- {count} features: {features}.
- Of its factor, {belief:.0%} is believed, which is best for workloads on clusters that were left out. It is between
  {low:.2f} and {high:.2f} for nine in ten of the trials.
- {coverage:.0%} of the trials that were left out lie within {inside:.0%} of the corrected prediction, and within
  {outside:.0%} of the simulation alone. Both are what a plan's interval says, where all its figures were measured.
- Compute was slept through, so how well compute is predicted has no part in it. Links were shaped to {slowest:.2g} to
  {fastest:.2g} Gbit/s, with no latency: outside of these, and of every other feature's range, the factor fades to 1.

`python -m benchmarks.fidelity` measures how well it carries over to workloads and clusters that it has not seen.
"""


@click.command(help=__doc__)
@click.option("--save", is_flag=True, help="Write it, and its card, where autopar reads it.")
def main(save: bool) -> None:
    data = Dataset.load()
    lab = Lab(data)
    said = [lab.say(t) for t in data.trials if t.ok and not t.noise and t.compute == "virtual"]
    correction = Table.of(said).learned()
    card = _card(correction, said)
    click.echo(card)
    if save:
        correction.save(SHIPPED)
        SHIPPED.with_name("README.md").write_text(card)


def _card(correction: Correction, said: list[Said]) -> str:
    low, high = np.exp(np.quantile(correction.residual(Table.of(said).rows), [0.05, 0.95]))
    workloads, clusters = Counter(s.workload for s in said), Counter(s.cluster for s in said)
    slowest = [8e-9 * float(np.exp(s.features["log slowest link"])) for s in said]
    filled = CARD.format(
        samples=correction.samples,
        workloads=len(workloads),
        workload_names=", ".join(sorted(workloads)),
        clusters=len(clusters),
        cluster_names=", ".join(sorted(clusters)),
        count=len(correction.features),
        features=", ".join(correction.features),
        belief=correction.belief,
        low=low,
        high=high,
        coverage=COVERAGE,
        inside=np.expm1(correction.inside),
        outside=np.expm1(correction.outside),
        slowest=min(slowest),
        fastest=max(slowest),
    )
    blocks = re.split(r"\n(?=- |\n|`)", filled)
    return (
        "\n".join(textwrap.fill(" ".join(b.split()), 120, subsequent_indent="  " * b.startswith("- ")) for b in blocks)
        + "\n"
    )


if __name__ == "__main__":
    main()
