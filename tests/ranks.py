"""Starts the processes of distributed runs in tests, quickly and without ports.

The processes are forked from one that has imported torch, and rendezvous through a file.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

FORKS = "forkserver" in multiprocessing.get_all_start_methods()  # Windows has none: each process imports torch
context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
if FORKS:
    context.set_forkserver_preload(
        [
            "vitrail.cli.main",
            "vitrail.workflows.train_run",
            "vitrail.report.page",
            "matplotlib.backends.backend_svg",
            "torch._dynamo",  # torch imports it with the first optimizer
            "torch.distributed.fsdp",
            "tests.ranks",
            "tests.small",
            "vitrail.__main__",
            "jinja2",
        ]
    )
_numbers = itertools.count()
NO_PLOTS = "VITRAIL_TESTS_NO_PLOTS"  # environment variable: save blank plots
BLANK = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>'
HEAP_ERRORS = (
    "malloc",
    "free(): ",
    "realloc(): ",
    "double free",
    "corrupted ",
    "munmap_chunk",
)  # error messages of the C library


class Crashed(Exception):
    """A process of a distributed run crashed in torch; its test runs again (conftest.py).

    Torch 2.13 sometimes frees a small block twice, in a thread of gloo and in another: twice in 60,000 steps.
    """


class Started:
    """Running processes, each with its own files for stdout and stderr."""

    def __init__(self, folder: Path, processes: list[Any]):
        self.folder, self.processes = folder, processes

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def codes(self, timeout: float = 90) -> list[int]:
        """Wait for all processes and return their exit codes. Processes that exceed the timeout are killed."""
        try:
            for process in self.processes:
                process.join(timeout)
            assert not self.alive, f"still running after {timeout:g} s: {self.output()}"
        finally:
            self.kill()
        codes = [process.exitcode for process in self.processes]
        heap_error = any(message in self.errors() for message in HEAP_ERRORS)
        if len(codes) > 1 and (-signal.SIGSEGV in codes or (-signal.SIGABRT in codes and heap_error)):
            raise Crashed(f"ended with {codes}: {self.errors()}")
        return codes

    def results(self) -> list[Any]:
        """Return the results of the target, by rank."""
        codes = self.codes()
        assert codes == [0] * len(self.processes), f"ended with {codes}: {self.errors()}"
        return [torch.load(self.folder / f"result_{rank}") for rank in range(len(self.processes))]

    def output(self) -> str:
        return "".join((self.folder / f"out_{rank}").read_text() for rank in range(len(self.processes)))

    def errors(self) -> str:
        return "".join((self.folder / f"err_{rank}").read_text() for rank in range(len(self.processes)))


def start(world: int, folder: Path, target: Callable[..., Any], *arguments: Any) -> Started:
    """Call `target` in `world` processes, with the environment variables that torchrun sets."""
    output = folder / f"ranks_{next(_numbers)}"
    output.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    processes = []
    for rank in range(world):
        process = context.Process(target=_work, args=(rank, world, output, environment, target, arguments))
        process.start()
        processes.append(process)
    return Started(output, processes)


def _work(
    rank: int, world: int, output: Path, environment: dict[str, str], target: Callable[..., Any], arguments: Any
) -> None:
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(output / f"{name}_{rank}", os.O_WRONLY | os.O_CREAT), number)
    faulthandler.enable()
    torch.set_num_threads(1)
    if NO_PLOTS in environment:  # not that of the forked process, which may be older
        Figure.savefig = save_blank
    code = 0
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{output}/rendezvous", rank=rank, world_size=world)
        torch.save(target(*arguments), output / f"result_{rank}")
        if world > 1:
            dist.barrier()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch may abort during cleanup


def save_blank(_: Figure, file: Any, **options: Any) -> None:
    """Replacement of Figure.savefig, which takes most of the time of a short run."""
    file.write_text(BLANK) if isinstance(file, Path) else file.write(BLANK)


def vitrail(*arguments: object) -> None:
    """Run the command line in this process."""
    from vitrail import distributed
    from vitrail.cli.main import main

    distributed.end_process = lambda: None
    sys.argv = ["vitrail", *map(str, arguments)]
    warnings.filterwarnings("ignore", message="Cyclopts application invoked without tokens")  # it sees pytest here
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
