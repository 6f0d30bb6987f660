"""The command line. One file a command; a command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    from autopar.cli.app import app

    app(prog_name="autopar")
