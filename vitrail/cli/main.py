"""The command line: thin subcommands over `vitrail.runs`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape

from vitrail import __version__
from vitrail.cli import data, explaining, measuring, networks, tasks, training
from vitrail.errors import Note, UserError

app = App(
    name="vitrail",
    version=f"vitrail {__version__}",
    help="Vision Transformers: from a folder of images to a trained, measured classifier.",
    help_epilogue="First steps: `vitrail demo`; then `vitrail train photos/` on a folder with one folder of images per "
    "class; then `vitrail predict runs/photos new.jpg`. Each command has a page: `vitrail train --help`.",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,  # `main` says that the command was stopped
)

for command in (
    training.demo,
    data.check,
    training.train,
    training.transfer,
    measuring.evaluate,
    tasks.fewshot,
    tasks.knn,
    tasks.vtab,
    measuring.compare,
    training.predict,
    explaining.explain,
    data.pack,
    networks.plan,
    networks.convert,
    networks.models,
    networks.recipes,
    explaining.paper,
):
    app.command(command, help_epilogue="")


def main() -> None:
    """Run a command; what the user can fix is one sentence on standard error, never a traceback."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):  # file names need not be text; they must not stop the rows after them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with contextlib.suppress(io.UnsupportedOperation):  # of a stream without a file
        faulthandler.enable()  # a crash in compiled code says where it was, and not nothing at all
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    try:
        app()
    except UserError as error:
        _fail("" if getattr(error, "told", False) else str(error), 2)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        if not _reader_left():  # a pipe of something else, which is no end to be silent about
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        stopped_by = getattr(error, "signal_number", None)  # train.interrupt.Interrupted, whose import needs torch
        if stopped_by is None:
            raise
        if not getattr(error, "told", False):
            _say(escape(str(error)))
        sys.exit(128 + stopped_by)


def _open_what_is_closed() -> None:
    """What the shell closed (`>&-`) goes nowhere; else the next file that is opened would get what we say."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def _reader_left() -> bool:
    """Whether whoever read our output went away, as `head` does."""
    if not hasattr(select, "poll"):  # Windows
        return True
    outputs = select.poll()
    for stream in (sys.stdout, sys.stderr):
        outputs.register(stream.fileno(), 0)  # of broken ones it tells unasked
    return bool(outputs.poll(0))


def _fail(sentence: str, code: int) -> None:
    if sentence:  # else another process of the run tells it
        _say(f"[bold red]error:[/] {escape(sentence)}")
    sys.exit(code)


def _show_warning(usual: Callable[..., None], message: Warning | str, *others: Any, **more: Any) -> None:
    if isinstance(message, Note):
        _say(f"[yellow]note:[/] {escape(str(message))}")
    else:
        usual(message, *others, **more)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, SystemExit):  # nobody there to read it, which rich would end with
        Console(stderr=True, highlight=False, soft_wrap=True).print(text)
