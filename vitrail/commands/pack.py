"""`vitrail pack`: write a data set as a few large shards, which are fast to read from any disk."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vitrail.data.dataset import check_readable, scan_source
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.pack import Packer, PackOptions
from vitrail.data.sources.data_source import counted
from vitrail.data.sources.read import read_source
from vitrail.errors import UserError, error_reason, user_path
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.terminal import escape, make_console
from vitrail.workflows.show import scan_progress


@dataclass(frozen=True)
class PackResult:
    """The folder of shards, and what was written."""

    folder: Path
    images: int
    bytes: int
    shards: int
    skipped: list[tuple[str, str]]  # (name, reason)


def pack(
    data: str | Path,
    out: str | Path,
    *,
    resize: int | None = None,
    quality: int = 95,
    shard_mb: int = 256,
    follow_links: bool = True,
    console: Console | None = None,
) -> PackResult:
    """Write the images of `data` into shards in the folder `out`. A stopped call resumes when repeated."""
    console = console or make_console()
    for name, value, low, high in (
        ("resize", resize, 1, 65_535),
        ("quality", quality, 1, 100),
        ("shard-mb", shard_mb, 1, 100_000),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name} must be between {low:,} and {high:,}, not {value:,}")
    options = PackOptions(MAX_PIXELS, resize, quality, shard_mb * 1_000_000)
    folder, root, started = user_path(out), user_path(data), time.monotonic()
    if root.is_dir() and root.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UserError(f"'{out}' is inside the data: choose a folder outside of '{data}'")
    with Interrupts() as interrupts:
        try:
            with interrupts.interruptible():
                manifest, packer = _pack(data, folder, options, follow_links, console, interrupts)
        except Interrupted as stopped:
            stopped.advice = "; run the same command again to resume"
            raise
        except OSError as error:
            raise UserError(f"cannot write to '{folder}': {error_reason(error)}; finished shards are kept") from None
    written = sum(shard["bytes"] for shard in manifest["shards"])
    images = sum(shard["images"] for shard in manifest["shards"])
    console.print(
        f"[bold]{escape(str(folder))}[/]: {counted(images, 'image')} in {counted(len(manifest['shards']), 'shard')}, "
        f"{written / 1e6:,.1f} MB, {time.monotonic() - started:.0f} s"
    )
    for name, reason in packer.skipped[:3]:
        console.print(f"[yellow]skipped: {escape(name)}: {escape(reason)}[/]")
    if len(packer.skipped) > 3:
        console.print(f"[yellow]{len(packer.skipped) - 3:,} more skipped images are listed in manifest.json[/]")
    console.print(f"next: {escape(shlex.join(['vitrail', 'train', str(folder)]))}")
    return PackResult(folder, images, written, len(manifest["shards"]), packer.skipped)


def _pack(
    data: str | Path,
    folder: Path,
    options: PackOptions,
    follow_links: bool,
    console: Console,
    interrupts: Interrupts,
) -> tuple[dict, Packer]:
    notes: list[str] = []
    source = read_source(data, notes, follow=follow_links)
    with scan_progress(console, interrupts) as progress:
        scan = scan_source(source, options.max_pixels, progress)
    check_readable(source, scan, data)
    packer = Packer(source, scan, folder, options)
    kept = packer.begin()
    if kept:
        console.print(f"resuming: {kept} of {counted(len(packer.shards), 'shard')} finished")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing images", total=None)

        def advance(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        packer.write(advance)
    with scan_progress(console, interrupts) as progress:
        return packer.finish(notes, progress), packer
