"""Training steps (forward, loss, backward, clipping, AdamW) of vitrail, timm, torchvision and transformers.

    python -m bench.train                                     # B/16, batch 256, on a CUDA device
    python -m bench.train --model Ti/16 --batch 8 --eager     # anywhere, to try it

All networks start from the same weights and train on the same random pixels, which are already on the device, with
softmax cross-entropy, gradients clipped to a norm of 1, fused AdamW and, on a GPU, bfloat16 autocast and torch.compile.
vitrail's step is that of `vitrail train` with default settings, including deterministic kernels and the check for
non-finite steps. The other libraries run with their defaults. vitrail is also measured without compilation and without
deterministic kernels.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench import model
from bench.harness import Candidate, Comparison, Effort, compare, cuda_clock, wall_clock
from bench.model import CLASSES, IMAGE_SIZE, compiled
from bench.peers import PEERS
from bench.record import RESULTS, machine_facts, ratio_cell, write_results
from bench.variants import variant
from vitrail.config import ObjectiveConfig, OptimizerConfig, PrecisionConfig, RunConfig, ScheduleConfig
from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.inference.device import deterministic as deterministic_kernels
from vitrail.models.estimate import peak_flops, training_flops
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import Batch
from vitrail.training.optimizer import build_optimizer
from vitrail.training.state import TrainState
from vitrail.training.step import TrainStep

LR, DECAY, CLIP = 1e-4, 0.1, 1.0
WARMUP = 3  # steps before measuring: the first one compiles and creates the optimizer state
OURS = "vitrail"


@dataclass(frozen=True)
class Settings:
    model: str
    batch: int
    seconds: float
    device: Literal["cpu", "cuda"]
    eager: bool
    out: str

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        return "bf16" if self.device == "cuda" else "fp32"


Step = Callable[[], object]


def our_step(net: nn.Module, pixels: Tensor, settings: Settings, *, eager: bool, deterministic: bool) -> Step:
    """The step of `vitrail train`."""
    device, objective = pixels.device, Classification(ObjectiveConfig(), CLASSES)
    config = RunConfig(
        optimizer=OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad_norm=CLIP),
        schedule=ScheduleConfig(shape="constant"),
        precision=PrecisionConfig(compute=settings.precision),
    )
    optimizer = build_optimizer(net.train(), config.optimizer)
    network = net if eager else cast(nn.Module, torch.compile(net))
    state = TrainState(net, optimizer, wrapped=network)
    step = TrainStep(objective.loss, config, device)
    targets = objective.targets(torch.arange(len(pixels), device=device) % CLASSES)
    batch = Batch(pixels, targets, torch.ones(len(pixels), device=device))

    def work() -> None:
        with deterministic_kernels(device, deterministic):
            step(state, batch)

    return work


def peer_step(net: nn.Module, pixels: Tensor, settings: Settings) -> Step:
    """The same step in plain PyTorch, for a network of another library."""
    call = net if settings.eager else compiled(net)
    parameters = list(net.train().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, fused=True)
    labels = torch.arange(len(pixels), device=pixels.device) % CLASSES
    precision = autocast(settings.precision, pixels.device)

    def work() -> None:
        with precision():
            loss = F.cross_entropy(call(pixels), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


def candidates(settings: Settings, console: Console) -> tuple[dict[str, Callable[[], Step]], dict[str, Any]]:
    """Return a function per candidate that sets up its step, vitrail first, and the differences of the networks."""
    config = variant(settings.model, CLASSES, IMAGE_SIZE, "erf")
    nets, agreement = model.candidates(settings.model, config, model.Settings(device=settings.device), console)
    ours = nets.pop("ours")
    pixels = torch.randn(settings.batch, 3, IMAGE_SIZE, IMAGE_SIZE, device=settings.device)

    def make_vitrail(eager: bool, deterministic: bool) -> Callable[[], Step]:
        return lambda: our_step(copy.deepcopy(ours), pixels, settings, eager=eager, deterministic=deterministic)

    def make_peer(net: nn.Module) -> Callable[[], Step]:
        return lambda: peer_step(net, pixels, settings)

    makers = {OURS: make_vitrail(settings.eager, True)}
    makers |= {name: make_peer(nets[name]) for name in PEERS if name in nets}
    if not settings.eager:
        makers[f"{OURS} eager"] = make_vitrail(True, True)
    if settings.device == "cuda":
        makers[f"{OURS} not deterministic"] = make_vitrail(settings.eager, False)
    return makers, agreement


def warmed_up(make: Callable[[], Step], settings: Settings) -> tuple[Step, int]:
    """Set up a step and run it a few times. Return it and its peak memory on the device in bytes, with weights and
    optimizer state but without the batch and the other candidates."""
    if settings.device != "cuda":
        step = make()
        step()
        return step, 0
    before = torch.cuda.memory_allocated()
    step = make()
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return step, peak


def run(settings: Settings, console: Console) -> None:
    """Check that all networks agree, compare their speed, print a table and write the results."""
    # cuBLAS reads this once, when it starts. Set for all candidates alike; vitrail would set it anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32 = False  # the patch projection must be as exact as the other matrix products
    makers, agreement = candidates(settings, console)
    works, memory = [], {}
    for name, make in makers.items():
        with console.status(f"{name}: first steps"):
            step, memory[name] = warmed_up(make, settings)
        works.append(Candidate(name, step))
    with console.status(f"{settings.model}, batch {settings.batch}: timing {len(works)} candidates"):
        clock = cuda_clock if settings.device == "cuda" else wall_clock
        result = compare(works, Effort(seconds=settings.seconds), clock)
    summary = result.summary()
    for name, numbers in summary["contestants"].items():
        numbers |= speeds(name, result, memory[name], settings)
    console.print(result_table(settings, result, summary["contestants"]))
    chosen = {name: value for name, value in asdict(settings).items() if name != "out"}
    chosen |= {"precision": settings.precision, "clip": CLIP, "optimizer": "AdamW, fused"}
    facts = machine_facts(settings.device)
    results = {"settings": chosen, "machine": facts, "agreement": agreement, **summary}
    path = write_results(Path(settings.out), f"train-{device_slug(settings.device)}", results)
    console.print(f"written to {path}")


def speeds(name: str, result: Comparison, memory: int, settings: Settings) -> dict[str, float]:
    """Images/s and TFLOP/s. For all candidates, FLOPs are three forward passes of the full network."""
    rate = settings.batch / result.time(name).median
    flops = rate * training_flops(variant(settings.model, CLASSES, IMAGE_SIZE, "erf"), 1)
    numbers = {"images_per_second": float(f"{rate:.4g}"), "tflops": float(f"{flops / 1e12:.4g}")}
    if settings.device == "cuda":
        numbers["memory"] = memory
        if peak := peak_flops(torch.cuda.get_device_name()):
            numbers["peak_share"] = round(flops / peak, 4)
    return numbers


def result_table(settings: Settings, result: Comparison, numbers: dict[str, dict[str, float]]) -> Table:
    mode = "eager" if settings.eager else "compiled"
    title = f"training step of {settings.model}, batch {settings.batch}, {settings.precision}, {mode}"
    caption = f"time: relative to {OURS}, median and quartiles of the rounds; above 1, {OURS} is faster"
    table = Table(title=title, caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "images/s", "TFLOP/s", "of peak", "memory", "time"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in numbers.items():
        utilisation = f"{100 * row['peak_share']:.0f} %" if "peak_share" in row else "-"
        memory = f"{row['memory'] / 1e9:.1f} GB" if "memory" in row else "-"
        time = "1" if name == OURS else ratio_cell(result, name)
        table.add_row(name, f"{row['images_per_second']:g}", f"{row['tflops']:.3g}", utilisation, memory, time)
    return table


def device_slug(device: str) -> str:
    """The device in the name of the result file, such as "h200", "geforce-rtx-4090" or "cpu"."""
    if device != "cuda":
        return device
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower().removeprefix("nvidia ")).strip("-")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m bench.train", description="Compare the speed of training steps.")
    has_gpu = torch.cuda.is_available()
    result.add_argument("--model", default="B/16" if has_gpu else "Ti/16", help="model name, such as B/16")
    result.add_argument("--batch", type=int, default=256 if has_gpu else 8)
    result.add_argument("--seconds", type=float, default=20.0, help="duration of the comparison, without warm-up")
    result.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu")
    result.add_argument("--eager", action="store_true", help="do not compile the networks; always set on a CPU")
    result.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = vars(parser().parse_args(arguments))
    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device")
    options["eager"] = options["eager"] or options["device"] == "cpu"
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log file has room for the whole table
    try:
        run(Settings(**options), console)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
