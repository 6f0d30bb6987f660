"""What pydantic found wrong, in words for the person who wrote the values: where, what was expected, what to do.

cluster.yaml:9: hosts[0].bandwith is not a field of a host; did you mean 'bandwidth'?
plan.json: groups[3].members: the list is empty
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from autopar.errors import did_you_mean
from autopar.spec.units import shown
from autopar.spec.yaml_source import Place, Source

MAX_REPORTED = 10
MAX_EXAMINED = 100
"""Problems that are put in words, of a file with thousands."""
MAX_KEY, MAX_MESSAGE = 60, 1_000
"""Characters of a key and of a sentence: files that users name may hold longer ones."""


class Problem(NamedTuple):
    """Something wrong, and where in the values."""

    place: Place
    message: str
    """A sentence that begins with what is at `place`, or stands behind its path and a colon."""
    names_itself: bool = False
    """Whether `message` already begins with the path."""


class Problems(ValueError):
    """Raised by a check of the values as a whole, which may find several problems."""

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__("; ".join(p.message for p in found))
        self.found = tuple(found)


def explain(error: ValidationError, model: type[BaseModel], source: Source | str | None = None) -> str:
    """The message for all problems that `model` found: one line, or their number and a line for each.

    `source` is where the values come from: a name, or a file whose lines are known; by default the model's name.
    """
    lines_of = source if isinstance(source, Source) else None
    name = lines_of.name if lines_of else str(source or model.__name__)
    errors = error.errors(include_url=False)
    several = len(errors) > MAX_EXAMINED
    errors = errors[:MAX_EXAMINED]
    # A required field that is misspelt is one problem, not two.
    misspelt = {(*e["loc"][:-1], _meant(e, model)) for e in errors if e["type"] == "extra_forbidden"}
    errors = [e for e in errors if e["type"] != "missing" or e["loc"] not in misspelt]
    problems = [p for e in errors for p in _problems(e, model, lines_of is not None)]
    if lines_of is not None:
        problems.sort(key=lambda p: lines_of.line(p.place))
    lines = [_line(p, name, lines_of) for p in problems]
    if len(lines) == 1:
        return lines[0]
    more = [f"... and {len(lines) - MAX_REPORTED} more"] if len(lines) > MAX_REPORTED else []
    count = f"more than {MAX_EXAMINED}" if several else str(len(lines))
    return "\n".join([f"{count} problems in {name}:", *lines[:MAX_REPORTED], *more])


def path_text(place: Place) -> str:
    """`("hosts", 0, "name")` as `hosts[0].name`."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p[:MAX_KEY]}" for p in place)
    return text.removeprefix(".")


def _line(problem: Problem, name: str, source: Source | None) -> str:
    # A short form (`2 x cpu`) stands for a place below it, which the file does not have.
    place = problem.place if source is None or problem.names_itself else source.nearest(problem.place)
    path = "" if problem.names_itself or not place else f"{path_text(place)}: "
    where = name if source is None else f"{name}:{source.line(problem.place)}"
    return f"{where}: {path}{problem.message[:MAX_MESSAGE]}"


_DASHES = "; begin each entry with '- '"


def _problems(error: Any, model: type[BaseModel], in_yaml: bool) -> Iterable[Problem]:
    """What one of pydantic's errors means."""
    place, value = tuple(error["loc"]), error["input"]
    cause = error.get("ctx", {}).get("error")
    path = path_text(place)
    match error["type"]:
        case "value_error" if isinstance(cause, Problems):
            return [Problem((*place, *p.place), p.message, p.names_itself) for p in cause.found]
        case "value_error":
            return [Problem(place, str(cause))]
        case "extra_forbidden":
            part = _part_at(model, place[:-1])
            known = list(part.model_fields)
            hint = did_you_mean(str(place[-1])[:MAX_KEY], known) or f"; its fields are {', '.join(known)}"
            return [Problem(place, f"{path} is not a field of {noun(part)}{hint}", names_itself=True)]
        case "missing":
            part = _part_at(model, place[:-1])
            return [Problem(place, f"{path} is missing: {noun(part)} needs it", names_itself=True)]
        case "model_type" | "model_attributes_type":
            part = _part_at(model, place)
            return [
                Problem(place, f"{shown(value)} is not {noun(part)}; its fields are {', '.join(part.model_fields)}")
            ]
        case "tuple_type":
            return [Problem(place, f"{shown(value)} is not a list{_DASHES if in_yaml else ''}")]
        case "too_short" if not value:
            return [Problem(place, "the list is empty")]
    expected = error["msg"].removeprefix("Input should be ")
    fault = f"is not possible; expected {expected}" if expected != error["msg"] else f"cannot be used: {expected}"
    return [Problem(place, f"{shown(value)} {fault}")]


def noun(part: type[BaseModel]) -> str:
    """What a part is called in messages: its `noun`, or the words of its name: `a sync group`."""
    name = getattr(part, "noun", "") or re.sub(r"(?<!^)(?=[A-Z])", " ", part.__name__.removesuffix("Spec")).lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _meant(error: Any, model: type[BaseModel]) -> str | None:
    """The field that an unknown one is nearest to."""
    *place, key = error["loc"]
    fields = _part_at(model, tuple(place)).model_fields
    hint = did_you_mean(str(key)[:MAX_KEY], fields)
    return next((field for field in fields if f"'{field}'" in hint), None)


def _part_at(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """The part of the description that stands at `place`."""
    for key in place:
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
