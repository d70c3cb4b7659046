"""Time of tracing, attention rollout and relevance, relative to a plain forward pass of the same network.

    python -m bench.explain [--device cuda] [--models B/16 ...]

On a CPU, the CPU time of one thread is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from torch import Tensor

from bench.harness import Candidate, Effort, compare, cuda_clock, processor_clock
from bench.record import RESULTS, machine_facts, table, write_results
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout
from vitrail.models.build import create
from vitrail.models.vit import VisionTransformer

BATCH = 8


def candidates(net: VisionTransformer, pixels: Tensor) -> list[Candidate]:
    count = net.config.blocks

    def without_gradients(work: Callable[[], object]) -> Callable[[], object]:
        def no_grad_work() -> object:
            with torch.no_grad():
                return work()

        return no_grad_work

    return [
        Candidate("plain forward", without_gradients(lambda: net(pixels))),
        Candidate(f"trace of 2 of {count} blocks", without_gradients(lambda: net.trace(pixels, [0, -1]))),
        Candidate(f"trace of {count} blocks", without_gradients(lambda: net.trace(pixels))),
        Candidate("rollout", lambda: rollout(net, pixels)),
        Candidate("relevance", lambda: relevance(net, pixels, [0] * len(pixels), [1] * len(pixels))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.explain", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=["Ti/16", "S/16", "B/16"])
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    clock = cuda_clock if options.device == "cuda" else processor_clock
    rows, results = [], {}
    for name in options.models:
        torch.manual_seed(0)
        net = cast(VisionTransformer, create(name)).eval().requires_grad_(False).to(options.device)
        pixels = torch.randn(BATCH, 3, 224, 224, device=options.device)
        result = compare(candidates(net, pixels), Effort(20.0), clock)
        rows.append(([name], result))
        results[name] = result.summary()
    Console(width=160).print(table(f"one pass over {BATCH} images, {options.device}", ["network"], rows))
    facts = {"batch": BATCH, "machine": machine_facts(options.device), "networks": results}
    print(write_results(Path(options.out), f"explain-{options.device}", facts))


if __name__ == "__main__":
    main()
