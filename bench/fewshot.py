"""Time few-shot least squares at the size of ImageNet: solve for all penalties and score a test set.

python -m bench.fewshot
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console

from bench.record import RESULTS, machine_facts, write_results
from vitrail.metrics.fewshot import PENALTY_GRID, SHOTS, LeastSquares


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fewshot", description="Few-shot least squares.")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--tested", type=int, default=0, help="number of test images to score with every penalty")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args()
    console, rows = Console(width=110), []
    torch.manual_seed(0)
    centres = torch.randn(options.classes, options.features)
    test_labels = torch.arange(options.tested) % options.classes
    test = centres[test_labels] + 3 * torch.randn(options.tested, options.features)
    for shots in SHOTS:
        labels = torch.arange(options.classes).repeat(shots)
        x = centres[labels] + 3 * torch.randn(len(labels), options.features)
        began = time.perf_counter()
        problem = LeastSquares(x, labels, options.classes)
        decomposed = time.perf_counter()
        for penalty in PENALTY_GRID:
            problem.weights(penalty)
        solved = time.perf_counter()
        row = {"shots": shots, "decompose_s": round(decomposed - began, 2), "solve_s": round(solved - decomposed, 2)}
        if options.tested:
            problem.count_correct(test, test_labels, PENALTY_GRID)
            row["score_s"] = round(time.perf_counter() - solved, 2)
        rows.append(row)
        console.print(", ".join(f"{name} {value}" for name, value in row.items()))
    sizes = {
        "classes": options.classes,
        "features": options.features,
        "tested": options.tested,
        "penalties": len(PENALTY_GRID),
    }
    facts = {"machine": machine_facts("cpu"), **sizes, "runs": rows}
    console.print(f"written: {write_results(Path(options.out), 'fewshot-cpu', facts)}")


if __name__ == "__main__":
    main()
