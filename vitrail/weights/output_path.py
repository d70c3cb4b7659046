"""Output paths of `vitrail convert`: checked before the work, written completely or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.atomic import atomic_write
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.weights.formats import format_named
from vitrail.weights.names import local_path

# Files in a converted folder, with the pages that `vitrail evaluate` adds. --overwrite replaces no folder that has
# other files.
WRITTEN = re.compile(r"config\.json|model\.safetensors|preprocessor_config\.json|evaluation.*\.html")


def free_output_path(source: str, target: str, to: str, overwrite: bool) -> Path:
    """The output path; raises UserError if it is not usable, or exists and `overwrite` is not set."""
    path = user_path(target)
    with os_errors_as(f"cannot write '{target}'"):  # such as a path that is too long
        _check_free(local_path(source), path, target, to, overwrite)
    return path


def _check_free(source: Path | None, path: Path, target: str, to: str, overwrite: bool) -> None:
    suffix = format_named(to).suffix
    folder = not suffix
    if not path.name or path.name == "..":
        raise UserError(f"'{target}' is not a valid output path; pass a file or folder name")
    if not folder and path.suffix != suffix:
        raise UserError(f"--to {to} writes a file: pass a name that ends in {suffix}, not '{target}'")
    if folder and path.suffix in (".safetensors", ".npz", ".bin", ".pth", ".pt"):
        raise UserError(f"--to {to} writes a folder: pass a folder name, not '{target}'")
    if not path.absolute().parent.is_dir():
        raise UserError(f"the folder '{path.absolute().parent}' does not exist; create it first")
    if path.is_symlink():
        raise UserError(f"'{target}' is a symbolic link; pass its target or another name")
    _check_apart(source, path, target)
    if not path.exists():
        return
    if path.is_dir() != folder or (folder and not all(map(_is_output, path.iterdir()))):
        raise UserError(f"'{target}' exists and was not written by vitrail convert; pass another name")
    if not overwrite:
        raise UserError(f"'{target}' exists; pass another name or --overwrite")


def _is_output(path: Path) -> bool:
    return WRITTEN.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _check_apart(source: Path | None, path: Path, target: str) -> None:
    """Raise UserError if the output is the input, contains it, or is inside it."""
    if source is None or not source.exists():
        return  # reported when it is read
    old, new = (Path(os.path.realpath(item)) for item in (source, path))  # unlike resolve(), accepts circular links
    if old == new or new in old.parents:
        raise UserError(f"'{target}' {'is' if old == new else 'contains'} the input; pass another output path")
    if old in new.parents:
        raise UserError(f"'{target}' is inside the input folder; pass a path outside it")


@contextmanager
def staged_output(path: Path, folder: bool) -> Iterator[Path]:
    """Yield a temporary path. It replaces `path` if the block succeeds, and is deleted if it raises."""
    if not folder:
        with atomic_write(path) as temporary:
            yield temporary
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    old = temporary.with_suffix(".old")
    try:
        temporary.mkdir()
        yield temporary
        if path.exists():
            path.replace(old)
        temporary.replace(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.replace(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
