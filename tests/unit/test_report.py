"""The HTML report and the Chrome trace."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autopar.cost_models.base import Estimate, Span
from autopar.errors import SpecError
from autopar.report import build_report, write_trace
from autopar.spec.plan import Plan
from tests.unit.plans import small_plan

VOID = {"meta", "link", "br", "input", "wbr"}

ESTIMATE = Estimate(
    step_time_s=0.100,
    compute_s=0.090,
    exposed_communication_s=0.010,
    communication_s=0.030,
    sent_bytes=(3 * 2**20, 2**20, 2**20, 2**20),
    received_bytes=(2**20,) * 4,
    peak_memory_bytes=(40 * 2**20, 39 * 2**20, 39 * 2**20, 39 * 2**20),
    relative_error=0.05,
    provenance="looked up",
    spans=(
        Span("rank 0", "forward", 0.0, 0.030),
        Span("rank 0", "backward", 0.030, 0.090),
        Span("gloo", "all_reduce group 0", 0.060, 0.080),
        Span("gloo", "all_reduce group 1", 0.080, 0.095),
        Span("rank 0", "update group 0", 0.095, 0.100),
    ),
)


class Page(HTMLParser):
    """A page, taken apart: text by section, the data of the charts, what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section = ""
        self.text: dict[str, str] = {}
        self.figures: dict[str, Any] = {}
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self._script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "action", "data") and v != "data:,"]
        if tag == "section":
            self.section = str(found.get("id"))
        if tag == "script":
            self._script = str(found.get("id") or "page")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"
        if tag in ("td", "th", "dd", "dt", "span", "code") and self.section:
            self.text[self.section] = self.text.get(self.section, "") + " "

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self._script == "figures":
                self.figures = json.loads(data)
        elif self.section:
            self.text[self.section] = f"{self.text.get(self.section, '')}{data}"

    def words(self, section: str) -> str:
        return " ".join(self.text[section].split())


