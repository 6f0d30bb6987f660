"""What all commands share: verbosity, where text goes, and tables.

Results go to stdout, progress and errors to stderr. Colour and boxes appear only on a terminal, and not where
`NO_COLOR` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from autopar.errors import AutoparWarning

_VERBOSITY = "autopar.verbosity"
_DEBUG = "autopar.debug"

F = TypeVar("F", bound=Callable[..., Any])


def standard_options(function: F) -> F:
    """Adds `-q`, `-v` and `--debug` to a command."""
    options = (
        click.option("--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Traceback on errors."),
        click.option("-v", "--verbose", count=True, expose_value=False, callback=_set_verbose, help="Say more."),
        click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_set_quiet, help="Only results."),
    )
    for option in options:
        function = option(function)
    return function


def json_option(function: F) -> F:
    """Adds `--json` to a command, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(function)


def progress(text: str) -> None:
    """Says on stderr what is being done; silent under `-q`."""
    if _verbosity() >= 0:
        click.echo(text, err=True)


def detail(text: str) -> None:
    """Says on stderr what only `-v` asks for."""
    if _verbosity() > 0:
        click.echo(text, err=True)


def is_verbose() -> bool:
    """Whether `-v` was given."""
    return _verbosity() > 0


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hides warnings that torch and other libraries raise about their own insides; `-v` shows them. autopar's own are
    said on stderr, without the line of its code that they come from."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def said(message: Warning | str, category: type[Warning], *of: Any, **more: Any) -> None:
            if issubclass(category, AutoparWarning):
                click.echo(f"warning: {message}", err=True)
            else:
                show(message, category, *of, **more)

        warnings.showwarning = said
        warnings.simplefilter("always", AutoparWarning)
        if _verbosity() <= 0:
            warnings.filterwarnings("ignore", module=r"(torch|transformers)(\.|$)")
            # It tells of each rank that it stops because another one failed.
            import logging

            logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        yield


class Ticker:
    """Progress that changes often: one line that is rewritten on a terminal, else a line every few seconds."""

    INTERVAL_S = 5.0

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._width = 0

    def __call__(self, text: str) -> None:
        if _verbosity() < 0:
            return
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._shown < (0.1 if terminal else self.INTERVAL_S):
            return
        self._shown = now
        if terminal:
            click.echo("\r" + text.ljust(self._width), nl=False, err=True)
            self._width = len(text)
        else:
            click.echo(text, err=True)

    def close(self) -> None:
        """Wipes the rewritten line."""
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)
            self._width = 0


def result(text: str) -> None:
    """Prints a result on stdout."""
    click.echo(text.rstrip("\n"))


def result_json(value: object) -> None:
    """Prints a result on stdout as JSON."""
    click.echo(json.dumps(value, indent=1))


def result_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> None:
    """Prints a table on stdout: with rules on a terminal, plain where it is read by another program."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        from autopar.formatting import table

        result("\n".join(table(header, rows, align, indent="")))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, letter in zip(header, align, strict=True):
        drawn.add_column(name, justify="right" if letter == "r" else "left")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)


def debugging(ctx: click.Context) -> bool:
    """Whether `--debug` was given."""
    return bool(ctx.meta.get(_DEBUG))


def output_option(function: F) -> F:
    """Adds `-o FILE`, passed on as `output`. Its folder must be there: better known before the work than after it."""
    return click.option("-o", "--output", metavar="FILE", callback=writable, help="Write the result here.")(function)


def calibration_option(function: F) -> F:
    """Adds `--calibration FILE`, passed on as `calibration`."""
    return click.option("--calibration", metavar="FILE", help="What `autopar calibrate` measured on the cluster.")(
        function
    )


def trials_option(function: F) -> F:
    """Adds `--trials FILE`, passed on as `trials`."""
    return click.option(
        "--trials",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Learn from trials that `autopar search --trials` has run on this cluster.",
    )(function)


def what_if_option(function: F) -> F:
    """Adds `--what-if`, passed on as `what_if`."""
    return click.option(
        "--what-if",
        is_flag=True,
        help="With --model: what would be decided with bandwidth, batch and hosts halved and doubled.",
    )(function)


def _verbosity() -> int:
    ctx = click.get_current_context(silent=True)
    return int(ctx.meta.get(_VERBOSITY, 0)) if ctx else 0


def writable(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """A callback for options that name a file to be written."""
    return None if value is None else writable_path(Path(value), ctx, param)


def writable_path(path: Path, ctx: click.Context, param: click.Parameter | None = None) -> Path:
    """The path of a file that can be written, as far as that is known before the work. Raises `BadParameter`."""
    from autopar.spec.files import check_writable

    try:
        if path.is_dir():
            raise click.BadParameter(f"'{path}' is a folder; give a file in it", ctx, param)
        if not path.parent.is_dir():
            raise click.BadParameter(f"the folder '{path.parent}' does not exist", ctx, param)
        check_writable(path)
    except (OSError, ValueError) as e:  # of the path: a zero byte, say
        why = e.strerror if isinstance(e, OSError) else e
        raise click.BadParameter(f"'{path}' cannot be written to ({why}): give another file", ctx, param) from e
    return path


def check_apart(read: dict[str, str | Path | None], written: dict[str, Path | None]) -> None:
    """Raises `UsageError` where a file would be written over one that is read, or over another one that is written.
    Both by what names the files on the command line; devices, as `/dev/null`, are not looked at."""
    told: dict[Path, str] = {Path(path).resolve(): name for name, path in read.items() if path is not None}
    for name, path in written.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        before = told.setdefault(path.resolve(), name)
        if before != name:
            raise click.UsageError(f"{name} '{path}' is the file of {before} as well: write it to another one")


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_VERBOSITY] = -1


def _set_verbose(ctx: click.Context, param: click.Parameter, value: int) -> None:
    if value:
        ctx.meta[_VERBOSITY] = value


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[_DEBUG] = value
