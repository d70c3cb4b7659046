"""`vitrail compare`: score several runs on the same images, with a significance test of their differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vitrail.distributed import is_first_process
from vitrail.terminal import escape, make_console
from vitrail.workflows.compare import ComparedRun, compare_runs


def compare(
    runs: Sequence[str | Path],
    *,
    data: str | Path | None = None,
    split: str | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> list[ComparedRun]:
    """Score all `runs` on the same images, which none of them was trained on, and print how they differ.

    Without `data`, the images are the test or validation images of the first run.
    """
    console = console if console is not None and is_first_process() else make_console()
    compared, images_used = compare_runs(runs, data, split, device, console)
    if not is_first_process():
        return compared
    _show(console, compared)
    fitted = ", ".join(row.name for row in compared if row.fitted)
    note = f", to which the temperature and thresholds of {fitted} were fitted" if fitted else ""
    n = compared[0].scores.n
    images = f"{n:,} image{'s' * (n != 1)}"
    console.print(f"[dim]Measured on {images} of the {escape(images_used + note)}.[/]")
    return compared


def _show(console: Console, rows: Sequence[ComparedRun]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for heading in (*(heading for heading, _ in rows[0].cells), "parameters", "GMAC"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = (cell for _, cell in row.cells)
        table.add_row(escape(row.name), *cells, f"{row.parameters / 1e6:.1f} M", f"{row.gmacs:.2f}")
    console.print(table)
    for row in rows[1:]:
        console.print(comparison_sentence(row, rows[0].name))
    stated = [key for key in rows[0].settings if all(row.settings[key] is not None for row in rows)]
    for key in stated:
        values = " | ".join(str(row.settings[key]) for row in rows)
        console.print(f"[dim]{escape(key)}: {escape(values)}[/]")
    if others := len(rows[0].settings) - len(stated):
        console.print(f"[dim]{others} more settings differ, but are not stated by all runs[/]")


def comparison_sentence(row: ComparedRun, first: str) -> str:
    """Return a sentence: the difference to the first run, and whether it is significant."""
    paired = row.against_first
    assert paired is not None
    low, high = (100 * bound for bound in paired.interval)
    if not paired.different:
        verdict = "no significant difference"
    else:
        verdict = f"[bold]{escape(row.name if paired.difference > 0 else first)}[/] is better"
    counts = ""
    if paired.p is not None:
        counts = f"; alone correct on {paired.only_second:,} images against {paired.only_first:,}, p = {paired.p:.2g}"
    change = f"{100 * paired.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}{counts})"
    return f"{escape(row.name)} against {escape(first)}: {change}: {verdict}"
