"""The report's charts, as Plotly figures in JSON. Text, grid and background take their colours in the page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.formatting import duration, size
from autopar.report.trace import category

if TYPE_CHECKING:
    from autopar.cost_models.base import Estimate
    from autopar.report.rows import Compared

# Told apart by brightness as well as by hue, and readable on white and on black (after Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#3d7ab8", "#d9822b", "#2f9e76", "#a56ba8", "#6fb1d8", "#8a8f98"
WORK_COLOURS = {"forward": SKY, "backward": BLUE, "pack": GREY, "update": GREEN, "store": "#5b6670", "deliver": GREY}
COMMUNICATION = (ORANGE, PURPLE, "#c2a23a", "#b5524b", "#7d8f3a")

_MAX_SPANS = 20_000


def comparison(bars: Sequence[Compared]) -> dict[str, Any]:
    """Predicted step times with their intervals, and measured ones beside them. Lower is better."""
    import plotly.graph_objects as go

    names = [html.escape(bar.name) for bar in bars]
    predicted = [bar.prediction.step_time_s if bar.prediction else None for bar in bars]
    figure = go.Figure()
    figure.add_bar(
        name="predicted",
        orientation="h",
        y=names,
        x=[_ms(s) for s in predicted],
        error_x={"type": "data", "array": [bar.half_interval_s * 1e3 for bar in bars], "thickness": 1.2, "width": 4},
        marker={"color": BLUE, "opacity": [1.0] + [0.5] * (len(bars) - 1)},
        customdata=[duration(s) if s is not None else "" for s in predicted],
        hovertemplate="%{y}: predicted %{customdata}<extra></extra>",
    )
    measured = any(bar.measured_s is not None for bar in bars)
    if measured:
        figure.add_bar(
            name="measured",
            orientation="h",
            y=names,
            x=[_ms(bar.measured_s) for bar in bars],
            marker_color=ORANGE,
            customdata=[duration(bar.measured_s) if bar.measured_s is not None else "" for bar in bars],
            hovertemplate="%{y}: measured %{customdata}<extra></extra>",
        )
    _axes(figure, "step time, ms (lower is better)", height=90 + (44 if measured else 32) * len(bars))
    figure.update_layout(barmode="group", showlegend=measured, bargap=0.35)
    figure.update_yaxes(autorange="reversed")
    return _plain(figure)


def timeline(estimate: Estimate) -> dict[str, Any]:
    """The compute streams and the channels over one step."""
    import plotly.graph_objects as go

    spans = estimate.spans[:_MAX_SPANS]
    lanes = list(dict.fromkeys(span.lane for span in spans))
    kinds = list(dict.fromkeys(category(span.name) for span in spans))
    others = [kind for kind in kinds if kind not in WORK_COLOURS]
    figure = go.Figure()
    for kind in kinds:
        mine = [span for span in spans if category(span.name) == kind]
        colour = WORK_COLOURS.get(kind) or COMMUNICATION[others.index(kind) % len(COMMUNICATION)]
        figure.add_bar(
            name=kind.replace("_", "-"),
            orientation="h",
            y=[html.escape(span.lane) for span in mine],
            base=[span.start_s * 1e3 for span in mine],
            x=[(span.stop_s - span.start_s) * 1e3 for span in mine],
            marker={"color": colour, "line": {"width": 0.5, "color": "rgba(127,127,127,0.6)"}},
            customdata=[[html.escape(span.name), duration(span.stop_s - span.start_s)] for span in mine],
            hovertemplate="%{y}: %{customdata[0]}, %{customdata[1]} from %{base:.3f} ms<extra></extra>",
        )
    _axes(figure, "time in the step, ms", height=130 + 46 * len(lanes))
    figure.update_layout(barmode="overlay", bargap=0.25, showlegend=True, dragmode="zoom")
    figure.update_xaxes(range=[0, estimate.step_time_s * 1.01e3])
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=lanes, fixedrange=True)
    return _plain(figure)


def memory(peaks: Sequence[int], held_parameters: int) -> dict[str, Any]:
    """Peak memory of each rank: its parameters, and all the rest."""
    import plotly.graph_objects as go

    ranks = [f"rank {i}" for i in range(len(peaks))]
    figure = go.Figure()
    for name, values, colour in (
        ("parameters", [min(held_parameters, peak) for peak in peaks], BLUE),
        ("all else", [max(0, peak - held_parameters) for peak in peaks], SKY),
    ):
        _sizes(figure, name, ranks, values, colour)
    _axes(figure, "peak memory, MiB", height=_rank_height(len(ranks)))
    figure.update_layout(barmode="stack", bargap=0.3, showlegend=True)
    figure.update_yaxes(autorange="reversed")
    return _plain(figure)


def traffic(sent: Sequence[int], received: Sequence[int]) -> dict[str, Any]:
    """Bytes that each rank sends and receives in one step."""
    import plotly.graph_objects as go

    ranks = [f"rank {i}" for i in range(len(sent))]
    figure = go.Figure()
    _sizes(figure, "sent", ranks, sent, ORANGE)
    _sizes(figure, "received", ranks, received, GREY)
    _axes(figure, "bytes per step, MiB", height=_rank_height(len(ranks), 40))
    figure.update_layout(barmode="group", bargap=0.3, showlegend=True)
    figure.update_yaxes(autorange="reversed")
    return _plain(figure)


def _sizes(figure: Any, name: str, ranks: Sequence[str], values: Sequence[int], colour: str) -> None:
    figure.add_bar(
        name=name,
        orientation="h",
        y=ranks,
        x=[v / 2**20 for v in values],
        marker_color=colour,
        customdata=[size(v) for v in values],
        hovertemplate=f"%{{y}}: {name} %{{customdata}}<extra></extra>",
    )


def _rank_height(ranks: int, each: int = 30) -> int:
    return min(900, 110 + each * ranks)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _axes(figure: Any, x_title: str, height: int) -> None:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 16, "t": 34, "b": 44},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(title={"text": x_title, "standoff": 8}, zeroline=False, rangemode="tozero", showgrid=True)
    figure.update_yaxes(automargin=True, ticksuffix="  ", showgrid=False)


def _plain(figure: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(figure.to_json())
    return plain
