"""The accuracy that the bundled weights claim, measured again.

    python -m bench.bundled tiny-imagenet      # whatever `vitrail evaluate` takes, with a val split

Fails where the claim does not hold: the images are the same, so that only the arithmetic of machines may differ.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from bench.record import RESULTS, machine_facts, write_results
from vitrail.commands.evaluate import evaluate
from vitrail.metrics.accuracy import ClassificationScores
from vitrail.weights.bundle import read_card
from vitrail.weights.names import bundled_file

TOLERANCE = 0.003  # of top-1; exact copies of training images are left out here, and were not when it was claimed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bundled", description="Check the bundled weights.")
    parser.add_argument("data", help="Tiny-ImageNet")
    parser.add_argument("--split", default="val", help="the split that is measured on")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="where the JSON file goes")
    options = parser.parse_args()
    console, claimed = Console(width=110), read_card(bundled_file()).metrics["top1"]
    with tempfile.TemporaryDirectory() as folder:
        found = evaluate("bundled", options.data, split=options.split, report=Path(folder) / "r.html", console=console)
    assert isinstance(found, ClassificationScores)
    facts = {"machine": machine_facts("cpu"), "images": found.n, "claimed": claimed, "found": found.top1}
    console.print(f"written: {write_results(Path(options.out), 'bundled-cpu', facts)}")
    if abs(found.top1 - claimed) > TOLERANCE:
        raise SystemExit(f"the bundled weights claim {claimed:.2%} and reach {found.top1:.2%}")


if __name__ == "__main__":
    main()
