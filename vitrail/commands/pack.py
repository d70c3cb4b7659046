"""`vitrail pack`: a data set as a few large files that are read fast from any disk."""

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
    folder: Path
    images: int
    bytes: int
    shards: int
    left_out: list[tuple[str, str]]  # (name, why)


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
    """Write the images of `data` into shards in the folder `out`; called again after a stop, it goes on."""
    console = console or make_console()
    for name, value, low, high in (
        ("resize", resize, 1, 65_535),
        ("quality", quality, 1, 100),
        ("shard-mb", shard_mb, 1, 100_000),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name} is a number from {low:,} to {high:,}, not {value:,}")
    options = PackOptions(MAX_PIXELS, resize, quality, shard_mb * 1_000_000)
    folder, root, started = user_path(out), user_path(data), time.monotonic()
    if root.is_dir() and root.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UserError(f"'{out}' lies inside the data: name a folder outside of '{data}'")
    with Interrupts() as interrupts:
        try:
            with interrupts.interruptible():
                manifest, packing = _packed(data, folder, options, follow_links, console, interrupts)
        except Interrupted as stopped:
            stopped.advice = "; give the same command again to go on"
            raise
        except OSError as error:
            raise UserError(f"cannot write to '{folder}': {error_reason(error)}; what is there is kept") from None
    written = sum(shard["bytes"] for shard in manifest["shards"])
    images = sum(shard["images"] for shard in manifest["shards"])
    console.print(
        f"[bold]{escape(str(folder))}[/]: {counted(images, 'image')} in {counted(len(manifest['shards']), 'shard')}, "
        f"{written / 1e6:,.1f} MB, {time.monotonic() - started:.0f} s"
    )
    for name, why in packing.skipped[:3]:
        console.print(f"[yellow]left out: {escape(name)}: {escape(why)}[/]")
    if len(packing.skipped) > 3:
        console.print(f"[yellow]and {len(packing.skipped) - 3:,} more, listed in manifest.json[/]")
    console.print(f"next: {escape(shlex.join(['vitrail', 'train', str(folder)]))}")
    return PackResult(folder, images, written, len(manifest["shards"]), packing.skipped)


def _packed(
    data: str | Path,
    folder: Path,
    options: PackOptions,
    follow_links: bool,
    console: Console,
    interrupts: Interrupts,
) -> tuple[dict, Packer]:
    notes: list[str] = []
    source = read_source(data, notes, follow=follow_links)
    with scan_progress(console, interrupts) as scanned:
        found = scan_source(source, options.max_pixels, scanned)
    check_readable(source, found, data)
    packing = Packer(source, found, folder, options)
    kept = packing.begin()
    if kept:
        console.print(f"going on: {counted(kept, 'shard')} of {len(packing.shards)} are there")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing images", total=None)

        def packed(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        packing.write(packed)
    with scan_progress(console, interrupts) as scanned:
        return packing.finish(notes, scanned), packing
