"""Run one command or library call in its own process, forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import context

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "COLUMNS": "200",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VITRAIL_TRACEBACK": "1",
}


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


def run(work: tuple[str, ...] | Callable[[], Any], folder: Path, timeout: float = 120) -> Finished:
    """Run `work` in `folder`. The result of a call is printed as JSON."""
    os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is imported in the process that forks the others
    output_paths = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    process = context.Process(target=_work, args=(work, folder, output_paths))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{work} took more than {timeout:g} s: {output_paths[1].read_text()}")
    return Finished(process.exitcode or 0, *(path.read_text(errors="replace") for path in output_paths))


def _work(work: tuple[str, ...] | Callable[[], Any], folder: Path, output_paths: list[Path]) -> None:
    os.environ.update(ENVIRONMENT, VITRAIL_CACHE=str(folder.parent / "cache"))
    os.chdir(folder)
    for number, path in enumerate(output_paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    import torch

    torch.set_num_threads(1)
    code = 0
    try:
        if callable(work):
            print(json.dumps(work()))
        else:
            from vitrail.__main__ import main

            sys.argv = ["vitrail", *work]
            main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(bool(stopped.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
