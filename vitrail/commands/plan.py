"""`vitrail plan`: what a network will cost to train, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from vitrail import strict_json
from vitrail.config import ModelChoice, ModelConfig, NetworkConfig, Size, parse_overrides, validate
from vitrail.errors import UserError
from vitrail.models.estimate import CALIBRATED_ON, StepEstimate, estimate_training_step, find_accelerator
from vitrail.models.flops import Cost, cost
from vitrail.terminal import escape
from vitrail.workflows.network import new_network


@dataclass(frozen=True)
class Estimate:
    model: str
    config: NetworkConfig
    cost: Cost  # of the whole network, as the paper counts
    accelerator: str
    memory: float  # bytes that the accelerator has
    step: StepEstimate

    def to_dict(self) -> dict[str, object]:
        """For scripts: bytes, seconds and plain counts."""
        held = asdict(self.step.memory) | {"total": self.step.memory.total}
        return {
            "model": self.model,
            "image_size": list(self.config.image_size),
            "num_classes": self.config.num_classes,
            "parameters": self.cost.parameters,
            "macs": self.cost.macs,
            "tokens": self.config.sequence if isinstance(self.config, ModelConfig) else None,
            "accelerator": self.accelerator,
            "batch": self.step.batch,
            "memory_bytes": {name: round(value) for name, value in held.items()},
            "fits": self.step.memory.total <= self.memory,
            "largest_batch": self.step.largest_batch,
            "step_seconds": self.step.seconds,
            "images_per_second": self.step.batch / self.step.seconds,
        }


def estimate(
    name: str, classes: int, image_size: Size, batch: int, accelerator: str, overrides: Sequence[str] = ()
) -> Estimate:
    if batch < 1 or classes < 0:
        raise UserError("a plan needs a batch of at least one image, and no negative number of classes")
    known, device = find_accelerator(accelerator)
    config = new_network(_choice(name, image_size, overrides), classes)
    return Estimate(name, config, cost(config), known, device.memory, estimate_training_step(config, batch, device))


def _choice(name: str, image_size: Size, overrides: Sequence[str]) -> ModelChoice:
    given = parse_overrides(overrides)
    for key in given:
        if key != "model":
            raise UserError(f"a plan takes settings of the network, as model.key=value, not of '{key}'")
    model = given.get("model", {})
    for key in ("name", "image_size", "weights"):
        if key in model:
            raise UserError(f"model.{key} is not for a plan, which takes MODEL and --image-size")
    return validate(ModelChoice, {**model, "name": name, "image_size": image_size}, "model")


def plan(
    name: str,
    *,
    classes: int,
    image_size: Size,
    batch: int,
    accelerator: str,
    overrides: Sequence[str],
    as_json: bool,
    console: Console,
) -> None:
    found = estimate(name, classes, image_size, batch, accelerator, overrides)
    if as_json:
        print(strict_json.dumps(found.to_dict()))
    else:
        show(found, console)


def show(found: Estimate, console: Console) -> None:
    config, step = found.config, found.step
    height, width = config.image_size
    console.print(f"[bold]{escape(found.model)}[/] at {height}x{width} px, {config.num_classes:,} classes")
    table = Table.grid(padding=(0, 2))
    table.add_row("parameters", f"{found.cost.parameters:,}", f"{_bytes(4 * found.cost.parameters)} on disk")
    if isinstance(config, ModelConfig):
        rows, columns = config.grid
        table.add_row("tokens", f"{config.sequence:,}", f"{rows}x{columns} patches and {config.prefix} before them")
    forward = f"{found.cost.macs / 1e9:,.2f} G"
    table.add_row("multiply-adds", forward, f"an image, forward; training takes {6 * found.cost.macs / 1e9:,.1f} GFLOP")
    console.print(table)
    console.print(f"\n[bold]a training step[/] of {step.batch:,} images on one {found.accelerator}, bfloat16, AdamW")
    held = step.memory
    table = Table.grid(padding=(0, 2))
    room = f"of {_bytes(found.memory)}; the largest batch is about {step.largest_batch:,}"
    if not step.largest_batch:
        room = f"[red]more than its {_bytes(found.memory)} even without a batch[/]"
    elif held.total > found.memory:
        room = f"[red]more than its {_bytes(found.memory)}[/]; the largest batch is about {step.largest_batch:,}"
    table.add_row("time", f"{step.seconds * 1000:,.1f} ms", f"{step.batch / step.seconds:,.0f} images a second")
    table.add_row("memory", _bytes(held.total), room)
    table.add_row("  weights", _bytes(held.weights))
    table.add_row("  optimizer", _bytes(held.optimizer))
    table.add_row("  activations", _bytes(held.activations), "with the images and a copy of the weights in bfloat16")
    table.add_row("  gradients", _bytes(held.gradients), "these come as activations go")
    console.print(table)
    note = f"estimated with formulas fitted on one {CALIBRATED_ON}, without data loading and without compilation"
    if found.accelerator != CALIBRATED_ON:
        note += f"; that the {found.accelerator} comes as near to its peak is a guess"
    console.print(f"[dim]{note}[/]")


def _bytes(amount: float) -> str:
    return f"{amount / 1e9:,.1f} GB" if amount >= 1e8 else f"{amount / 1e6:,.1f} MB"
