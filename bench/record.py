"""The output of a benchmark: a table, and a JSON file with the environment to judge and repeat it."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from bench.harness import Comparison

RESULTS = Path(__file__).parent / "results"
PACKAGES = ["torch", "timm", "transformers", "torchvision", "triton"]
COLOURS = {"ahead": "green", "even": "default", "behind": "red"}


def machine_facts(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_results(folder: Path, name: str, results: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def table(title: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], Comparison]]) -> Table:
    """One row per comparison: labels, then each library's time relative to the first, with quartiles."""
    first = rows[0][1].first
    others = list(dict.fromkeys(name for _, comparison in rows for name in comparison.seconds if name != first))
    caption = f"time over that of {first}: above 1, {first} is faster (middle half of the rounds)"
    result = Table(title=title, caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in (*labels, *others):
        result.add_column(heading, justify="left" if heading == labels[0] else "right")
    for cells, comparison in rows:
        result.add_row(*cells, *(ratio_cell(comparison, name) for name in others))
    return result


def ratio_cell(comparison: Comparison, name: str) -> str:
    if name not in comparison.seconds:
        return "-"
    ratio = comparison.ratio(name)
    colour = COLOURS[comparison.verdict(name)]
    return f"[{colour}]{ratio.median:.2f}[/] ({ratio.low:.2f}–{ratio.high:.2f})"
