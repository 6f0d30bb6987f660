"""Makes a finding small: greedily leaves out what it does not need to fail in the same way."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.outcome import Outcome
from benchmarks.fuzz.source import renamed

Try = Callable[[Case], Outcome]
_PLAIN = "torch.optim.SGD(grouped(parameters, 1, 0.1))"
_ASSIGNED = re.compile(r"^(h\d+) = (.*)", re.DOTALL)
_NAMES = re.compile(r"(?<![\w.])(?:h\d+|x|ids)\b")
_ATTRIBUTE = re.compile(r'self\.(\w+) = parameter\(|register_buffer\("(\w+)"|^self\.(\w+) = self\.')


def alike(a: Outcome, b: Outcome) -> bool:
    """Whether two findings are of one kind."""
    if {a.kind, b.kind} <= {"wrong", "drifted"}:
        return True
    return a.kind == b.kind and (a.kind in ("died", "hung", "disproved") or a.reason == b.reason)


def shrink(case: Case, outcome: Outcome, attempt: Try, seconds: float) -> Case:
    """The smallest case found within `seconds` that still fails as `outcome` says."""
    end = time.monotonic() + seconds
    if outcome.groups:
        case = replace(case, groups=outcome.groups)
    progress = True
    while progress:
        progress = False
        for make in _PASSES:
            position = 0
            while True:
                candidate = next((c for i, c in enumerate(make(case)) if i == position), None)
                if candidate is None:
                    break
                if time.monotonic() > end:
                    return case
                position += 1
                for smaller in dict.fromkeys((pruned(candidate), candidate)):
                    if smaller != case and alike(attempt(smaller), outcome):
                        case, progress = smaller, True
                        position = max(0, position - 1)
                        break
    return case


def pruned(case: Case) -> Case:
    """Without variables, parameters and buffers that nothing reads."""
    forward = list(case.forward)
    while True:
        unread = [
            i for i, line in enumerate(forward) if (m := _ASSIGNED.match(line)) and not _read(m[1], forward, case)
        ]
        if not unread:
            break
        del forward[unread[-1]]
    init = list(case.init)
    while True:
        read = "\n".join([*forward, case.output, case.loss, *(e.replace("model.", "self.") for _, e in case.events)])
        dropped = [
            line
            for line in init
            if (name := _held(line)) and not any(
                re.search(rf"self\.{name}\b", x) for x in [read, *(other for other in init if other != line)]
            )
        ]  # fmt: skip
        if not dropped:
            break
        init = [line for line in init if line not in dropped]
    text = "\n".join([*forward, case.output])
    inputs = tuple((n, e) for n, e in case.inputs if re.search(rf"\b{n}\b", text)) or case.inputs[:1]
    case = replace(case, forward=tuple(forward), init=tuple(init), inputs=inputs)
    if not case.groups:
        return case
    known = {_held(line) for line in init} | {"loss_fn.t"}
    groups = []
    for group in json.loads(case.groups):
        group["members"] = [m for m in group["members"] if m["name"] in known]
        groups += [group] if group["members"] else []
    return replace(case, groups=json.dumps(groups))


def _read(name: str, forward: list[str], case: Case) -> bool:
    """Whether anything but a variable's own assignments reads it."""
    others = [line for line in forward if not line.startswith(f"{name} = ")]
    return re.search(rf"\b{name}\b", "\n".join([*others, case.output])) is not None


def _held(line: str) -> str | None:
    found = _ATTRIBUTE.search(line)
    return None if found is None else found[1] or found[2] or found[3]


def _training(case: Case) -> Iterator[Case]:
    for steps in range(1, case.steps):
        yield replace(case, steps=steps, events=tuple(e for e in case.events if e[0] < steps))
    simpler: list[dict[str, Any]] = [
        {"plan_seed": 0, "groups": "", "recompute": "none"},
        *({"schedule": ""}, {"clip": None}, {"optimizer": _PLAIN}, {"events": ()}, {"recompute": "none"}),
        *({"late": False}, {"input_gradients": False}, {"form": "loss_fn"}, {"dtype": "float64"}, {"entry": "step"}),
        {"loss": "out.square().mean()", "targets": (), "sums": False},
        {"samples": tuple(s[:1] for s in case.samples)},
        *({"samples": tuple(tuple(min(n, most) for n in s) for s in case.samples)} for most in (1, 2)),
    ]
    for change in simpler:
        if change.get("form") == "loss_fn" and "self." in case.loss:
            change["loss"] = case.loss.partition(" + 0.01 * sum(p.")[0]
        smaller = replace(case, **change)
        if smaller != case and (smaller.plan_seed or smaller.world_size == 1):
            yield smaller


