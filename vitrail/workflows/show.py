"""What commands print."""

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
    """What a dataset is called: its folder, or its file without the ending."""
    path = Path(root)
    return path.stem if path.suffix.lower() in (".zip", ".csv", ".tsv", ".parquet", ".gz", ".tgz") else path.name


@contextmanager
def scan_progress(console: Console, interrupts: Interrupts) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for the scan of a dataset, as the callback that open_dataset takes. A signal stops it at once."""
    with interrupts.interruptible(), Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking images", total=None)

        def scanned(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        yield scanned


def show_data(console: Console, dataset: Dataset) -> None:
    counts = ", ".join(f"{len(samples):,} {name}" for name, samples in dataset.splits.items())
    classes = f"{len(dataset.classes)} classes; " if len(dataset.classes) > 1 else ""
    console.print(f"{classes}images: {counts}")
    for note in dataset.notes:
        console.print(f"[dim]{escape(note)}[/]")


def show_decisions(console: Console, decisions: Sequence[Decision]) -> None:
    """A row for each; what a run starts from, which matters most and takes the most words, on a line of its own."""
    for decision in decisions:
        if decision.what == START:
            console.print(f"{START}: [bold]{escape(decision.value)}[/] [dim]{escape(decision.why)}[/]")
    table = Table.grid(padding=(0, 2))
    for decision in (decision for decision in decisions if decision.what != START):
        table.add_row(decision.what, f"[bold]{escape(decision.value)}[/]", f"[dim]{escape(decision.why)}[/]")
    if table.row_count:
        console.print(table)
