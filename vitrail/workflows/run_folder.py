"""The folder of a run: never one that already holds another, never used by two launches at once, and nothing in it is
removed but what a run wrote."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import IO, Any

from vitrail.atomic import sync_folder, whole_file
from vitrail.data.formats import is_image_name
from vitrail.errors import UserError, given_path, os_errors_as
from vitrail.spreadsheet import csv_table
from vitrail.training.checkpoint import NAME, Checkpoints
from vitrail.training.run_context import LockId
from vitrail.training.tensorboard import MARK
from vitrail.weights.names import local_path
from vitrail.workflows.resolve import Plan, write_config
from vitrail.workflows.show import data_name
from vitrail.workflows.written import ANSWERS, EXCLUDED, EXCLUDED_TITLES, MODEL_CARD, has_our_header, is_ours

try:
    import fcntl
except ImportError:  # Windows, where two launches at once are the user's to avoid
    fcntl = None  # type: ignore[assignment]

FILES = (
    "model.safetensors",  # removed first and put in place last: with it a run counts as finished
    ANSWERS,
    "curves.svg",
    "metrics.jsonl",
    EXCLUDED,
    MODEL_CARD,
    "report.html",
    "config.toml",
)
# Folders, and which files in them are a run's.
FOLDERS = {"checkpoints": NAME, "tensorboard": re.compile(rf"events\.out\.tfevents\..*{re.escape(MARK)}")}
PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")  # what a killed process leaves of a file it was writing
LOCK = ".lock"
NEW = ".vitrail-new"  # where a run lies until it has saved for the first time
OLD = ".vitrail-old"  # where the run that was there before lies until the new one is finished
REPLACED = "replaced"  # in NEW: an unfinished run that is replaced, while OLD holds a finished one
WEAK = ("metrics.jsonl", ANSWERS, EXCLUDED)  # such files other programs write, too


def check_free(out: str | Path | None, overwrite: bool, again: bool = False) -> None:
    """That a new run may use the folder; before anything that takes long. `again`: it may hold one that has not saved
    anything yet."""
    if out is None:
        return
    folder = given_path(out)
    if folder.is_file():
        raise UserError(f"--out {folder} is a file: name a folder")
    run = is_ours(folder / "config.toml")
    if run and not overwrite and not again:
        if (folder / "model.safetensors").is_file():
            raise UserError(f"{folder} already holds a finished run: choose another --out, or add --overwrite")
        raise UserError(f"{folder} holds an unfinished run: add --resume to go on, or --overwrite to start again")
    with os_errors_as(f"cannot write to {folder}"):
        earlier_run(folder)
    others = [name for name in (*FILES, *FOLDERS) if os.path.lexists(folder / name)]
    if others and not run and not overwrite:
        raise UserError(
            f"{folder} holds '{others[0]}' but no run, and a run would replace that: choose another --out, "
            "or add --overwrite"
        )
    with claimed(folder):  # that it can be
        return


def check_inputs(folder: Path, plan: Plan, recipe: str) -> None:
    """That a run does not write among its own images, or over anything it reads."""
    place, root, config = folder.resolve(), Path(plan.dataset.root).resolve(), plan.config
    inside = root.is_dir() and root in place.parents
    if place == root or (inside and folder.is_dir() and any(is_image_name(path.name) for path in folder.rglob("*"))):
        raise UserError(f"--out {folder} lies among the images to train on: choose another folder")
    teacher = config.objective.teacher
    if teacher and place in (Path(teacher).resolve(), *Path(teacher).resolve().parents):
        raise UserError(f"--out {folder} holds the teacher: choose another folder")
    written = {(folder / name).resolve() for name in (*FILES, *FOLDERS, NEW)}
    for what, path in (
        ("the images to train on", root),
        ("the weights to start from", local_path(config.model.weights) if config.model.weights else None),
        ("the recipe", Path(recipe).expanduser() if recipe.endswith(".toml") else None),
        ("the quarantine list", Path(config.data.quarantine).expanduser() if config.data.quarantine else None),
    ):
        own = path.resolve() if path is not None else None
        if own is not None and (own == place or written & {own, *own.parents}):
            raise UserError(f"--out {folder} holds {what}, {path}: choose another folder")


def earlier_run(folder: Path) -> list[Path]:
    """The files of a run in a folder, which a new one replaces; links at their names are there, too, and are never
    followed. A file of somebody else's with such a name is refused, and all others are left alone."""
    found, run = [], is_ours(folder / "config.toml")
    for name in FILES:
        path = folder / name
        if path.is_symlink() or (is_ours(path) and (run or name not in WEAK)):
            found.append(path)
        elif path.exists():
            _refuse(path)
    for name, own in FOLDERS.items():
        path = folder / name
        if path.is_symlink():
            found.append(path)
        elif path.is_dir():
            found += [inner for inner in sorted(path.iterdir()) if _is_of_run(inner, own)]
        elif path.exists():
            _refuse(path)
    return found + [path for path in folder.glob(".*.partial") if _is_partial(path, FILES)]


def _is_of_run(path: Path, own: re.Pattern[str]) -> bool:
    if partial := PARTIAL.fullmatch(path.name):
        return own.fullmatch(partial[1]) is not None and not path.is_dir()
    if not own.fullmatch(path.name):
        return False
    if not path.is_symlink() and path.suffix == ".safetensors" and not has_our_header(path):
        _refuse(path)
    return path.is_symlink() or path.is_file()


def _is_partial(path: Path, names: tuple[str, ...]) -> bool:
    match = PARTIAL.fullmatch(path.name)
    return match is not None and match[1] in names and not path.is_dir()


