"""The group of commands, and how errors become messages and exit codes.

Exit codes: 0 done; 1 an error inside autopar; 2 something the user wrote (usage, a file, a model) cannot be used;
3 no plan satisfies the constraints; 4 verification failed; 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Mapping

import click

from autopar.cli.console import debugging
from autopar.errors import AutoparError, CollectiveError, InfeasibleError, VerificationError, did_you_mean

INTERNAL_ERROR = 1
USAGE_ERROR = 2
INFEASIBLE = 3
VERIFICATION_FAILED = 4
INTERRUPTED = 130

# In the order of a user's work. The line is kept here, so that `autopar --help` imports no command.
COMMANDS: Mapping[str, str] = {
    "doctor": "Show what this machine offers.",
    "calibrate": "Measure a cluster, so that plans for it rest on what it does.",
    "plan": "Make a plan for a model and a cluster, without the cluster.",
    "search": "Search a plan for longer, with a journal that can be resumed.",
    "explain": "Say in words what a plan does, and why.",
    "run": "Start a training script under torchrun with a plan.",
    "serve": "Add gradients up, on a host without devices.",
    "lab": "Emulate a cluster on this machine, and run on it.",
    "verify": "Prove that a plan trains as one process would.",
    "report": "Write a plan as one HTML file that opens offline.",
}


class Commands(click.Group):
    """A click group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"autopar.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = did_you_mean(args[0], COMMANDS) or ";"
            raise click.UsageError(f"no command '{args[0]}'{near} commands: {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except Exception as e:
            if isinstance(e, OSError) and e.errno == errno.EPIPE:
                raise  # who read the output has gone: click ends quietly
            if debugging(ctx):
                import traceback

                traceback.print_exception(e, file=sys.stderr)
            click.echo(f"error: {_message(e)}", err=True)
            raise click.exceptions.Exit(exit_code(e)) from e


def exit_code(error: Exception) -> int:
    """The exit code for an error."""
    if isinstance(error, InfeasibleError):
        return INFEASIBLE
    if isinstance(error, VerificationError):
        return VERIFICATION_FAILED
    if (isinstance(error, AutoparError) and not isinstance(error, CollectiveError)) or _cannot_be_written(error):
        return USAGE_ERROR
    return INTERNAL_ERROR


def _cannot_be_written(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _message(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return str(error)
    if isinstance(error, OSError) and _cannot_be_written(error):
        return f"{error.filename or 'the output'}: cannot be written: {error.strerror}"
    return (
        f"{type(error).__name__}: {error}\n"
        "This was not expected and is probably a fault of autopar; --debug shows where it happened."
    )


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"autopar {version('autopar')}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 internal error, 2 usage or input, 3 no feasible plan, 4 verification failed, "
    "130 interrupted.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version."
)
def app() -> None:
    """Plans, runs and proves distributed training of PyTorch models.

    MODEL is `package.module:factory` or `path/to/file.py:factory`: a function without arguments that returns the
    model and example inputs.
    """
