"""Whether prices hold where models are trained for real: models that nothing was learned from, no trial.

    python -m benchmarks.real_compute [--model NAME] [--place NAME] [--check] [--save]

Ranks calibrate the lab, measure a model's compute on their own hosts, as `autopar.optimize` does, and predict the
steps of plans, exact and in 16 bits. Then the lab trains the model with each plan, in turns, and beside them without
any synchronization: where that is not what was measured before, the machine's speed has changed, and the model is
measured and trained again.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from autopar.lab import Job, Lab, unavailable_reason
from autopar.lab.pool import Pool
from autopar.lab.trial import RealCompute, TrialSpec
from autopar.runtime.operator_times import VARIABLE
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from benchmarks.harness import Report, Target, alone, options, publish
from benchmarks.suite.clusters import even
from benchmarks.zoo.unseen import UNSEEN

JOURNAL = Path("benchmarks/results/real-compute.jsonl")
NAMES = ("ddp", "all_reduce_one_bucket", "all_reduce_1MiB", "zero1", "sharded", "PSLoadBalancing_fused", "")
"""Builders, and what the search finds; each exact, and rounded to 16 bits on the wire."""
BLOCKS, STEPS = 5, 4
"""Blocks of each plan, in turn with the others', and steps of a block."""
ALONE = ("ddp+every=1000", "local")
"""A plan whose ranks do not synchronize within the steps of a trial: its step is compute alone."""
ATTEMPTS = 3
"""How often a model is measured and trained while its compute has drifted; the attempt that drifted least counts."""
CALIBRATION_S, TIMEOUT_S = 40.0, 600.0
WORKER = [sys.executable, "-m", "benchmarks.real_compute_worker"]


@dataclass(frozen=True)
class Place:
    """Hosts of one rank each."""

    name: str
    hosts: int
    mbit_per_s: float
    cores_apart: bool
    """Whether each host has cores of the machine for itself; else all share them."""

    @property
    def cluster(self) -> ClusterSpec:
        return even(self.hosts, self.mbit_per_s)()

    @property
    def most_drift(self) -> float:
        """How far compute may be from what was measured before, either way, as a fraction."""
        return 0.05 if self.cores_apart else 0.15


PLACES = {
    p.name: p
    for p in (
        Place("2 hosts, 300 Mbit/s", 2, 300, cores_apart=True),
        Place("2 hosts, 1 Gbit/s", 2, 1000, cores_apart=True),
        Place("3 hosts on shared cores, 300 Mbit/s", 3, 300, cores_apart=False),
        Place("5 hosts on shared cores, 300 Mbit/s", 5, 300, cores_apart=False),
    )
}


@dataclass(frozen=True)
class Measured:
    """One plan of one model at one place."""

    place: str
    model: str
    plan: str
    """Its builder, or `search`."""
    fidelity: str
    said_s: float
    within: float
    """Half of the interval, as a fraction of `said_s`."""
    step_s: float
    noise: str
    """Why the measured step may be off; empty where nothing speaks for that."""
    drift: float | None = None
    """By how much longer compute took while plans trained than as it was measured before, as a fraction; `None` where
    nobody looked."""

    @property
    def error(self) -> float:
        return abs(self.said_s / self.step_s - 1)

    @property
    def is_held(self) -> bool:
        """Whether the interval holds the step."""
        return abs(self.step_s - self.said_s) <= self.within * self.said_s


def measure(place: Place, models: Sequence[str], journal: Path) -> None:
    """Appends what is measured of each model at a place."""
    cluster = place.cluster
    spec = cluster.model_dump(mode="json")
    with Lab.of(cluster, cores_apart=place.cores_apart) as lab:
        with Job(lab.ranks, WORKER) as job:
            click.echo(f"{place.name}: calibrating", err=True)
            calibration = job.ask({"do": "calibrate", "cluster": spec, "budget_s": CALIBRATION_S}, TIMEOUT_S)[0]
        wanted = [(n + "+bf16" * (n != "" and f == "rounded"), f) for f in ("exact", "rounded") for n in NAMES]
        wanted.append(ALONE)
        request = {"do": "plan", "cluster": spec, "calibration": calibration, "plans": wanted}
        for model in models:
            found, drift = list[Measured](), math.inf
            for _ in range(ATTEMPTS):
                click.echo(f"{place.name}: planning {model}", err=True)
                # What operators took is kept for later plans: that of another place or attempt is of no use here.
                with TemporaryDirectory() as times, Job(lab.ranks, WORKER, {VARIABLE: times}) as job:
                    texts = job.ask({**request, "workload": model}, TIMEOUT_S)[0]["plans"]
                click.echo(f"{place.name}: training {model}", err=True)
                with Pool(lab) as pool:
                    each, drifted = _trained(
                        pool, place, model, dict(zip(wanted, map(Plan.model_validate_json, texts), strict=True))
                    )
                click.echo(f"{place.name}: {model}'s compute drifted by {drifted:+.1%}", err=True)
                if abs(drifted) < abs(drift):
                    found, drift = each, drifted
                if abs(drift) <= place.most_drift:
                    break
            with journal.open("a") as file:
                file.writelines(json.dumps(asdict(m)) + "\n" for m in found)


