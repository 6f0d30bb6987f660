"""What users write of a cluster: figures with units, names, and parts with a short form.

A part can be written short where it is simple (`2 x cpu`, `25 Gbit/s`, `NVLink3`) and in full where it is not; both
mean the same object, and it is written back in the shorter form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from autopar.errors import ClusterSpecError, did_you_mean
from autopar.spec import units
from autopar.spec.units import Dimension, Figure
from autopar.spec.validation import explain


class Written(BaseModel):
    """What all parts share: they do not change, know their fields, may have a short form, and complain in the same
    words from Python as from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    noun: ClassVar[str] = ""
    """What it is called in messages, where that is not its class's name."""
    short: ClassVar[str] = ""
    """The field that text stands for, where it is the only one: `25GbE` for `{kind: 25GbE}`."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as e:
            raise ClusterSpecError(explain(e, type(self))) from None

    # Pydantic's own mark for an `__init__` that only wraps: parts inside parts are validated in place, so that an
    # error names the whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def lengthen(cls, data: Any) -> Any:
        """The fields that a short form stands for."""
        return {cls.short: data} if cls.short and isinstance(data, str) else data

    @classmethod
    def shorten(cls, fields: dict[str, Any]) -> Any:
        """The short form of the fields that are set, where they have one."""
        return fields[cls.short] if fields.keys() == {cls.short} else fields

    @model_validator(mode="before")
    @classmethod
    def _lengthen(cls, data: Any) -> Any:
        return cls.lengthen(data)

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        return self.shorten(full(self))


class OneFigure(Written):
    """Figures of one dimension. Short: one figure for all of them."""

    dimension: ClassVar[Dimension]

    @classmethod
    def lengthen(cls, data: Any) -> Any:
        in_full = isinstance(data, dict | BaseModel)
        return data if in_full else dict.fromkeys(cls.model_fields, units.parse(data, cls.dimension))

    @classmethod
    def shorten(cls, fields: dict[str, Any]) -> Any:
        same = len(fields) == len(cls.model_fields) and len(set(fields.values())) == 1
        return next(iter(fields.values())) if same else fields


def _quantity(dimension: Dimension) -> tuple[PlainValidator, PlainSerializer]:
    return (
        PlainValidator(lambda value: units.parse(value, dimension)),
        PlainSerializer(lambda figure: units.text(figure, dimension)),
    )


def whole(most: int) -> PlainValidator:
    """Checks that a number is whole, and from 1 to `most`."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{units.shown(value)} is not possible; expected a whole number from 1 to {most}")
        return value

    return PlainValidator(check)


def listed(value: Any) -> Any:
    """A list, where one thing may stand for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


def check_kind(kind: str | None, library: Iterable[str], complete: object, figures: str = "its bandwidth") -> None:
    """Raises `ValueError` for a kind that the library lacks, unless the description is `complete` without it."""
    if kind is None or kind in library or complete:
        return
    hint = did_you_mean(kind, library)
    known = f"{hint} Else give" if hint else f"; it has {', '.join(library)}. Of other kinds, give"
    raise ValueError(f"'{kind}' is not in the library{known} {figures}")


def _name(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62})", value):
        return value
    hint = "" if isinstance(value, str) else "; if it is meant as text, put quotes around it"
    expected = "expected letters, digits, '-', '_' and '.', beginning with a letter or digit"
    raise ValueError(f"{units.shown(value)} is no name; {expected}{hint}")


def _kind(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._+/-]{0,62}", value):
        return value
    raise ValueError(f"{units.shown(value)} is no kind; expected a name as 'A100-80GB'")


def _yes_no(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{units.shown(value)} is neither true nor false")


Size = Annotated[Figure, *_quantity(units.SIZE)]
Duration = Annotated[Figure, *_quantity(units.DURATION)]
NetworkRate = Annotated[Figure, *_quantity(units.NETWORK_RATE)]
MemoryRate = Annotated[Figure, *_quantity(units.MEMORY_RATE)]
FlopRate = Annotated[Figure, *_quantity(units.FLOP_RATE)]
Name = Annotated[str, PlainValidator(_name)]
Kind = Annotated[str, PlainValidator(_kind)]
YesNo = Annotated[bool, PlainValidator(_yes_no)]
