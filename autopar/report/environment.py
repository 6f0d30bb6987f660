"""Where a report was made, without importing torch."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version


def environment() -> list[tuple[str, str]]:
    """Facts of this machine and installation, as (name, value)."""
    return [
        ("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("autopar", installed("autopar")),
        ("torch", installed("torch")),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
    ]


def installed(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
