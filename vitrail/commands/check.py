"""`vitrail check`: what is wrong with a data set, in the terminal, as a page, as JSON and as a list to leave out."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console

from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.data.quarantine import write_quarantine
from vitrail.data.sources.data_source import UNSPLIT, counted
from vitrail.doctor.check import check_dataset
from vitrail.doctor.findings import Case, Findings
from vitrail.errors import os_errors_as, user_path
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.report.check_page import write_check_page
from vitrail.terminal import escape, make_console
from vitrail.workflows.show import data_name, scan_progress
from vitrail.workflows.vitrail_files import refuse_foreign_files

EXAMPLES = {"severe": 3, "warning": 2, "note": 1}  # shown for each finding
_COLOURS = {"severe": "bold red", "warning": "yellow", "note": "dim"}


def check(
    data: str | Path, *, out: str | Path | None = None, follow_links: bool = True, console: Console | None = None
) -> Findings:
    """Look at all images of `data` and write report.html, report.json and quarantine.csv into `out`."""
    console = console or make_console()
    root = os.path.normpath(user_path(data).absolute())
    folder = user_path(out) if out is not None else Path("checks") / (data_name(root) or "data")
    _refuse_others(folder)
    try:
        with Interrupts() as interrupts, scan_progress(console, interrupts) as scanned:
            found = check_dataset(data, follow=follow_links, progress=scanned)
    except Interrupted as stopped:
        stopped.advice = "; what was looked at is remembered, so the same command goes on from there"
        raise
    commands = next_commands(found, str(data), folder, follow_links)
    with os_errors_as(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_quarantine(folder / "quarantine.csv", found.quarantine)
        with atomic_write(folder / "report.json") as temporary:
            temporary.write_text(strict_json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
        write_check_page(folder / "report.html", found, data_name(found.root), commands)
    _show(console, found, folder, commands)
    return found


def _refuse_others(folder: Path) -> None:
    """What is written takes the place of an earlier check, and of nothing else: not of a list that was edited."""
    kinds = {"quarantine.csv": "", "report.json": "", "report.html": "check"}
    advice = "move it, or choose another --out (a list that was edited, or lost its report.json, counts as yours)"
    with os_errors_as(f"cannot write to {folder}"):
        refuse_foreign_files([(folder / name, kind) for name, kind in kinds.items()], advice)


def next_commands(found: Findings, data: str, folder: Path, follow_links: bool = True) -> list[str]:
    """What to do next."""
    listed = ["--quarantine", str(folder / "quarantine.csv")] if found.quarantine else []
    return [shlex.join(["vitrail", "train", data, *listed, *([] if follow_links else ["--no-follow"])])]


def _show(console: Console, found: Findings, folder: Path, commands: list[str]) -> None:
    splits = ", ".join(f"{images:,} {name}" for name, images in found.splits.items() if name != UNSPLIT)
    total = f"{counted(len(found.source.entries), 'image')} in {counted(len(found.balance), 'class')}"
    console.print(f"[bold]{escape(found.root)}[/]: {total}{f' ({splits})' if splits else ''}")
    width = max((len(finding.kind) for finding in found.findings), default=0)
    for finding in found.findings:
        colour = _COLOURS[finding.severity]
        console.print(f"[{colour}]{finding.kind:<{width}}[/]  {escape(finding.title)}")
        if finding.severity != "note":
            console.print(f"{'':<{width}}  [dim]{escape(finding.advice)}[/]")
        examples = [_words(case) for case in finding.cases[: EXAMPLES[finding.severity]]]
        more = len(finding.cases) - len(examples)
        examples[-1] += f", and {more:,} more" if more else ""
        for example in examples:
            console.print(f"{'':<{width}}    [dim]{escape(example)}[/]")
    for note in found.notes:
        console.print(f"[dim]{escape(note)}[/]")
    if not found.severe:
        console.print("[green]No leaks between splits, no conflicting labels, no broken or missing files.[/]")
    console.print(f"report: [bold]{escape(str(folder / 'report.html'))}[/]")
    if found.quarantine:
        listed = f"{counted(len(found.quarantine), 'file')} that training should leave out"
        console.print(f"{listed}: [bold]{escape(str(folder / 'quarantine.csv'))}[/]")
    for command in commands:
        console.print(f"next: [bold]{escape(command)}[/]")


def _words(case: Case) -> str:
    names = " = ".join(_shown(name) for name in case.names[:3])
    return ": ".join(part for part in (names, case.detail) if part)


def _shown(name: str) -> str:
    """A file name on one line."""
    return name if name.isprintable() else ascii(name)[1:-1]
