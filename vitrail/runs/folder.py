"""The folder of a run: never one that already holds another, and never used by two launches at once."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from vitrail.atomic import whole_file
from vitrail.errors import UserError, given_path
from vitrail.images.formats import is_image_name
from vitrail.runs.plan import Plan, write_config
from vitrail.runs.show import data_name

try:
    import fcntl
except ImportError:  # Windows, where two launches at once are the user's to avoid
    fcntl = None  # type: ignore[assignment]

ANSWERS, MODEL_CARD, EXCLUDED = "answers.csv", "model_card.md", "excluded.csv"
FILES = (
    "checkpoints",
    "config.toml",
    "curves.svg",
    "metrics.jsonl",
    "model.safetensors",
    ANSWERS,
    EXCLUDED,
    MODEL_CARD,
    "report.html",
    "tensorboard",
)
LOCK = ".lock"


def check_free(out: str | Path | None, overwrite: bool, again: bool = False) -> None:
    """That a new run may use the folder; before anything that takes long. `again`: it may hold one that has not saved
    anything yet."""
    if out is None:
        return
    folder = given_path(out)
    if folder.is_file():
        raise UserError(f"--out {folder} is a file: name a folder")
    run = (folder / "config.toml").is_file()
    others = [name for name in FILES if (folder / name).exists()]
    if others and not run and not overwrite:
        raise UserError(
            f"{folder} holds '{others[0]}' but no run, and a run would replace that: choose another --out, "
            "or add --overwrite"
        )
    if overwrite or again or not run:
        with claimed(folder):  # that it can be
            return
    if (folder / "model.safetensors").is_file():
        raise UserError(f"{folder} already holds a finished run: choose another --out, or add --overwrite")
    raise UserError(f"{folder} holds an unfinished run: add --resume to go on, or --overwrite to start again")


def check_beside(folder: Path, plan: Plan) -> None:
    """That a run does not write among its own images, or over the teacher it needs again to go on."""
    place, root = folder.resolve(), Path(plan.dataset.root).resolve()
    inside = root.is_dir() and (place == root or root in place.parents)
    if inside and folder.is_dir() and any(is_image_name(path.name) for path in folder.rglob("*")):
        raise UserError(f"--out {folder} lies among the images to train on: choose another folder")
    teacher = plan.config.objective.teacher
    if teacher and place in (Path(teacher).resolve(), *Path(teacher).resolve().parents):
        raise UserError(f"--out {folder} holds the teacher: choose another folder")


def begin_folder(folder: Path, settings: dict[str, Any], excluded: Sequence[tuple[str, str]] = ()) -> None:
    """From here on the folder holds this run, with its settings in config.toml and the files it does not use, each
    with the reason, in excluded.csv, and no earlier one."""
    try:
        for path in (folder / name for name in FILES):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        write_config(folder / "config.toml", settings)
        if excluded:
            text = io.StringIO(newline="")
            csv.writer(text).writerows([("name", "reason"), *excluded])
            with whole_file(folder / EXCLUDED) as temporary:  # names need not be text
                temporary.write_bytes(text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def choose_folder(out: str | Path | None, root: str) -> Path:
    """The folder that was asked for, or a new one in runs/ with the name of the data."""
    if out is not None:
        return given_path(out)
    return next(folder for folder in _numbered(root) if not folder.exists())


def newest_folder(data: str | Path) -> Path:
    """The last one that `choose_folder` gave for this data, or the first that it would."""
    root = os.path.normpath(given_path(data).absolute())
    taken = list(takewhile(Path.exists, _numbered(root)))
    return taken[-1] if taken else next(_numbered(root))


def _numbered(root: str) -> Iterator[Path]:
    base = Path("runs") / (data_name(root) or "run")
    yield base
    yield from (base.with_name(f"{base.name}-{number}") for number in count(2))


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder for this launch alone. The lock ends with its process, however that ends."""
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    with file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                advice = "wait for it, or choose another --out"
                raise UserError(f"another launch is at work in {folder}: {advice}") from None
            # else the file system knows no locks
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            if not there:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if nothing was written
