"""`python -m bench`: run all benchmarks or one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console

from bench import model
from bench.peers import PEERS
from bench.record import RESULTS
from vitrail.errors import UserError

BENCHMARKS = {"model": model.run}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m bench", description="Compare the speed of vitrail with other libraries."
    )
    result.add_argument("name", nargs="?", choices=BENCHMARKS, help="benchmark to run (default: all)")
    result.add_argument("--quick", action="store_true", help="fewer cases, about a minute")
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    result.add_argument("--dtype", choices=["fp32", "bf16"], help="default: fp32 on cpu, bf16 on cuda")
    result.add_argument("--gelu", choices=["erf", "tanh"], default="erf", help="GELU variant of all networks")
    result.add_argument("--compile", action="store_true", help="torch.compile all networks")
    result.add_argument("--busy", action="store_true", help="for a shared machine: one thread, measured in CPU time")
    result.add_argument("--control", action="store_true", help="also compare vitrail with itself")
    result.add_argument(
        "--models", nargs="+", default=[], metavar="NAME", help="such as B/16 'S/16 reg4+layerscale' R50x1"
    )
    result.add_argument("--kinds", nargs="+", default=[], choices=["forward", "training"])
    result.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    result.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = vars(parser().parse_args(arguments))
    name = options.pop("name")
    options["dtype"] = options["dtype"] or {"cpu": "fp32", "cuda": "bf16"}[options["device"]]
    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device")
    settings = model.Settings(**options)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log file has room for the whole table
    for benchmark in [name] if name else BENCHMARKS:
        try:
            BENCHMARKS[benchmark](settings, console)
        except UserError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
