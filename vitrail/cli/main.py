"""The command line: thin subcommands over `vitrail.commands`. Nothing heavy is imported before a command needs it."""

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
NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # as torch and the system put it
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = App(
    name="vitrail",
    version=f"vitrail {__version__}",
    help="Vision Transformers: from a folder of images to a trained, measured classifier.",
    help_epilogue="First steps: `vitrail demo`; then `vitrail train photos/` on a folder with one folder of images per "
    "class; then `vitrail predict runs/photos new.jpg`. Each command has a page: `vitrail train --help`.",
    default_parameter=Parameter(negative=()),
    console=SafeConsole(),  # for help; names that were typed or globbed come back in errors
    error_console=SafeConsole(stderr=True),
    suppress_keyboard_interrupt=False,  # `main` says that the command was stopped
)

for command in (
    demo,
    check,
    train,
    transfer,
    evaluate,
    fewshot,
    knn,
    vtab,
    compare,
    predict,
    explain,
    pack,
    plan,
    convert,
    models,
    recipes,
    paper,
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
    code = _run()
    _let_go_of_output()
    _leave(code)


def _run() -> int | str | None:
    """The exit code, with what is to say about it said."""
    try:
        try:
            with exit_on_signals():
                app()
            code = None
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()  # here, where it can be told
        return code
    except CommandError as error:
        if not error.reported:
            _say(escape(str(error)) if isinstance(error, Interrupted) else _as_error(str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        _say("stopped")
        return 128 + signal.SIGINT
    except BrokenPipeError as error:
        if not _reader_left():  # a pipe of something else, which is no end to be silent about
            return _unexpected(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, OSError) and (_let_go_of_output() or error.errno in DISK_FULL):
            return _failed(f"cannot write {error.filename or 'the output'}: {error_reason(error)}")
        if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            return _failed("there is not enough memory for this: use a smaller model, image size or batch")
        return _unexpected(error)


def _leave(code: int | str | None) -> None:
    """End; after a signal without waiting for threads that are still decoding images."""
    decoding = any(thread.name.startswith("vitrail") for thread in threading.enumerate())
    if isinstance(code, int) and code > 128 and decoding:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody there to read it
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _failed(sentence: str) -> int:
    _say(_as_error(sentence))
    return CommandError.exit_code


def _as_error(sentence: str) -> str:
    return f"[bold red]error:[/] {escape(sentence)}"


def _unexpected(error: Exception) -> int:
    """What is no mistake of the user. Its traceback is kept, since the run that led to it may have been long."""
    text = traceback.format_exc().encode(errors="backslashreplace")
    where = "above" if os.environ.get("VITRAIL_TRACEBACK") else ""
    if not where:
        with contextlib.suppress(OSError):
            number, where = tempfile.mkstemp(prefix="vitrail-traceback-", suffix=".txt")
            with open(number, "wb") as file:
                file.write(text)
            where = f"in {where}"
    if not where.startswith("in "):
        _say(markup.escape(text.decode()))
    _failed(f"vitrail failed, which it should not: {type(error).__name__}: {error}")
    _say(escape(f"Please report the command and the traceback {where or 'above'}."))
    return UNEXPECTED


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


def _let_go_of_output() -> bool:
    """Whether there is output that cannot be written, as where a disk is full; Python would try again at its end."""
    failed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # ValueError: it was closed
            failed = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failed


def _show_warning(usual: Callable[..., None], message: Warning | str, *others: Any, **more: Any) -> None:
    if isinstance(message, Note):
        _say(f"[yellow]note:[/] {escape(str(message))}")
    else:
        usual(message, *others, **more)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, SystemExit):  # nobody there to read it, which rich would end with
        SafeConsole(stderr=True, soft_wrap=True).print(text)
