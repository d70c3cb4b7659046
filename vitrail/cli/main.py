"""Entry point of the command line: the commands, error reporting and exit codes.

Nothing slow to import is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import io
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from cyclopts import App, Parameter
from rich import markup

from vitrail import __version__
from vitrail.cli.check import check
from vitrail.cli.compare import compare
from vitrail.cli.convert import convert
from vitrail.cli.demo import demo
from vitrail.cli.evaluate import evaluate
from vitrail.cli.explain import explain
from vitrail.cli.fewshot import fewshot
from vitrail.cli.knn import knn
from vitrail.cli.models import models
from vitrail.cli.pack import pack
from vitrail.cli.paper import paper
from vitrail.cli.plan import plan
from vitrail.cli.predict import predict
from vitrail.cli.recipes import recipes
from vitrail.cli.train import train
from vitrail.cli.transfer import transfer
from vitrail.cli.vtab import vtab
from vitrail.errors import CommandError, Note, error_reason
from vitrail.interrupt import Interrupted, exit_on_signals
from vitrail.terminal import SafeConsole, escape

UNEXPECTED = 70  # exit code: EX_SOFTWARE
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # messages of torch and the OS
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _default_text(value: object) -> str | None:
    """Return a default value as the help shows it, or None for no text."""
    if value is None or value is False or value == ():
        return None
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


app = App(
    name="vitrail",
    version=f"vitrail {__version__}",
    help="Vision Transformers: from a folder of images to a trained, measured classifier.",
    help_epilogue="Start with `vitrail demo`. To train on your own images, put each class in a folder of photos/, "
    "then run `vitrail train photos/` and `vitrail predict runs/photos new.jpg`. `vitrail COMMAND "
    "--help` lists the options of a command.",
    default_parameter=Parameter(negative=(), show_default=_default_text),
    console=SafeConsole(),  # errors repeat file names that were typed or globbed
    error_console=SafeConsole(stderr=True),
    suppress_keyboard_interrupt=False,  # `main` reports it
)

COMMANDS: dict[Callable[..., None], str] = {  # in the order of the help, with the usage of each
    demo: "[OPTIONS]",
    check: "DATA [OPTIONS]",
    train: "DATA [OPTIONS]",
    transfer: "DATA --from WEIGHTS [OPTIONS]",
    evaluate: "WEIGHTS DATA [OPTIONS]",
    fewshot: "WEIGHTS DATA... [OPTIONS]",
    knn: "WEIGHTS DATA... [OPTIONS]",
    vtab: "[WEIGHTS FOLDER] [OPTIONS]",
    compare: "RUNS... [OPTIONS]",
    predict: "WEIGHTS IMAGES... [OPTIONS]",
    explain: "WEIGHTS [IMAGES...] [OPTIONS]",
    pack: "DATA OUT [OPTIONS]",
    plan: "MODEL [OPTIONS]",
    convert: "SOURCE TARGET --to LAYOUT [OPTIONS]",
    models: "[OPTIONS]",
    recipes: "[NAME]",
    paper: "NAME WEIGHTS... [OPTIONS]",
}
for order, (command, usage) in enumerate(COMMANDS.items()):
    app.command(command, sort_key=order, help_epilogue="", usage=f"Usage: vitrail {command.__name__} {usage}")


def main() -> None:
    """Run a command. An error that the user can fix is printed as a message without traceback."""
    _reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # a file name that is not valid UTF-8 must not stop the output
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with contextlib.suppress(io.UnsupportedOperation):  # no file descriptor
        faulthandler.enable()  # print a stack trace if compiled code crashes
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    code = _run()
    _discard_unwritable_output()
    _exit(code)


def _run() -> int | str | None:
    """Run the command, report its error if it has one, and return the exit code."""
    try:
        try:
            with exit_on_signals():
                app()
            code = None
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()  # inside the try, so that a write error is reported
        return code
    except CommandError as error:
        if not error.reported:
            _print_stderr(escape(str(error)) if isinstance(error, Interrupted) else _error_markup(str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        _print_stderr("stopped")
        return 128 + signal.SIGINT
    except BrokenPipeError as error:
        if not _output_pipe_closed():  # another pipe broke
            return _unexpected(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, OSError) and (_discard_unwritable_output() or error.errno in DISK_FULL):
            return _fail(f"cannot write {error.filename or 'the output'}: {error_reason(error)}")
        if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in OUT_OF_MEMORY):
            return _fail("out of memory: use a smaller model, --image-size or --batch-size")
        return _unexpected(error)


def _exit(code: int | str | None) -> None:
    """Exit, after a signal without waiting for threads that are decoding images."""
    decoding = any(thread.name.startswith("vitrail") for thread in threading.enumerate())
    if isinstance(code, int) and code > 128 and decoding:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _fail(message: str) -> int:
    _print_stderr(_error_markup(message))
    return CommandError.exit_code


def _error_markup(message: str) -> str:
    return f"[bold red]error:[/] {escape(message)}"


def _unexpected(error: Exception) -> int:
    """Report a bug in vitrail, and save its traceback, since the run that led to it may have been long."""
    text = traceback.format_exc().encode(errors="backslashreplace")
    where = "above" if os.environ.get("VITRAIL_TRACEBACK") else ""
    if not where:
        with contextlib.suppress(OSError):
            number, where = tempfile.mkstemp(prefix="vitrail-traceback-", suffix=".txt")
            with open(number, "wb") as file:
                file.write(text)
            where = f"in {where}"
    if not where.startswith("in "):
        _print_stderr(markup.escape(text.decode()))
    _fail(f"internal error: {type(error).__name__}: {error}")
    _print_stderr(escape(f"Please report this bug, with the command and the traceback {where or 'above'}."))
    return UNEXPECTED


def _reopen_closed_streams() -> None:
    """Open streams that the shell closed (`>&-`) on /dev/null, or the next file opened would get their output."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def _output_pipe_closed() -> bool:
    """Whether the reader of stdout or stderr has closed the pipe, as `head` does."""
    if not hasattr(select, "poll"):  # Windows
        return True
    outputs = select.poll()
    for stream in (sys.stdout, sys.stderr):
        outputs.register(stream.fileno(), 0)  # errors are always reported
    return bool(outputs.poll(0))


def _discard_unwritable_output() -> bool:
    """Redirect streams that fail to flush to /dev/null, since Python flushes them again at exit.

    Returns whether any failed.
    """
    failed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            failed = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no file descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failed


def _show_warning(default: Callable[..., None], message: Warning | str, *args: Any, **kwargs: Any) -> None:
    if isinstance(message, Note):
        _print_stderr(f"[yellow]note:[/] {escape(str(message))}")
    else:
        default(message, *args, **kwargs)


def _print_stderr(text: str) -> None:
    with contextlib.suppress(OSError, SystemExit):  # SystemExit: rich exits when the pipe is closed
        SafeConsole(stderr=True, soft_wrap=True).print(text)
