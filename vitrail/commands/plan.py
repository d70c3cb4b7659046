"""`vitrail plan`: estimate memory and time of training a network, without running it."""

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
    """The estimated cost of a network and of one training step."""

    model: str
    config: NetworkConfig
    cost: Cost  # of the whole network, counted as in the paper
    accelerator: str
    memory: float  # bytes of the accelerator
    step: StepEstimate

    def to_dict(self) -> dict[str, object]:
        """Return plain values in bytes and seconds."""
        memory = asdict(self.step.memory) | {"total": self.step.memory.total}
        return {
            "model": self.model,
            "image_size": list(self.config.image_size),
            "num_classes": self.config.num_classes,
            "parameters": self.cost.parameters,
            "macs": self.cost.macs,
            "tokens": self.config.sequence if isinstance(self.config, ModelConfig) else None,
            "accelerator": self.accelerator,
            "batch": self.step.batch,
            "memory_bytes": {name: round(value) for name, value in memory.items()},
            "fits": self.step.memory.total <= self.memory,
            "largest_batch": self.step.largest_batch,
            "step_seconds": self.step.seconds,
            "images_per_second": self.step.batch / self.step.seconds,
        }


def estimate(
    name: str, classes: int, image_size: Size, batch: int, accelerator: str, overrides: Sequence[str] = ()
) -> Estimate:
    """Estimate the cost of training a network with this batch size on one accelerator."""
    if batch < 1 or classes < 0:
        option, least, value = ("--batch", 1, batch) if batch < 1 else ("--classes", 0, classes)
        raise UserError(f"{option} must be {least} or more, not {value}")
    known, device = find_accelerator(accelerator)
    config = new_network(_choice(name, image_size, overrides), classes)
    return Estimate(name, config, cost(config), known, device.memory, estimate_training_step(config, batch, device))


def _choice(name: str, image_size: Size, overrides: Sequence[str]) -> ModelChoice:
    settings = parse_overrides(overrides)
    for key in settings:
        if key != "model":
            raise UserError(f"vitrail plan takes only settings of the model (--set model.key=value), not '{key}'")
    model = settings.get("model", {})
    for key in ("name", "image_size", "weights"):
        if key in model:
            raise UserError(f"model.{key} has no effect in vitrail plan: use MODEL and --image-size")
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
    """Print an estimate, as text or JSON."""
    result = estimate(name, classes, image_size, batch, accelerator, overrides)
    if as_json:
        print(strict_json.dumps(result.to_dict()))
    else:
        show(result, console)


def show(result: Estimate, console: Console) -> None:
    """Print an estimate as tables."""
    config, step = result.config, result.step
    height, width = config.image_size
    console.print(f"[bold]{escape(result.model)}[/] at {height}x{width} px, {config.num_classes:,} classes")
    table = Table.grid(padding=(0, 2))
    table.add_row("parameters", f"{result.cost.parameters:,}", f"{_bytes(4 * result.cost.parameters)} on disk")
    if isinstance(config, ModelConfig):
        rows, columns = config.grid
        table.add_row("tokens", f"{config.sequence:,}", f"{rows}x{columns} patches and {config.prefix} prefix tokens")
    forward = f"{result.cost.macs / 1e9:,.2f} G"
    table.add_row(
        "multiply-adds", forward, f"per image, forward; training takes {6 * result.cost.macs / 1e9:,.1f} GFLOP"
    )
    console.print(table)
    console.print(f"\n[bold]a training step[/] of {step.batch:,} images on one {result.accelerator}, bfloat16, AdamW")
    memory = step.memory
    table = Table.grid(padding=(0, 2))
    limit = f"of {_bytes(result.memory)}; the largest batch is about {step.largest_batch:,}"
    if not step.largest_batch:
        limit = f"[red]more than its {_bytes(result.memory)} even without a batch[/]"
    elif memory.total > result.memory:
        limit = f"[red]more than its {_bytes(result.memory)}[/]; the largest batch is about {step.largest_batch:,}"
    table.add_row("time", f"{step.seconds * 1000:,.1f} ms", f"{step.batch / step.seconds:,.0f} images per second")
    table.add_row("memory", _bytes(memory.total), limit)
    table.add_row("  weights", _bytes(memory.weights))
    table.add_row("  optimizer", _bytes(memory.optimizer))
    table.add_row("  activations", _bytes(memory.activations), "including images and bfloat16 weights")
    table.add_row("  gradients", _bytes(memory.gradients), "allocated as activations are freed")
    console.print(table)
    note = f"estimated with formulas fitted on one {CALIBRATED_ON}, without data loading and without compilation"
    if result.accelerator != CALIBRATED_ON:
        note += f"; unverified for {result.accelerator}"
    console.print(f"[dim]{note}[/]")


def _bytes(amount: float) -> str:
    return f"{amount / 1e9:,.1f} GB" if amount >= 1e8 else f"{amount / 1e6:,.1f} MB"
