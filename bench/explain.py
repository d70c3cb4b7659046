"""What looking costs: tracing blocks, rollout and relevance beside a plain forward pass of the same network.

    python -m bench.explain [--device cuda] [--models B/16 ...]

On a CPU one thread is judged by processor time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from torch import Tensor

from bench.harness import Contestant, Effort, cuda_clock, processor_clock, race
from bench.record import RESULTS, machine_facts, table, write_results
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout
from vitrail.models.build import create
from vitrail.models.vit import VisionTransformer

BATCH = 8


def contestants(net: VisionTransformer, pixels: Tensor) -> list[Contestant]:
    count = net.config.blocks

    def quietly(work: Callable[[], object]) -> Callable[[], object]:
        def done() -> object:
            with torch.no_grad():
                return work()

        return done

    return [
        Contestant("plain forward", quietly(lambda: net(pixels))),
        Contestant(f"trace of 2 of {count} blocks", quietly(lambda: net.trace(pixels, [0, -1]))),
        Contestant(f"trace of {count} blocks", quietly(lambda: net.trace(pixels))),
        Contestant("rollout", lambda: rollout(net, pixels)),
        Contestant("relevance", lambda: relevance(net, pixels, [0] * len(pixels), [1] * len(pixels))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.explain", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=["Ti/16", "S/16", "B/16"])
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="where the JSON file goes")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    clock = cuda_clock if options.device == "cuda" else processor_clock
    rows, results = [], {}
    for name in options.models:
        torch.manual_seed(0)
        net = cast(VisionTransformer, create(name)).eval().requires_grad_(False).to(options.device)
        found = race(contestants(net, torch.randn(BATCH, 3, 224, 224, device=options.device)), Effort(20.0), clock)
        rows.append(([name], found))
        results[name] = found.summary()
    Console(width=160).print(table(f"one pass over {BATCH} images, {options.device}", ["network"], rows))
    facts = {"batch": BATCH, "machine": machine_facts(options.device), "networks": results}
    print(write_results(Path(options.out), f"explain-{options.device}", facts))


if __name__ == "__main__":
    main()
