"""The run folder: who may write to it, and how a new run replaces an earlier one.

One process locks it (`lock_run_folder`). Only files that vitrail wrote are replaced or removed. A new run is written to
`NEW` and moved into the folder with its first checkpoint. An earlier run stays in `OLD` until the new one is finished.
"""

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

from vitrail.atomic import atomic_write, fsync_folder
from vitrail.data.formats import is_image_name
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.spreadsheet import csv_bytes
from vitrail.training.checkpoint import FILE_NAME, CheckpointManager
from vitrail.training.run_context import LockId
from vitrail.training.tensorboard import FILE_SUFFIX
from vitrail.weights.names import local_path
from vitrail.workflows.resolve import Plan, write_config
from vitrail.workflows.show import data_name
from vitrail.workflows.vitrail_files import (
    EXCLUDED,
    EXCLUDED_TITLES,
    MODEL_CARD,
    OLD_PREDICTIONS,
    PREDICTIONS,
    has_vitrail_header,
    is_vitrail_file,
)

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so the folder is not locked there
    fcntl = None  # type: ignore[assignment]

FILES = (
    "model.safetensors",  # removed first and moved last: a run with this file is finished
    PREDICTIONS,
    OLD_PREDICTIONS,
    "curves.svg",
    "metrics.jsonl",
    EXCLUDED,
    MODEL_CARD,
    "report.html",
    "config.toml",
)
# Subfolders of a run, and the names of its files in them.
FOLDERS = {"checkpoints": FILE_NAME, "tensorboard": re.compile(rf"events\.out\.tfevents\..*{re.escape(FILE_SUFFIX)}")}
PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")  # a file that a killed process was writing
LOCK = ".lock"
NEW = ".vitrail-new"  # a new run, until its first checkpoint
OLD = ".vitrail-old"  # the earlier run, until the new one is finished
REPLACED = "replaced"  # in NEW: a replaced unfinished run, while OLD holds a finished one
COMMON_NAMES = ("metrics.jsonl", PREDICTIONS, OLD_PREDICTIONS, EXCLUDED)  # file names that other programs use too


def check_output_folder(out: str | Path | None, overwrite: bool, may_resume: bool = False) -> None:
    """Raise UserError if a new run may not use the folder. Called before anything slow.

    `may_resume`: the folder may hold a run that has not saved a checkpoint yet."""
    if out is None:
        return
    folder = user_path(out)
    if folder.is_file():
        raise UserError(f"--out {folder} is a file, but must be a folder")
    run = is_vitrail_file(folder / "config.toml")
    if run and not overwrite and not may_resume:
        if (folder / "model.safetensors").is_file():
            raise UserError(f"{folder} already holds a finished run: choose another --out, or add --overwrite")
        raise UserError(f"{folder} holds an unfinished run: add --resume to continue it, or --overwrite to start again")
    with os_errors_as(f"cannot write to {folder}"):
        files_of_run(folder)
    others = [name for name in (*FILES, *FOLDERS) if os.path.lexists(folder / name)]
    if others and not run and not overwrite:
        raise UserError(
            f"{folder} holds no run, but has '{others[0]}', which would be replaced: choose another --out, "
            "or add --overwrite"
        )
    with lock_run_folder(folder):  # raises if it cannot be locked
        return


def check_inputs_are_outside(folder: Path, plan: Plan, recipe: str) -> None:
    """Raise UserError if the run folder is among the training images, or holds a file that the run reads."""
    target, root, config = folder.resolve(), Path(plan.dataset.root).resolve(), plan.config
    inside = root.is_dir() and root in target.parents
    if target == root or (inside and folder.is_dir() and any(is_image_name(path.name) for path in folder.rglob("*"))):
        raise UserError(f"--out {folder} is inside the training images: choose another folder")
    teacher = config.objective.teacher
    if teacher and target in (Path(teacher).resolve(), *Path(teacher).resolve().parents):
        raise UserError(f"--out {folder} holds the teacher: choose another folder")
    written = {(folder / name).resolve() for name in (*FILES, *FOLDERS, NEW)}
    for what, path in (
        ("the training images", root),
        ("the starting weights", local_path(config.model.weights) if config.model.weights else None),
        ("the recipe", Path(recipe).expanduser() if recipe.endswith(".toml") else None),
        ("the quarantine list", Path(config.data.quarantine).expanduser() if config.data.quarantine else None),
    ):
        source = path.resolve() if path is not None else None
        if source is not None and (source == target or written & {source, *source.parents}):
            raise UserError(f"--out {folder} holds {what}, {path}: choose another folder")


