"""The files that vitrail writes: their names, and tests that recognise them by their contents.

Commands replace and remove such files only; any other file is the user's. Contents are tested because a list of written
files could be copied, or become outdated.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from vitrail.data.quarantine import TITLES as QUARANTINE_TITLES
from vitrail.errors import UserError, error_reason
from vitrail.spreadsheet import csv_bytes
from vitrail.weights.safetensors_file import read_metadata

PREDICTIONS, EXCLUDED, MODEL_CARD = "predictions.csv", "excluded.csv", "model_card.md"
OLD_PREDICTIONS = "answers.csv"  # the name of predictions.csv in earlier versions, and its columns
OLD_COLUMNS = (
    ("name", "label", "answer", "probability", "label probability", "rather"),
    ("name", "labels", "answers"),
)
EXCLUDED_TITLES = ("name", "reason")
SETTINGS = {"kind", "optimizer", "precision", "schedule", "train"}  # the sections of every config.toml


def is_vitrail_file(path: Path, kind: str = "") -> bool:
    """Whether vitrail wrote a file. Links are not followed.

    `kind` is its usual name, a key of `TESTS`, if the user chose another name."""
    test = TESTS[kind or path.name]
    try:
        return not path.is_symlink() and path.is_file() and test(path)
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {error_reason(error)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # another kind of file
        return False


def refuse_foreign_files(paths: Iterable[tuple[Path, str]], advice: str) -> None:
    """Raise UserError if any of `paths` (each with its kind) exists and was not written by vitrail."""
    for path, kind in paths:
        if os.path.lexists(path) and not path.is_dir() and not is_vitrail_file(path, kind):
            raise UserError(f"{path} was not written by vitrail and would be replaced: {advice}")


def remove_old_predictions(path: Path) -> None:
    """Remove a table of predictions under its former name, which `predictions.csv` beside it replaces."""
    if is_vitrail_file(path, OLD_PREDICTIONS):
        path.unlink(missing_ok=True)


def has_vitrail_header(path: Path) -> bool:
    """Whether a safetensors file has a vitrail header. The tensors after the header may be incomplete."""
    try:
        return any(key.startswith("vitrail") for key in read_metadata(path))
    except UserError:
        return False


def _is_run_config(path: Path) -> bool:
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return values.keys() >= SETTINGS and "log_every" in values["train"]


def _is_log(path: Path) -> bool:
    """Rows with a step each; the last one may be incomplete after a crash."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines]
    return all(isinstance(row, dict) and "step" in row for row in rows) and (bool(rows) or not path.stat().st_size)


def _starts_with(*prefixes: str) -> Callable[[Path], bool]:
    def test(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(200).startswith(tuple(prefix.encode() for prefix in prefixes))

    return test


def _contains(*parts: str) -> Callable[[Path], bool]:
    def test(path: Path) -> bool:
        text = path.read_bytes()
        return all(part.encode() in text for part in parts)

    return test


def _is_predictions(path: Path) -> bool:
    from vitrail.tasks.table import COLUMNS  # here, since it imports torch

    return _starts_with(*(",".join(columns) + "\r\n" for columns in (*COLUMNS, *OLD_COLUMNS)))(path)


def _page(kind: str) -> Callable[[Path], bool]:
    """An HTML page with the vitrail logo and this heading."""
    return _contains('<path fill="#1f5fa8" d="M2 2h10v6L2 12z"/>', f"<span>vitrail {kind}</span>")


def _has_keys(*names: str) -> Callable[[Path], bool]:
    def test(path: Path) -> bool:
        values = json.loads(path.read_text(encoding="utf-8"))
        return isinstance(values, dict) and values.keys() >= set(names)

    return test


def _is_untouched_list(path: Path) -> bool:
    """Whether a quarantine list equals the one in report.json next to it: users may edit the list."""
    report = json.loads(path.with_name("report.json").read_text(encoding="utf-8"))
    rows = [[row[title] for title in QUARANTINE_TITLES] for row in report["quarantine"]]
    return path.read_bytes() == csv_bytes(QUARANTINE_TITLES, rows)


TESTS: dict[str, Callable[[Path], bool]] = {
    "config.toml": _is_run_config,
    "curves.svg": _contains('<rect class="page" width="100%" height="100%"/>'),
    "metrics.jsonl": _is_log,
    "model.safetensors": has_vitrail_header,
    PREDICTIONS: _is_predictions,
    OLD_PREDICTIONS: _is_predictions,
    EXCLUDED: _starts_with(",".join(EXCLUDED_TITLES) + "\r\n"),
    MODEL_CARD: _starts_with("---\nlibrary_name: vitrail"),
    "report.html": _page("classification report"),
    "check": _page("data check"),
    "report.json": _has_keys("data", "usable", "severe", "quarantine"),
    "quarantine.csv": _is_untouched_list,
    "explain.html": _page("explanation"),
    "explain.json": _has_keys("query", "grid", "findings", "figures"),
    "index.html": _page("demo"),
    "transfer.json": _has_keys("tried", "rate", "test", "tested"),
}
