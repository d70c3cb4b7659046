"""Where converted weights go: a place that is free, and is taken whole or not at all."""

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

# What a converted folder may hold, with the pages that `vitrail evaluate` puts beside the weights; a folder with
# anything else in it is not ours to replace.
WRITTEN = re.compile(r"config\.json|model\.safetensors|preprocessor_config\.json|evaluation.*\.html")


def free_output_path(source: str, target: str, to: str, overwrite: bool) -> Path:
    """Where to write, once nothing stands there that should stay."""
    path = user_path(target)
    with os_errors_as(f"cannot write '{target}'"):  # such as a name that is too long
        _check_free(local_path(source), path, target, to, overwrite)
    return path


def _check_free(source: Path | None, path: Path, target: str, to: str, overwrite: bool) -> None:
    suffix = format_named(to).suffix
    folder = not suffix
    if not path.name or path.name == "..":
        raise UserError(f"'{target}' is no name for what is written: give one")
    if not folder and path.suffix != suffix:
        raise UserError(f"--to {to} writes one file: give it a name that ends in {suffix}, not '{target}'")
    if folder and path.suffix in (".safetensors", ".npz", ".bin", ".pth", ".pt"):
        raise UserError(f"--to {to} writes a folder: give the name of one, not '{target}'")
    if not path.absolute().parent.is_dir():
        raise UserError(f"'{path.absolute().parent}' is not a folder: make it first")
    if path.is_symlink():
        raise UserError(f"'{target}' is a link: give another name, or the place that it leads to")
    _check_apart(source, path, target)
    if not path.exists():
        return
    if path.is_dir() != folder or (folder and not all(map(_is_written, path.iterdir()))):
        raise UserError(f"'{target}' is there and holds something else: give another name")
    if not overwrite:
        raise UserError(f"'{target}' is there already: give another name, or --overwrite")


def _is_written(path: Path) -> bool:
    return WRITTEN.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _check_apart(source: Path | None, path: Path, target: str) -> None:
    """What is converted must stay as it is: the target is neither it, nor in it, nor around it."""
    if source is None or not source.exists():
        return  # which reading will say
    old, new = (Path(os.path.realpath(place)) for place in (source, path))  # which bears links that go in a circle
    if old == new or new in old.parents:
        raise UserError(f"'{target}' {'is' if old == new else 'holds'} what is converted: give another name")
    if old in new.parents:
        raise UserError(f"'{target}' is inside the folder that is converted: give a place outside it")


@contextmanager
def staged_output(path: Path, folder: bool) -> Iterator[Path]:
    """Where to write for now; what is there when the block ends well takes the place of `path`, and else vanishes."""
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