def files_of_run(folder: Path) -> list[Path]:
    """The files of a run in a folder, which a new run replaces. Links with such names are included, never followed.

    Raises UserError for a file with such a name that vitrail did not write. Other files are ignored."""
    paths, run = [], is_vitrail_file(folder / "config.toml")
    for name in FILES:
        path = folder / name
        if path.is_symlink() or (is_vitrail_file(path) and (run or name not in COMMON_NAMES)):
            paths.append(path)
        elif path.exists():
            _refuse(path)
    for name, pattern in FOLDERS.items():
        path = folder / name
        if path.is_symlink():
            paths.append(path)
        elif path.is_dir():
            paths += [inner for inner in sorted(path.iterdir()) if _is_of_run(inner, pattern)]
        elif path.exists():
            _refuse(path)
    return paths + [path for path in folder.glob(".*.partial") if _is_partial(path, FILES)]


def _is_of_run(path: Path, pattern: re.Pattern[str]) -> bool:
    if partial := PARTIAL.fullmatch(path.name):
        return pattern.fullmatch(partial[1]) is not None and not path.is_dir()
    if not pattern.fullmatch(path.name):
        return False
    if not path.is_symlink() and path.suffix == ".safetensors" and not has_vitrail_header(path):
        _refuse(path)
    return path.is_symlink() or path.is_file()


def _is_partial(path: Path, names: tuple[str, ...]) -> bool:
    match = PARTIAL.fullmatch(path.name)
    return match is not None and match[1] in names and not path.is_dir()


def _refuse(path: Path) -> None:
    raise UserError(f"{path} was not written by vitrail and would be replaced: move it, or choose another --out")


def refuse_links(folder: Path) -> None:
    """Raise UserError for a link in a run folder: a run creates none, and a resumed run must not write through one."""
    outer = [folder / name for name in (*FILES, *FOLDERS)]
    inner = [path for sub in outer if sub.name in FOLDERS and sub.is_dir() for path in sub.iterdir()]
    for path in (*outer, *inner):
        if path.is_symlink():
            raise UserError(
                f"{path} is a link, and a run does not write through links: replace it by the file or folder itself"
            )


def create_run_folder(folder: Path, settings: dict[str, Any], excluded: Sequence[tuple[str, str]] = ()) -> None:
    """Create a new run in `NEW`, with config.toml and excluded.csv (the images that it does not use, and why).

    `move_into_place` moves it into the folder itself."""
    with os_errors_as(f"cannot write to {folder}"):
        _remove(folder / NEW)
        (folder / NEW).mkdir()
        write_config(folder / NEW / "config.toml", settings)
        if excluded:
            with atomic_write(folder / NEW / EXCLUDED) as temporary:
                temporary.write_bytes(csv_bytes(EXCLUDED_TITLES, excluded))


def move_into_place(folder: Path) -> bool:
    """Move the new run from `NEW` into the folder itself; return whether an earlier run was moved to `OLD`.

    `OLD` stays until `remove_replaced_run`. If a finished and an unfinished run are replaced, the finished one is kept.
    If a file cannot be moved, all files stay where they were."""
    new, old = folder / NEW, folder / OLD
    with os_errors_as(f"cannot write to {folder}"):
        earlier = files_of_run(folder)
        kept = old if is_vitrail_file(folder / "model.safetensors") or not os.path.lexists(old) else new / REPLACED
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
        for subfolder in (*(parent / name for parent in (new, folder) for name in FOLDERS), new):
            with contextlib.suppress(OSError):  # not there, or not empty
                subfolder.rmdir()
        fsync_folder(folder)
    return bool(earlier) and kept == old