def _statements(case: Case) -> Iterator[Case]:
    assigned = [m[1] for x in case.forward if (m := _ASSIGNED.match(x))]
    for name in dict.fromkeys(assigned):  # the shortest beginning that fails
        if case.output != name:
            yield replace(case, output=name)
    for i in reversed(range(len(case.forward))):
        rest = case.forward[:i] + case.forward[i + 1 :]
        yield replace(case, forward=rest)
        made = _ASSIGNED.match(case.forward[i])
        if made is None:
            continue
        for name in dict.fromkeys(n for n in _NAMES.findall(made[2]) if n != made[1]):
            later = tuple(renamed(x, made[1], name) for x in case.forward[i + 1 :])
            yield replace(case, forward=case.forward[:i] + later, output=renamed(case.output, made[1], name))


def _values(case: Case) -> Iterator[Case]:
    """Plainer parameters, and constants and parameters in the place of each other."""
    for i, line in enumerate(case.init):
        for option in re.findall(r", (?:layout|dtype|trainable)=[\w.\"]+", line):
            yield replace(case, init=(*case.init[:i], line.replace(option, ""), *case.init[i + 1 :]))
        if ".data = " in line or _held(line) is None:
            yield replace(case, init=case.init[:i] + case.init[i + 1 :])
    for name in [n for line in case.init if (n := _held(line))]:
        for other in ("0.5", "x"):
            lines = tuple(renamed(x, f"self.{name}", other) for x in case.forward)
            if lines != case.forward:
                yield replace(case, forward=lines)


def _groups(case: Case) -> Iterator[Case]:
    if not case.groups:
        return
    groups = json.loads(case.groups)
    names = list(dict.fromkeys(m["name"] for g in groups for m in g["members"]))
    for name in names:
        if sum(m["name"] == name for g in groups for m in g["members"]) > 1:
            yield _regrouped(case, _whole(groups, name))
    for i, group in enumerate(groups):
        if group["strategy"] != "all_reduce":
            yield _regrouped(case, [*groups[:i], {**group, "strategy": "all_reduce", "options": {}}, *groups[i + 1 :]])
        for option in group.get("options", {}):
            rest = {k: v for k, v in group["options"].items() if k != option}
            yield _regrouped(case, [*groups[:i], {**group, "options": rest}, *groups[i + 1 :]])
    plain = [g for g in groups if g["strategy"] == "all_reduce"]
    if len(plain) > 1:
        members = [m for g in plain for m in g["members"]]
        others = [g for g in groups if g["strategy"] != "all_reduce"]
        yield _regrouped(case, [*others, {"strategy": "all_reduce", "members": members}])
    for i, group in enumerate(groups):
        if len(group["members"]) > 1:
            alone = {"strategy": "all_reduce", "members": group["members"][1:]}
            first = {**group, "members": group["members"][:1]}
            yield _regrouped(case, [*groups[:i], first, alone, *groups[i + 1 :]])


def _whole(groups: list[Any], name: str) -> list[Any]:
    """Groups with one parameter in one piece."""
    found, placed = [], False
    for group in groups:
        members = [m for m in group["members"] if m["name"] != name]
        if len(members) < len(group["members"]) and not placed:
            members, placed = [*members, {"name": name}], True
        found += [{**group, "members": members}] if members else []
    return found


def _regrouped(case: Case, groups: list[Any]) -> Case:
    return replace(case, groups=json.dumps(groups))


_PASSES: tuple[Callable[[Case], Iterator[Case]], ...] = (_training, _groups, _statements, _values)
