"""Records that are kept as JSON in files of their own, with a schema version, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.errors import SpecError


class Record(BaseModel):
    """Plain data that does not change, and has no fields but those it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(Record):
    """A record with a file of its own. Its first field is `schema_version`."""

    VERSION: ClassVar[int]
    """What `schema_version` must be."""
    WHAT: ClassVar[str]
    """What it is called in errors: `plan`."""
    COMMAND: ClassVar[str]
    """What writes such files: `autopar plan`."""
    ERROR: ClassVar[type[SpecError]] = SpecError

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads it from JSON; raises an error with the place and the cause where it cannot."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise cls.ERROR(f"{path}: cannot read the {cls.WHAT}: {e}") from e
        return cls.loads(text, str(path))

    @classmethod
    def loads(cls, text: str, source: str | None = None) -> Self:
        """Reads it from a JSON string; `source` is named in errors."""
        source = source or cls.WHAT
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as e:
            raise cls.ERROR(
                f"{source}: not JSON ({e}): the file is truncated or is no {cls.WHAT}; write it again with "
                f"`{cls.COMMAND}`"
            ) from e
        if not isinstance(data, dict):
            raise cls.ERROR(f"{source}: a {cls.WHAT} is a JSON object, this is a {type(data).__name__}")
        version = data.get("schema_version")
        if version != cls.VERSION:
            raise cls.ERROR(
                f"{source}: schema version {version!r}, this autopar reads version {cls.VERSION}: "
                f"make the {cls.WHAT} again with `{cls.COMMAND}`"
            )
        try:
            return cls.model_validate(data)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(x) for x in first["loc"]) or cls.WHAT
            raise cls.ERROR(f"{source}: {where}: {first['msg']}") from e