def own_text(path: Path) -> str:
    """The page without plotly.js, which is 4.6 MB."""
    return re.sub(r'<script id="plotly">.*?</script>', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def page_of(path: Path) -> Page:
    page = Page(own_text(path))
    assert page.open == []
    return page


def test_a_page_with_everything(tmp_path: Path) -> None:
    plan = small_plan()
    page = page_of(
        build_report(plan, tmp_path / "r.html", estimate=ESTIMATE, measured={"searched": 0.104, "ddp": 0.16})
    )
    assert "Predicted 1.50x as fast as ddp; the difference is larger than the stated error." in page.words("verdict")
    assert "Measured 104 ms against 160 ms of ddp: 1.54x as fast." in page.words("verdict")
    assert "searched 100 ms \u00b1 5.00 ms 1.00x 104 ms -4% 10.0 ms 3.00 MiB 40.0 MiB" in page.words("verdict")
    assert "0 all_reduce 3 0.11 h.1.{attn.*, mlp.weight} Its all-reduce is hidden" in page.words("groups")
    assert "0 3.00 MiB 1.00 MiB 40.0 MiB 1-3 1.00 MiB 1.00 MiB 39.0 MiB" in page.words("ranks")
    assert "autopar run plan.json train.py" in page.words("environment")
    for digest in (plan.digest, plan.model.digest, plan.cluster.digest):
        assert digest in page.words("environment")
    for p in plan.model.parameters:
        assert p.name in page.words("parameters")


def test_the_charts_hold_the_figures(tmp_path: Path) -> None:
    figures = page_of(
        build_report(small_plan(), tmp_path / "r.html", estimate=ESTIMATE, measured={"ddp": 0.16, "by hand": 0.2})
    ).figures
    predicted, measured = figures["chart-comparison"]["data"]
    assert predicted["y"] == ["searched", "ddp", "zero1", "by hand"]
    assert predicted["x"] == pytest.approx([100, 150, 110, None])
    assert measured["x"] == pytest.approx([None, 160, None, 200])
    bars = {trace["name"]: trace for trace in figures["chart-timeline"]["data"]}
    assert list(bars) == ["forward", "backward", "all-reduce", "update"]
    assert bars["all-reduce"]["y"] == ["gloo", "gloo"]
    assert bars["all-reduce"]["base"] == pytest.approx([60, 80])
    assert bars["all-reduce"]["x"] == pytest.approx([20, 15])
    sent, received = figures["chart-traffic"]["data"]
    assert (sent["x"], received["x"]) == ([3, 1, 1, 1], [1, 1, 1, 1])
    parameters, rest = figures["chart-memory"]["data"]
    assert [a + b for a, b in zip(parameters["x"], rest["x"], strict=True)] == pytest.approx([40, 39, 39, 39])


def test_every_chart_has_its_place(tmp_path: Path) -> None:
    page = page_of(build_report(small_plan(), tmp_path / "r.html", estimate=ESTIMATE))
    assert set(page.figures) == {"chart-comparison", "chart-timeline", "chart-memory", "chart-traffic"} <= page.ids


def test_an_estimate_that_is_not_the_plans_is_pointed_out(tmp_path: Path) -> None:
    page = page_of(build_report(small_plan(), tmp_path / "r.html", estimate=ESTIMATE))
    assert "Simulated anew" not in page.words("timeline")
    page = page_of(build_report(small_plan(), tmp_path / "r.html", estimate=replace(ESTIMATE, step_time_s=0.12)))
    assert "Simulated anew, the step takes 120 ms; when the plan was made it was 100 ms" in page.words("timeline")


def test_a_plan_alone_is_enough(tmp_path: Path) -> None:
    plan = small_plan().model_copy(update={"prediction": None, "alternatives": ()})
    page = page_of(build_report(plan, tmp_path / "r.html"))
    assert page.figures == {}
    assert "This plan carries no prediction" in page.words("verdict")
    assert "--model MODEL" in page.words("timeline")
    assert page.words("ranks").endswith("Not predicted.")


def test_a_plan_that_was_edited_says_so(tmp_path: Path) -> None:
    plan = small_plan()
    edited = plan.model_copy(update={"priced": plan.basis, "groups": plan.groups[::-1]})
    page = page_of(build_report(edited, tmp_path / "r.html"))
    assert "Not known: the plan was edited since it was priced." in page.words("ranks")
    assert "A large table." not in page.words("groups") + page.words("parameters")


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    path = build_report(small_plan(), tmp_path / "r.html", estimate=ESTIMATE)
    page = page_of(path)
    assert page.loads == []
    own = own_text(path)
    assert len(own) < 100_000 < path.stat().st_size
    assert "http:" not in own and "https:" not in own and "url(" not in own and "@import" not in own
    assert "default-src 'none'" in own


def test_what_a_hostile_plan_says_is_only_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    text = small_plan().model_dump_json().replace("A large table.", json.dumps(evil)[1:-1]).replace("zero1", evil)
    path = build_report(Plan.loads(text), tmp_path / "r.html", measured={evil: 0.2})
    page = page_of(path)
    assert "alert(1)" in page.words("groups") and "alert(2)" in page.words("verdict")
    assert "<script>alert" not in own_text(path) and "<img" not in own_text(path)
    assert html.escape(evil) in page.figures["chart-comparison"]["data"][0]["y"]


def test_a_large_model_stays_readable(tmp_path: Path) -> None:
    path = build_report(small_plan(num_layers=1000), tmp_path / "r.html")
    page = page_of(path)
    assert "0\u2013999 all_reduce 3000" in page.words("groups")
    assert "h.999.mlp.weight" in page.words("parameters")


def test_the_trace(tmp_path: Path) -> None:
    write_trace(ESTIMATE, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    lanes = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == {0: "rank 0", 1: "gloo"}
    assert [(lanes[e["tid"]], e["name"], e["cat"]) for e in events] == [
        (span.lane, span.name, span.name.split()[0]) for span in ESTIMATE.spans
    ]
    assert [e["ts"] for e in events] == pytest.approx([span.start_s * 1e6 for span in ESTIMATE.spans])
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(1e5)


def test_a_trace_needs_a_timeline(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="timeline=True"):
        write_trace(replace(ESTIMATE, spans=()), tmp_path / "trace.json")
