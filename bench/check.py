"""Whether `vitrail check` finds what is wrong, what it finds that is not, and how its time grows.

    python -m bench.check
    python -m bench.check --data ../photos

Faults are planted among generated pictures, or among the images of --data. Of generated pictures, every near copy that
was not planted is a false one; real photographs have copies of their own, so there the number is only told.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from bench.planted import CHANGES, Planted, generated, plant
from bench.record import RESULTS, machine_facts, write_results
from vitrail.data.decode import decode
from vitrail.data.sources.read import read_source
from vitrail.doctor.check import check_dataset
from vitrail.doctor.findings import Findings


def real(path: str) -> Iterator[Image.Image]:
    source = read_source(path, [])
    for row in np.random.default_rng(0).permutation(len(source.entries)):
        yield Image.fromarray(decode(source.files.read(source.entries[row].name)))


def compare(planted: Planted, found: Findings) -> dict[str, dict[str, int]]:
    """Kind -> how many were planted, how many of these were found, and how many cases were not planted."""
    result = {}
    for kind, wanted in planted.cases.items():
        cases = [frozenset(case.names) for finding in found.findings if finding.kind == kind for case in finding.cases]
        hits = [one for one in wanted if any(one <= case for case in cases)]
        others = [case for case in cases if not any(one <= case for one in wanted)]
        result[kind] = {"planted": len(wanted), "found": len(hits), "others": len(others)}
    return result


def missed_changes(planted: Planted, found: Findings) -> dict[str, str]:
    """What was done to near copies -> how many were found of how many."""
    cases = [frozenset(case.names) for finding in found.findings for case in finding.cases]
    told = {}
    for change in CHANGES:
        pairs = [pair for pair, done in planted.changes.items() if done == change]
        told[change] = f"{sum(any(pair <= case for case in cases) for pair in pairs)}/{len(pairs)}"
    return told


def measure(count: int, data: str | None) -> dict[str, Any]:
    """Plant, check without anything remembered, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRAIL_CACHE"] = f"{folder}/cache"
        root = Path(folder) / "data"
        images = islice(real(data), count) if data else generated(count)
        planted = plant(root, images, count)
        stages = [time.perf_counter()]

        def progress(done: int, total: int) -> None:
            if done == total and len(stages) == 1:
                stages.append(time.perf_counter())  # the end of the scan

        found = check_dataset(root, progress=progress)
        stages.append(time.perf_counter())
        return {
            "images": planted.images,
            "seconds": round(stages[-1] - stages[0], 2),
            "scan_seconds": round(stages[1] - stages[0], 2),
            "kinds": compare(planted, found),
            "near_copies": missed_changes(planted, found),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description="What `vitrail check` finds, how fast.")
    parser.add_argument("--data", help="take images from here and not generated ones")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="where the JSON file goes")
    options = parser.parse_args()
    console = Console(width=110)
    rows = []
    for count in (options.count // 4, options.count // 2, options.count):
        row = measure(count, options.data)
        rows.append(row)
        console.print(f"{row['images']:,} images: {row['seconds']:.1f} s, the scan {row['scan_seconds']:.1f} s")
    growth = math.log2(rows[-1]["seconds"] / rows[0]["seconds"]) / 2
    table = Table(title=f"faults among {rows[-1]['images']:,} images", box=box.SIMPLE)
    for heading in ("kind", "planted", "found", "not planted"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, counts in rows[-1]["kinds"].items():
        table.add_row(kind, *(str(number) for number in counts.values()))
    console.print(table)
    for change, told in rows[-1]["near_copies"].items():
        console.print(f"  {change:<24}{told:>8}")
    console.print(f"time grows as images to the power of {growth:.2f}")
    name = "check-cpu" if not options.data else f"check-{Path(options.data).name}-cpu"
    kind = "real" if options.data else "generated"
    facts = {"machine": machine_facts("cpu"), "images": kind, "growth": round(growth, 3), "runs": rows}
    console.print(f"written: {write_results(Path(options.out), name, facts)}")


if __name__ == "__main__":
    main()
