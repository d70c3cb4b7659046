"""What several commands print: the progress of a scan, the dataset, and the automatic choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vitrail.data.dataset import Dataset
from vitrail.interrupt import Interrupts
from vitrail.terminal import escape
from vitrail.workflows.choose import START, Decision


def data_name(root: str) -> str:
    """The name of a dataset: that of its folder, or of its file without the suffix."""
    path = Path(root)
    return path.stem if path.suffix.lower() in (".zip", ".csv", ".tsv", ".parquet", ".gz", ".tgz") else path.name


@contextmanager
def scan_progress(console: Console, interrupts: Interrupts) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yield the callback `(done, total)` for open_dataset. A signal stops the scan at once."""
    with interrupts.interruptible(), Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking images", total=None)

        def scanned(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        yield scanned


def show_data(console: Console, dataset: Dataset) -> None:
    """Print the number of classes, the images of each split, and the notes."""
    splits = {"without a split" if name == "all" else name: len(samples) for name, samples in dataset.splits.items()}
    counts = ", ".join(f"{number:,} {name}" for name, number in splits.items())
    classes = f"{len(dataset.classes)} classes; " if len(dataset.classes) > 1 else ""
    console.print(f"{classes}images: {counts}")
    for note in dataset.notes:
        console.print(f"[dim]{escape(note)}[/]")


def show_decisions(console: Console, decisions: Sequence[Decision]) -> None:
    """Print the choices and their reasons as a table; the starting weights, with a long reason, on their own line."""
    for decision in decisions:
        if decision.what == START:
            console.print(f"{START}: [bold]{escape(decision.value)}[/] [dim]{escape(decision.why)}[/]")
    table = Table.grid(padding=(0, 2))
    for decision in (decision for decision in decisions if decision.what != START):
        table.add_row(decision.what, f"[bold]{escape(decision.value)}[/]", f"[dim]{escape(decision.why)}[/]")
    if table.row_count:
        console.print(table)
