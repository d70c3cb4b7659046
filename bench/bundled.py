"""Measure the accuracy of the bundled weights and compare it with the accuracy in their model card.

    python -m bench.bundled tiny-imagenet      # a dataset with a validation split, as `vitrail evaluate` takes it

Fails if the two differ by more than the tolerance.
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

TOLERANCE = 0.003  # of top-1; `evaluate` excludes exact copies of training images, the accuracy in the card does not


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bundled", description="Check the bundled weights.")
    parser.add_argument("data", help="the Tiny-ImageNet dataset")
    parser.add_argument("--split", default="val", help="split to measure")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args()
    console, claimed = Console(width=110), read_card(bundled_file()).metrics["top1"]
    with tempfile.TemporaryDirectory() as folder:
        scores = evaluate("bundled", options.data, split=options.split, report=Path(folder) / "r.html", console=console)
    assert isinstance(scores, ClassificationScores)
    facts = {"machine": machine_facts("cpu"), "images": scores.n, "claimed": claimed, "found": scores.top1}
    console.print(f"written: {write_results(Path(options.out), 'bundled-cpu', facts)}")
    if abs(scores.top1 - claimed) > TOLERANCE:
        raise SystemExit(f"the card of the bundled weights states {claimed:.2%}, measured: {scores.top1:.2%}")


if __name__ == "__main__":
    main()
