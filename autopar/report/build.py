"""Builds the report: one self-contained HTML file that opens offline.

The page loads nothing: charts, styles and scripts are inside, and its content security policy forbids the rest.
Every figure that is drawn stands in a table too, so that the page can be read without scripts and on paper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.report import charts, rows
from autopar.report.environment import environment
from autopar.report.rows import Compared
from autopar.report.what_if import what_if_remark, what_if_rows
from autopar.spec.files import write_file
from autopar.spec.plan import Plan
from autopar.spec.summary import (
    FIDELITY_MEANING,
    RECOMPUTE_MEANING,
    measured_text,
    parameter_bytes,
    provenance_text,
    verdict,
)

if TYPE_CHECKING:
    from markupsafe import Markup

    from autopar.cost_models.base import Estimate
    from autopar.search.sensitivity import Sensitivity


def build_report(
    plan: Plan,
    path: str | Path,
    *,
    estimate: Estimate | None = None,
    measured: Mapping[str, float] | None = None,
    what_if: Sensitivity | None = None,
    commands: Sequence[str] = (),
) -> Path:
    """Writes the report on a plan to `path`, and returns the path.

    estimate: what the cost model says of the plan, with its timeline; without it the page has no timeline and no
        figures by rank.
    measured: step times in seconds, by the name of the plan or of an alternative (`ddp`).
    what_if: the plan under changed circumstances; without it the page has no section about these.
    commands: the exact commands that made the plan and run it; by default those that run it.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    templates = Environment(
        loader=PackageLoader("autopar.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["breakable"] = _breakable
    compared = rows.compared(plan, measured or {})
    groups = rows.groups(plan)
    page = templates.get_template("report.html.j2").render(
        plan=plan,
        model_size=rows.model_size(plan),
        verdict=verdict(plan),
        measured_verdict=rows.measured_verdict(plan, measured or {}) or measured_text(plan),
        fidelity=FIDELITY_MEANING[plan.fidelity],
        recompute=RECOMPUTE_MEANING[plan.recompute],
        provenance=provenance_text(plan),
        facts=rows.facts(plan),
        comparison=compared,
        has_measured=any(row.measured_s is not None for row in compared),
        quality=rows.quality(plan),
        groups=groups,
        has_runners_up=any(row["runner_up"] for row in groups),
        what_if=what_if_rows(what_if) if what_if is not None else [],
        what_if_remark=what_if_remark(plan, what_if) if what_if is not None else "",
        parameters=rows.parameters(plan),
        disagreement=rows.disagreement(plan, estimate),
        has_estimate=estimate is not None,
        ranks=rows.ranks(estimate),
        figures=_figures(plan, compared, estimate),
        environment=environment(),
        commands=commands or _default_commands(plan),
        plotly_js=get_plotlyjs(),
    )
    target = Path(path)
    write_file(target, page, "report")
    return target


def _breakable(text: str) -> Markup:
    """A long name that may be broken behind its dots and underscores, and nowhere else."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([._])(?=.)", r"\1<wbr>", str(escape(text))))


def _figures(plan: Plan, compared: Sequence[Compared], estimate: Estimate | None) -> dict[str, Any]:
    """Chart by the id of the element that holds it."""
    figures: dict[str, Any] = {}
    if compared:
        figures["chart-comparison"] = charts.comparison(compared)
    if estimate is not None:
        held = sum(parameter_bytes(p) for p in plan.model.parameters)
        figures["chart-memory"] = charts.memory(estimate.peak_memory_bytes, held)
        figures["chart-traffic"] = charts.traffic(estimate.sent_bytes, estimate.received_bytes)
        if estimate.spans:
            figures["chart-timeline"] = charts.timeline(estimate)
    return figures


def _default_commands(plan: Plan) -> list[str]:
    n = plan.cluster.world_size
    return [
        "autopar run plan.json train.py",
        f"AUTOPAR_PLAN=plan.json torchrun --standalone --nproc-per-node={n} train.py",
    ]
