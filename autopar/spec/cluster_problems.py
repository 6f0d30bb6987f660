"""What is wrong with a cluster description, in words, with file and line.

cluster.yaml:9: hosts[0].bandwith is not a field of a host; did you mean 'bandwidth'?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from autopar.errors import did_you_mean
from autopar.spec.units import shown
from autopar.spec.yaml_source import Place, Source

MAX_REPORTED = 10
MAX_EXAMINED = 100
"""Problems that are put in words, of a file with thousands."""


class Problem(NamedTuple):
    """Something wrong, and where in the description."""

    place: Place
    said: str
    """A sentence that begins with what is at `place`, or stands behind its path and a colon."""
    names_itself: bool = False
    """Whether `said` already begins with the path."""


class Problems(ValueError):
    """Raised by a check of the whole description, which may find several problems."""

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__("; ".join(p.said for p in found))
        self.found = tuple(found)


def report(error: ValidationError, model: type[BaseModel], source: Source | None = None) -> str:
    """The message for all problems of a description: one line, or their number and a line for each."""
    errors = error.errors(include_url=False)
    several = len(errors) > MAX_EXAMINED
    errors = errors[:MAX_EXAMINED]
    # A required field that is misspelt is one problem, not two.
    misspelt = {(*e["loc"][:-1], _meant(e, model)) for e in errors if e["type"] == "extra_forbidden"}
    errors = [e for e in errors if e["type"] != "missing" or e["loc"] not in misspelt]
    problems = [p for e in errors for p in _problems(e, model)]
    if source is not None:
        problems.sort(key=lambda p: source.line(p.place))
    lines = [_line(p, model, source) for p in problems]
    if len(lines) == 1:
        return lines[0]
    more = [f"... and {len(lines) - MAX_REPORTED} more"] if len(lines) > MAX_REPORTED else []
    count = f"more than {MAX_EXAMINED}" if several else str(len(lines))
    return "\n".join([f"{count} problems in {_named(model, source)}:", *lines[:MAX_REPORTED], *more])


def path_text(place: Place) -> str:
    """`("hosts", 0, "name")` as `hosts[0].name`."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)
    return text.removeprefix(".")


def _line(problem: Problem, model: type[BaseModel], source: Source | None) -> str:
    # A short form (`2 x cpu`) stands for a place below it, which the file does not have.
    place = problem.place if source is None or problem.names_itself else source.nearest(problem.place)
    path = "" if problem.names_itself or not place else f"{path_text(place)}: "
    where = _named(model, source) if source is None else f"{source.name}:{source.line(problem.place)}"
    return f"{where}: {path}{problem.said}"


def _named(model: type[BaseModel], source: Source | None) -> str:
    return model.__name__ if source is None else source.name


def _problems(error: Any, model: type[BaseModel]) -> Iterable[Problem]:
    """What one of pydantic's errors means."""
    place, value = tuple(error["loc"]), error["input"]
    cause = error.get("ctx", {}).get("error")
    path = path_text(place)
    match error["type"]:
        case "value_error" if isinstance(cause, Problems):
            return [Problem((*place, *p.place), p.said, p.names_itself) for p in cause.found]
        case "value_error":
            return [Problem(place, str(cause))]
        case "extra_forbidden":
            part = _part_at(model, place[:-1])
            known = list(part.model_fields)
            hint = did_you_mean(str(place[-1]), known) or f"; its fields are {', '.join(known)}"
            return [Problem(place, f"{path} is not a field of {_noun(part)}{hint}", names_itself=True)]
        case "missing":
            part = _part_at(model, place[:-1])
            return [Problem(place, f"{path} is missing: {_noun(part)} needs it", names_itself=True)]
        case "model_type" | "model_attributes_type":
            part = _part_at(model, place)
            return [
                Problem(place, f"{shown(value)} is not {_noun(part)}; its fields are {', '.join(part.model_fields)}")
            ]
        case "tuple_type":
            return [Problem(place, f"{shown(value)} is not a list; begin each entry with '- '")]
        case "too_short":
            return [Problem(place, "the list is empty")]
    return [Problem(place, f"{shown(value)}: {error['msg']}")]


def _meant(error: Any, model: type[BaseModel]) -> str | None:
    """The field that an unknown one is nearest to."""
    *place, key = error["loc"]
    fields = _part_at(model, tuple(place)).model_fields
    hint = did_you_mean(key, fields)
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


def _noun(part: type[BaseModel]) -> str:
    return str(getattr(part, "noun", part.__name__))
