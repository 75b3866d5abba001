"""The command line: one verb a step, each a few lines over the function of the same name."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from pmvit import __version__
from pmvit.cli.compression import compress, info, measure, plan
from pmvit.cli.deployment import benchmark, compare, curve, export
from pmvit.cli.hub import push
from pmvit.cli.inspection import demo, evaluate, report, segment, serve, visualize
from pmvit.cli.screen import console, fail
from pmvit.cli.training import calibrate, finetune, run
from pmvit.errors import PmvitError

__all__ = ["app", "main"]

app = typer.Typer()
for verb in (  # in the order of work
    *(measure, plan, compress, calibrate, finetune, run, evaluate, segment, compare, curve),
    *(export, benchmark, report, visualize, serve, push, info, demo),
):
    app.command()(verb)


def main() -> None:
    """Run the command line.

    Exit code 0; 1 for what did not fit or failed, 2 for wrong usage, 130 when interrupted, 143 when terminated, 141
    when nobody reads the output any more.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        with console.shows_warnings():
            _command_line()(prog_name="pmvit")
    except PmvitError as error:
        fail(str(error), code=128 + getattr(error, "signal_number", -127))
    except Exception as error:
        if os.environ.get("PMVIT_DEBUG"):
            raise
        _fail_beside_others()
        fail(_said(error))


def _command_line() -> typer.Typer:
    """All verbs under one name.

    Options of its own it has only where they can be meant, before any verb: for such an option typer loads pydantic,
    even unused. And what makes help pretty takes as long to load as all the rest.
    """
    is_alone = "_PMVIT_COMPLETE" in os.environ or not sys.argv[1:] or sys.argv[1].startswith("-")
    result = typer.Typer(
        no_args_is_help=True,
        add_completion=is_alone,
        add_help_option=is_alone,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if is_alone:
        result.callback()(_pmvit)
    result.registered_commands = app.registered_commands
    return result


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pmvit {__version__}")
        raise typer.Exit


def _pmvit(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_show_version)] = False,
) -> None:
    """Prune and Merge: token compression for Vision Transformers."""


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """End as an error would: what is half-written is taken away."""
    _fail_beside_others(patience=0.5, code=128 + number)
    sys.exit(128 + number)


def _fail_beside_others(patience: float = 3.0, code: int = 1) -> None:
    """Where a process ended that others work with, launchers end these, too: say which it was."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "pmvit._system" in sys.modules:
        from pmvit._system import lost_processes

        if (lost := lost_processes(patience)) is not None:
            fail(lost, code)


def _said(error: Exception) -> str:
    """An error that is not pmvit's own, in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    reason = str(error).strip().splitlines()
    return f"{type(error).__name__}: {reason[0] if reason else 'no message'} (PMVIT_DEBUG=1 shows where)"
