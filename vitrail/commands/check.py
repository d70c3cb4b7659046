"""`vitrail check`: find problems of a data set; print them and write a page, JSON and a quarantine list."""

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

EXAMPLES = {"severe": 3, "warning": 2, "note": 1}  # printed per finding
_COLOURS = {"severe": "bold red", "warning": "yellow", "note": "dim"}


def check(
    data: str | Path, *, out: str | Path | None = None, follow_links: bool = True, console: Console | None = None
) -> Findings:
    """Check all images of `data`, and write report.html, report.json and quarantine.csv into `out`."""
    console = console or make_console()
    root = os.path.normpath(user_path(data).absolute())
    folder = user_path(out) if out is not None else Path("checks") / (data_name(root) or "data")
    _refuse_foreign_files(folder)
    try:
        with Interrupts() as interrupts, scan_progress(console, interrupts) as progress:
            findings = check_dataset(data, follow=follow_links, progress=progress)
    except Interrupted as stopped:
        stopped.advice = "; run the same command again to resume"
        raise
    commands = next_commands(findings, str(data), folder, follow_links)
    with os_errors_as(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_quarantine(folder / "quarantine.csv", findings.quarantine)
        with atomic_write(folder / "report.json") as temporary:
            temporary.write_text(strict_json.dumps(findings.to_dict(), indent=1) + "\n", encoding="utf-8")
        write_check_page(folder / "report.html", findings, data_name(findings.root), commands)
    _show(console, findings, folder, commands)
    return findings


def _refuse_foreign_files(folder: Path) -> None:
    """Raise an error if the folder has files other than those of an earlier check. An edited list is the user's."""
    kinds = {"quarantine.csv": "", "report.json": "", "report.html": "check"}
    advice = "move it, or choose another --out (an edited list, or one without its report.json, is not replaced)"
    with os_errors_as(f"cannot write to {folder}"):
        refuse_foreign_files([(folder / name, kind) for name, kind in kinds.items()], advice)


def next_commands(findings: Findings, data: str, folder: Path, follow_links: bool = True) -> list[str]:
    """Return the commands to run next."""
    quarantine = ["--quarantine", str(folder / "quarantine.csv")] if findings.quarantine else []
    return [shlex.join(["vitrail", "train", data, *quarantine, *([] if follow_links else ["--no-follow"])])]


def _show(console: Console, findings: Findings, folder: Path, commands: list[str]) -> None:
    splits = ", ".join(f"{images:,} {name}" for name, images in findings.splits.items() if name != UNSPLIT)
    total = f"{counted(len(findings.source.entries), 'image')} in {counted(len(findings.balance), 'class')}"
    console.print(f"[bold]{escape(findings.root)}[/]: {total}{f' ({splits})' if splits else ''}")
    width = max((len(finding.kind) for finding in findings.findings), default=0)
    for finding in findings.findings:
        colour = _COLOURS[finding.severity]
        console.print(f"[{colour}]{finding.kind:<{width}}[/]  {escape(finding.title)}")
        if finding.severity != "note":
            console.print(f"{'':<{width}}  [dim]{escape(finding.advice)}[/]")
        examples = [_describe(case) for case in finding.cases[: EXAMPLES[finding.severity]]]
        more = len(finding.cases) - len(examples)
        examples[-1] += f", and {more:,} more" if more else ""
        for example in examples:
            console.print(f"{'':<{width}}    [dim]{escape(example)}[/]")
    for note in findings.notes:
        console.print(f"[dim]{escape(note)}[/]")
    if not findings.severe:
        console.print("[green]No leaks between splits, no conflicting labels, no broken or missing files[/]")
    console.print(f"report: [bold]{escape(str(folder / 'report.html'))}[/]")
    if findings.quarantine:
        excluded = f"{counted(len(findings.quarantine), 'file')} to exclude from training"
        console.print(f"{excluded}: [bold]{escape(str(folder / 'quarantine.csv'))}[/]")
    for command in commands:
        console.print(f"next: [bold]{escape(command)}[/]")


def _describe(case: Case) -> str:
    names = " = ".join(_one_line(name) for name in case.names[:3])
    return ": ".join(part for part in (names, case.detail) if part)


def _one_line(name: str) -> str:
    """Escape a file name so that it takes one line."""
    return name if name.isprintable() else ascii(name)[1:-1]
