"""Recall, false positives and run time of `vitrail check` on data with planted faults.

    python -m bench.check
    python -m bench.check --data ../photos

Faults are planted among generated images, or among the images of --data. Among generated images, every near-duplicate
that was not planted is a false positive. Real photos can contain near-duplicates, so there the number is only printed.
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


def dataset_images(path: str) -> Iterator[Image.Image]:
    """All images of a dataset in random order."""
    source = read_source(path, [])
    for row in np.random.default_rng(0).permutation(len(source.entries)):
        yield Image.fromarray(decode(source.files.read(source.entries[row].name)))


def compare(planted: Planted, findings: Findings) -> dict[str, dict[str, int]]:
    """Kind -> number of planted cases, of those that were found, and of cases that were not planted."""
    result = {}
    for kind, expected in planted.cases.items():
        kind_findings = [finding for finding in findings.findings if finding.kind == kind]
        cases = [frozenset(case.names) for finding in kind_findings for case in finding.cases]
        hits = [names for names in expected if any(names <= case for case in cases)]
        others = [case for case in cases if not any(names <= case for names in expected)]
        result[kind] = {"planted": len(expected), "found": len(hits), "others": len(others)}
    return result


def recall_by_change(planted: Planted, findings: Findings) -> dict[str, str]:
    """Kind of image change -> near-duplicates found, as "found/planted"."""
    cases = [frozenset(case.names) for finding in findings.findings for case in finding.cases]
    recalls = {}
    for change in CHANGES:
        pairs = [pair for pair, pair_change in planted.changes.items() if pair_change == change]
        recalls[change] = f"{sum(any(pair <= case for case in cases) for pair in pairs)}/{len(pairs)}"
    return recalls


def measure(count: int, data: str | None) -> dict[str, Any]:
    """Plant faults, check the data with an empty cache, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRAIL_CACHE"] = f"{folder}/cache"
        root = Path(folder) / "data"
        images = islice(dataset_images(data), count) if data else generated(count)
        planted = plant(root, images, count)
        stages = [time.perf_counter()]

        def progress(done: int, total: int) -> None:
            if done == total and len(stages) == 1:
                stages.append(time.perf_counter())  # the end of the scan

        findings = check_dataset(root, progress=progress)
        stages.append(time.perf_counter())
        return {
            "images": planted.images,
            "seconds": round(stages[-1] - stages[0], 2),
            "scan_seconds": round(stages[1] - stages[0], 2),
            "kinds": compare(planted, findings),
            "near_copies": recall_by_change(planted, findings),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description="Accuracy and speed of `vitrail check`.")
    parser.add_argument("--data", help="use the images of this dataset instead of generated ones")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
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
    for change, recall in rows[-1]["near_copies"].items():
        console.print(f"  {change:<24}{recall:>8}")
    console.print(f"time is proportional to images ** {growth:.2f}")
    name = "check-cpu" if not options.data else f"check-{Path(options.data).name}-cpu"
    kind = "real" if options.data else "generated"
    facts = {"machine": machine_facts("cpu"), "images": kind, "growth": round(growth, 3), "runs": rows}
    console.print(f"written: {write_results(Path(options.out), name, facts)}")


if __name__ == "__main__":
    main()