def _move(moves: dict[Path, Path]) -> None:
    """Move all files or none."""
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


def remove_replaced_run(folder: Path) -> None:
    """Remove the earlier run in `OLD`, once the new run is finished."""
    with contextlib.suppress(OSError, UserError):
        _remove(folder / OLD)


def _remove(folder: Path) -> None:
    """Remove the files of a run from a folder, links as links, and then empty subfolders."""
    is_temporary = folder.name in (NEW, OLD, REPLACED)
    if is_temporary and folder.is_symlink():
        folder.unlink()
        return
    for path in files_of_run(folder):
        path.unlink()
    for subfolder in (*(folder / name for name in FOLDERS), *([folder] if is_temporary else [])):
        if subfolder.is_symlink():
            subfolder.unlink()
        elif subfolder.is_dir():
            with contextlib.suppress(OSError):  # it has other files
                subfolder.rmdir()


def check_not_replaced(folder: Path, lock: LockId) -> None:
    """Raise UserError if the folder was removed or replaced by another run since `lock` was taken."""
    try:
        status = (folder / LOCK).lstat()
        unchanged = (status.st_dev, status.st_ino) == lock
    except FileNotFoundError:
        unchanged = True  # the lock file was removed as a leftover
    except OSError:
        unchanged = False
    if not unchanged or not (folder / "config.toml").is_file():
        raise UserError(f"{folder} was removed or replaced during the run: what was not saved is lost")


def stop_message(folder: Path, command: str) -> str:
    """What to add to "stopped": what is saved, and the command that resumes the run."""
    if (folder / NEW).exists():
        return " before anything was saved"
    if not (folder / "config.toml").is_file() or not CheckpointManager(folder / "checkpoints", 1).steps():
        return f", and nothing is saved: {folder} was removed or emptied during the run"
    kept = f" (the previous run is in {folder / OLD})" if (folder / OLD).is_dir() else ""
    return f" and saved; {command}{kept}"


def run_folder_for(out: str | Path | None, root: str) -> Path:
    """`out`, or a new folder in runs/ named after the data."""
    if out is not None:
        return user_path(out)
    return next(folder for folder in _numbered(root) if not folder.exists())


def newest_folder(data: str | Path) -> Path:
    """The newest folder of `run_folder_for` for this data, or the first one that it would return."""
    root = os.path.normpath(user_path(data).absolute())
    taken = list(takewhile(Path.exists, _numbered(root)))
    return taken[-1] if taken else next(_numbered(root))


def _numbered(root: str) -> Iterator[Path]:
    base = Path("runs") / (data_name(root) or "run")
    yield base
    yield from (base.with_name(f"{base.name}-{number}") for number in count(2))


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[LockId]:
    """Lock the folder for this process, and create it. The lock ends with the process, even if that is killed."""
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
                raise UserError(
                    f"another process is writing to {folder}: wait until it ends, or choose another --out"
                ) from None
            # otherwise the file system has no locks
        locked = os.fstat(file.fileno())
        try:
            yield locked.st_dev, locked.st_ino
        finally:
            with contextlib.suppress(OSError, UserError):
                _remove(folder / NEW)  # a run that ended before its first checkpoint
            with contextlib.suppress(OSError):
                status = (folder / LOCK).lstat()
                if (status.st_dev, status.st_ino, status.st_size) == (locked.st_dev, locked.st_ino, 0):
                    (folder / LOCK).unlink()  # otherwise another process owns it, or it is not a lock file
            if not there:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if nothing was written


def _open_lock(path: Path) -> IO[bytes]:
    """Open or create the lock file without truncating it. Links and pipes are refused."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{LOCK} is a link")
    number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    file = os.fdopen(number, "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise OSError(errno.EINVAL, f"{LOCK} is no regular file")
    return file