def _refuse(path: Path) -> None:
    raise UserError(f"{path} was not written by vitrail, and a run would replace it: move it, or choose another --out")


def refuse_links(folder: Path) -> None:
    """Before a run goes on: it makes no links, and writes through none that somebody else put there."""
    places = [folder / name for name in (*FILES, *FOLDERS)]
    inner = [path for place in places if place.name in FOLDERS and place.is_dir() for path in place.iterdir()]
    for path in (*places, *inner):
        if path.is_symlink():
            raise UserError(
                f"{path} is a link, and a run does not write through links: put what it leads to in its place"
            )


def begin_folder(folder: Path, settings: dict[str, Any], excluded: Sequence[tuple[str, str]] = ()) -> None:
    """Begin a run in a place of its own: an earlier one moves aside when the new run has saved something. Its
    settings go to config.toml, the files it does not use to excluded.csv, each with the reason."""
    with os_errors_as(f"cannot write to {folder}"):
        _remove(folder / NEW)
        (folder / NEW).mkdir()
        write_config(folder / NEW / "config.toml", settings)
        if excluded:
            with whole_file(folder / NEW / EXCLUDED) as temporary:
                temporary.write_bytes(csv_table(EXCLUDED_TITLES, excluded))


def take_place(folder: Path) -> bool:
    """From here on the folder holds the run that was begun. The one before it, if there was one, is kept in OLD until
    `forget_earlier`; of several, the newest that was finished. If a file cannot be moved, all stay where they were."""
    new, old = folder / NEW, folder / OLD
    with os_errors_as(f"cannot write to {folder}"):
        earlier = earlier_run(folder)
        kept = old if is_ours(folder / "model.safetensors") or not os.path.lexists(old) else new / REPLACED
        if earlier and kept == old:
            _remove(old)
        moves = [(path, kept / path.relative_to(folder)) for path in earlier]
        for name in ("config.toml", *FOLDERS, *reversed(FILES)):
            if name in FOLDERS and (new / name).is_dir():
                moves += [(path, folder / name / path.name) for path in sorted((new / name).iterdir())]
            elif (new / name).is_file():
                moves.append((new / name, folder / name))
        _move(dict(moves))
        _remove(new / REPLACED)
        for place in (*(place / name for place in (new, folder) for name in FOLDERS), new):
            with contextlib.suppress(OSError):  # not there, or not empty
                place.rmdir()
        sync_folder(folder)
    return bool(earlier) and kept == old


def _move(moves: dict[Path, Path]) -> None:
    """All of them or none."""
    done: list[Path] = []
    try:
        for source, target in moves.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
            done.append(source)
    except OSError:
        for source in reversed(done):
            with contextlib.suppress(OSError):
                moves[source].replace(source)
        raise


def forget_earlier(folder: Path) -> None:
    """The new run is finished: the one before it is not needed any more."""
    with contextlib.suppress(OSError, UserError):
        _remove(folder / OLD)


def _remove(folder: Path) -> None:
    """What a run wrote there, links as links, and the folders that are empty then."""
    own = folder.name in (NEW, OLD, REPLACED)
    if own and folder.is_symlink():
        folder.unlink()
        return
    for path in earlier_run(folder):
        path.unlink()
    for place in (*(folder / name for name in FOLDERS), *([folder] if own else [])):
        if place.is_symlink():
            place.unlink()
        elif place.is_dir():
            with contextlib.suppress(OSError):  # something else is in there
                place.rmdir()


def check_there(folder: Path, lock: LockId) -> None:
    """That the folder is still this run's: somebody may have removed it, and begun another run there."""
    try:
        found = (folder / LOCK).lstat()
        own = (found.st_dev, found.st_ino) == lock
    except FileNotFoundError:
        own = True  # a lock that was taken for one left behind
    except OSError:
        own = False
    if not own or not (folder / "config.toml").is_file():
        raise UserError(f"{folder} was removed or replaced while its run was at work: what was not saved is lost")


def where_it_stopped(folder: Path, command: str) -> str:
    if (folder / NEW).exists():
        return " before anything was saved"
    if not (folder / "config.toml").is_file() or not Checkpoints(folder / "checkpoints", 1).steps():
        return f", and nothing is saved: {folder} was removed or emptied while the run was at work"
    kept = f" (the run before it is in {folder / OLD})" if (folder / OLD).is_dir() else ""
    return f" and saved; {command}{kept}"


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
def claimed(folder: Path) -> Iterator[LockId]:
    """The folder for this launch alone. The lock ends with its process, however that ends."""
    there = folder.exists()
    with os_errors_as(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        file = _open_lock(folder / LOCK)
    with file:
        try:
            if fcntl is not None and sys.platform != "win32":  # the second for type checkers
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                advice = "wait for it, or choose another --out"
                raise UserError(f"another launch is at work in {folder}: {advice}") from None
            # else the file system knows no locks
        own = os.fstat(file.fileno())
        try:
            yield own.st_dev, own.st_ino
        finally:
            with contextlib.suppress(OSError, UserError):
                _remove(folder / NEW)  # of a run that ended before it saved anything
            with contextlib.suppress(OSError):
                found = (folder / LOCK).lstat()
                if (found.st_dev, found.st_ino, found.st_size) == (own.st_dev, own.st_ino, 0):
                    (folder / LOCK).unlink()  # else it is another launch's, or has held something before us
            if not there:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if nothing was written


def _open_lock(path: Path) -> IO[bytes]:
    """Whatever lies there is not emptied, and a link or a pipe that somebody prepared is not opened."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{LOCK} is a link")
    number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    file = os.fdopen(number, "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise OSError(errno.EINVAL, f"{LOCK} is no regular file")
    return file
