"""One command, or one call of the library, in a process of its own: a fork of one that has imported everything."""

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
class Ended:
    code: int
    out: str
    err: str


def run(work: tuple[str, ...] | Callable[[], Any], folder: Path, timeout: float = 120) -> Ended:
    """In `folder`; what a call returns is printed as JSON."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch, in the process that the others are forked from
    said = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    process = context.Process(target=_work, args=(work, folder, said))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{work} took more than {timeout:g} s: {said[1].read_text()}")
    return Ended(process.exitcode or 0, *(path.read_text(errors="replace") for path in said))


def _work(work: tuple[str, ...] | Callable[[], Any], folder: Path, said: list[Path]) -> None:
    os.environ.update(ENVIRONMENT, VITRAIL_CACHE=str(folder.parent / "cache"))
    os.chdir(folder)
    for number, path in enumerate(said, 1):
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
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
