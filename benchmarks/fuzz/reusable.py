"""Values that nothing reads a second time, so that a step may write over their memory: where it must not, it shows."""

from __future__ import annotations

from benchmarks.fuzz.draft import Draft, Rejected
from benchmarks.fuzz.operators import view_of

_FRESH = ("F.linear({a}, {w})", "F.linear({a}, {w})", "{a} * {c}", "{a} + {p}", "torch.tanh({a})", "{a} @ {w}.T")
_SEVERAL = (
    "F.layer_norm({a}, {a}.shape[-1:])", "F.layer_norm({a}, {a}.shape[-1:], 1 + {p})", "{a}.sort(-1).values",
    "{a}.max(-1, keepdim=True).values", "F.group_norm({a}, 1)", "torch.var_mean({a}, -1, keepdim=True)[1]",
    "{a}.chunk(2, -1)[0]", "{a}.topk(1, -1).values", "{a}.unbind(-1)[0]",
)  # fmt: skip
"""Operators with several results, of which one is taken."""
_THEN = ("torch.tanh({t})", "torch.sigmoid({t})", "torch.relu({t})", "-{t}", "{t} * {c}", "{t} + {c}", "{t} / {p2}")
_WITH_OWN_VIEW = ("{t} - {v}", "{t} + {v}", "torch.add({t}, {v}, alpha={c})", "torch.sub({t}, {v}, alpha={c})",
                  "{v} + {t}", "{t} * 0.5 + {v}", "{t} - {v} * {c}")  # fmt: skip
_OWN_VIEWS = ("{t}[..., :1]", "{t}[..., 0, None]", "{t}.narrow(-1, 0, 1)", "{t}.select(-1, 0)", "{t}.diagonal()",
              "{t}.T", "{t}[0]", "{t}[:, :1]", "{t}.transpose(-1, -2)")  # fmt: skip


def overlapping(d: Draft) -> list[str]:
    """An elementwise operator whose other operand is a view of the same value: `h - h[:, :1]`."""
    a = d.pick(lambda v: len(v.shape) > 1 and v.shape[-1] is not None)
    made = d.rng.choice(_FRESH)
    parts = {"a": a.name, "c": f"{d.constant()}"}
    if "{w}" in made:
        parts["w"] = d.parameter((d.rng.choice((2, 3, 4)), a.shape[-1]))
    if "{p}" in made:
        parts["p"] = d.parameter(a.shape[-1:])
    value = _alone(d, made.format(**parts))
    rank = len(d.shape(value))
    for _ in range(8):
        view = d.rng.choice(_OWN_VIEWS).format(t=value) if d.rng.random() < 0.7 else view_of(d, value, rank)
        both = d.rng.choice(_WITH_OWN_VIEW).format(t=value, v=view, c=f"{d.constant()}")
        try:
            d.keep([f"{d.new()} = {both}"])
        except Rejected:
            continue
        return _forgotten(d, value)
    raise Rejected("no view of it broadcasts with it")


def of_several(d: Draft) -> list[str]:
    """One of an operator's several results, and an elementwise operator that may write over it."""
    a = d.pick(lambda v: len(v.shape) > 1 and v.shape[-1] is not None)
    made = d.rng.choice(_SEVERAL)
    parts = {"a": a.name} | ({"p": d.parameter(a.shape[-1:])} if "{p}" in made else {})
    value = _alone(d, made.format(**parts))
    then = d.rng.choice(_THEN[:2] if d.narrow else _THEN)
    d.keep([f"{d.new()} = {then.format(t=value, c=d.constant(), p2=abs(d.constant()))}"])
    return _forgotten(d, value)


def _alone(d: Draft, expression: str) -> str:
    name = d.new()
    d.keep([f"{name} = {expression}"])
    return name


def _forgotten(d: Draft, value: str) -> list[str]:
    """No later statement may read the value."""
    d.variables.pop(value, None)
    return []