def _trained(pool: Pool, place: Place, model: str, plans: dict[tuple[str, str], Plan]) -> tuple[list[Measured], float]:
    """What each plan took, but for `ALONE`, which is among them; and by how much compute has drifted."""
    compute = RealCompute("benchmarks.zoo.named:any_workload", (model,))
    specs = {
        f"{name or 'search'}, {fidelity}": TrialSpec(plan, compute, steps=STEPS, warmup=2)
        for (name, fidelity), plan in plans.items()
    }
    results = pool.in_turn(specs, BLOCKS)
    found = []
    for (name, fidelity), plan in plans.items():
        result = results[f"{name or 'search'}, {fidelity}"]
        if result.status != "ok":
            raise click.ClickException(f"{model}, {name}, {fidelity}: {result.status}: {result.error}")
        said = plan.prediction
        assert said is not None
        of = (place.name, model, name or "search", fidelity, said.step_time_s, said.relative_error)
        found.append(Measured(*of, result.step_time_s, result.noise))
    alone = found.pop()
    steps = results[f"{ALONE[0]}, {ALONE[1]}"].step_s
    # Ranks that do not wait for one another may have unequal parts of the cores, and end a block's steps as unevenly;
    # a block ends with the last of them, so that its mean holds the work of all.
    blocks = [statistics.fmean(steps[i : i + STEPS]) for i in range(0, len(steps), STEPS)]
    drift = statistics.median(blocks) / alone.said_s - 1
    return [replace(m, drift=drift) for m in found], drift


def regret(choice: Sequence[Measured]) -> float:
    """How much longer than the fastest the plan takes that is said to be the fastest."""
    return min(choice, key=lambda m: m.said_s).step_s / min(m.step_s for m in choice) - 1


def report_of(found: Sequence[Measured]) -> Report:
    """A row for each model at each place, and the targets of those whose cores are apart, and of the others."""
    report = Report(
        "real-compute",
        "Prices of training for real, models unseen, calibrated, no trial",
        [
            "place",
            "model",
            "wire",
            "plans",
            "steps, ms",
            "error, mean",
            "worst",
            "regret",
            "in the interval",
            "compute drifted",
        ],
    )
    by_choice = {}
    for (place, model, wire), each in groupby(found, lambda m: (m.place, m.model, m.fidelity)):
        choice = by_choice[place, model, wire] = list(each)
        times, worst = [1e3 * m.step_s for m in choice], max(choice, key=lambda m: m.error)
        drifted = "" if choice[0].drift is None else f"{choice[0].drift:+.1%}"
        report.rows.append(
            (place, model, wire, str(len(choice)), f"{min(times):.0f} to {max(times):.0f}",
             f"{statistics.mean(m.error for m in choice):.1%}", f"{worst.error:.0%} ({worst.plan})",
             f"{regret(choice):.1%}", f"{sum(m.is_held for m in choice)} of {len(choice)}", drifted)
        )  # fmt: skip
    for apart, kind in ((True, "cores of their own"), (False, "shared cores")):
        mine = [m for m in found if PLACES[m.place].cores_apart == apart]
        if not mine:
            continue
        regrets = [regret(c) for (place, _, _), c in by_choice.items() if PLACES[place].cores_apart == apart]
        held = sum(m.is_held for m in mine) / len(mine)
        error = statistics.mean(m.error for m in mine)
        report.data[kind] = {"plans": len(mine), "mape": error, "regret": statistics.mean(regrets), "held": held}
        report.targets.append(Target(f"{kind}: mean error of {len(mine)} plans", error, 0.06 if apart else 0.15))
        if apart:
            report.targets.append(
                Target(f"{kind}: mean regret of {len(regrets)} choices", report.data[kind]["regret"], 0.02)
            )
        else:
            report.targets.append(Target(f"{kind}: part within the stated interval", held, 0.9, "at least"))
    noisy = sum(bool(m.noise) for m in found)
    report.notes = [
        f"Each rank has one thread and trains for real. {BLOCKS} blocks of {STEPS} steps of each plan, in turns; the "
        f"median counts. {noisy} of {len(found)} measurements call themselves noisy. 'compute drifted' is how much "
        "longer steps without synchronization took in these turns than compute as it was measured when plans were "
        f"priced. A model that drifted by more than 5 % (15 % on shared cores) is measured again, {ATTEMPTS} times at "
        "most, and what drifted least counts; empty where nobody looked."
    ]
    return report


def read(journal: Path) -> list[Measured]:
    """All that was measured; of each plan the newest."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    each = (Measured(**json.loads(line)) for line in lines)
    return list({(m.place, m.model, m.fidelity, m.plan): m for m in each}.values())


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice(list(UNSEEN)), help="This one; may be repeated.")
@click.option("--place", "places", multiple=True, type=click.Choice(list(PLACES)), help="This one; may be repeated.")
@click.option("--journal", default=JOURNAL, type=click.Path(path_type=Path), show_default=True)
@options
def main(
    models: tuple[str, ...], places: tuple[str, ...], journal: Path, check: bool, json_file: str | None, save: bool
) -> None:
    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no lab here: {reason}")
    journal.parent.mkdir(parents=True, exist_ok=True)
    with alone():
        for place in map(PLACES.__getitem__, places or PLACES):
            known = {m.model for m in read(journal) if m.place == place.name}
            if missing := [m for m in models or UNSEEN if m not in known]:
                measure(place, missing, journal)
    found = [m for m in read(journal) if m.place in (places or PLACES) and m.model in (models or UNSEEN)]
    report = report_of(sorted(found, key=lambda m: (list(PLACES).index(m.place), m.model, m.fidelity)))
    asked = [*(f'--place "{p}"' for p in places), *(f"--model {m}" for m in models)]
    command = " ".join(["python -m benchmarks.real_compute", *asked])
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
