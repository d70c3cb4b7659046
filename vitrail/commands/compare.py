"""`vitrail compare`: runs side by side on the same images, with a test that says whether a difference is one."""

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
    """Measure all `runs` on the same images, which none of them was trained on, and print how they differ.

    Without `data`, the images are those that the first run kept from its own training.
    """
    console = console if console is not None and is_first_process() else make_console()
    compared, words = compare_runs(runs, data, split, device, console)
    if not is_first_process():
        return compared
    _show(console, compared)
    fitted = ", ".join(row.name for row in compared if row.fitted)
    note = f", on which temperature and thresholds of {fitted} were fitted" if fitted else ""
    images = compared[0].scores.n
    many = f"{images:,} image{'s' * (images != 1)}"
    console.print(f"[dim]Measured on {many} of the {escape(words + note)}.[/]")
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
        console.print(sentence(row, rows[0].name))
    stated = [key for key in rows[0].settings if all(row.settings[key] is not None for row in rows)]
    for key in stated:
        said = " | ".join(str(row.settings[key]) for row in rows)
        console.print(f"[dim]{escape(key)}: {escape(said)}[/]")
    if others := len(rows[0].settings) - len(stated):
        console.print(f"[dim]and {others} settings that not all of them state[/]")


def sentence(row: ComparedRun, first: str) -> str:
    """Whether a run is better than the first one, in words."""
    paired = row.against_first
    assert paired is not None
    low, high = (100 * bound for bound in paired.interval)
    if not paired.different:
        verdict = "these images cannot tell them apart"
    else:
        verdict = f"[bold]{escape(row.name if paired.difference > 0 else first)}[/] is better"
    counts = ""
    if paired.p is not None:
        counts = f"; alone right on {paired.only_second:,} images against {paired.only_first:,}, p = {paired.p:.2g}"
    change = f"{100 * paired.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}{counts})"
    return f"{escape(row.name)} against {escape(first)}: {change}: {verdict}"
