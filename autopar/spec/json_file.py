"""Records that are kept as JSON in files of their own, with a schema version, and errors that say what to do."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.errors import SpecError
from autopar.spec.files import read_file, write_file
from autopar.spec.units import shown
from autopar.spec.validation import explain


class Record(BaseModel):
    """Plain data that does not change, and has no fields but those it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class JsonFile(Record):
    """A record with a file of its own. Its first field is `schema_version`."""

    VERSION: ClassVar[int]
    """What `schema_version` must be."""
    noun: ClassVar[str]
    """What it is called in errors: `plan`."""
    COMMAND: ClassVar[str]
    """What writes such files: `autopar plan`."""
    ERROR: ClassVar[type[SpecError]] = SpecError

    MAX_BYTES: ClassVar[int] = 64 << 20
    """Far beyond what is ever written, so that a wrong file is an error and not a long wait."""

    def save(self, path: str | Path) -> None:
        """Writes it as JSON; raises `SpecError` where it cannot, and leaves an old file as it was."""
        write_file(path, self.model_dump_json(indent=1) + "\n", self.noun)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads it from JSON; raises an error with the place and the cause where it cannot."""
        return cls.loads(read_file(path, cls.noun, cls.MAX_BYTES, cls.ERROR), str(path))

    @classmethod
    def loads(cls, text: str, source: str | None = None) -> Self:
        """Reads it from a JSON string; `source` is named in errors."""
        source = source or cls.noun
        try:
            data = read_json(text)
        except (ValueError, RecursionError) as e:
            raise cls.ERROR(
                f"{source}: not JSON ({e}): the file is truncated or is no {cls.noun}; write it again with "
                f"`{cls.COMMAND}`"
            ) from e
        if not isinstance(data, dict):
            raise cls.ERROR(f"{source}: a {cls.noun} is a JSON object, this is a {type(data).__name__}")
        version = data.get("schema_version")
        if type(version) is not int or version != cls.VERSION:
            raise cls.ERROR(
                f"{source}: schema version {shown(version)}, this autopar reads version {cls.VERSION}: "
                f"make the {cls.noun} again with `{cls.COMMAND}`"
            )
        try:
            found = cls.model_validate(data)
        except ValidationError as e:
            raise cls.ERROR(explain(e, cls, source)) from e
        try:
            found.check()
        except SpecError as e:
            raise cls.ERROR(f"{source}: {e}") from e
        return found

    def check(self) -> None:
        """Raises `SpecError` where what was read cannot be used, though each of its fields can."""


def read_json(text: str) -> Any:
    """JSON as the standard has it, with no key twice and with numbers that 64 bits hold. Raises `ValueError`, and
    `RecursionError` where it is nested too deep."""
    data = json.loads(text, object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_no_number)
    if _SURROGATE.search(text):
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"{e.object[e.start]!r} is half of a character") from e
    return data


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        double = next(key for i, (key, _) in enumerate(pairs) if key in (k for k, _ in pairs[:i]))
        raise ValueError(f"the key {shown(double)} is given twice")
    return found


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the number {digits[:20]}{'...' * (len(digits) > 20)} is too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]}{'...' * (len(digits) > 20)} is too large")
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")
