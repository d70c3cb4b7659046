"""How many images a process can take at a time: tried out on a GPU, estimated elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn

from vitrail.data.loader.memory import available_memory
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.models.flops import cost, parameters
from vitrail.tasks.task import Batch, Objective
from vitrail.training.parallel import choose_parallel
from vitrail.workflows.resolve import Plan

SHARE = 0.7  # of the memory that is left: the estimate is for bfloat16 on a GPU, and images need room too
FLOAT32 = 2.0  # times what activations take in bfloat16
BATCHES = 4  # as large as a batch of floats, on their way to the network
SPARE = 0.05  # of a GPU's memory


def held_bytes(plan: Plan) -> int:
    """Of float32 weights, gradients, two moments and the average, where there is one."""
    return 4 * parameters(plan.model) * (5 if plan.config.train.ema else 4)


def parallel_for(plan: Plan, ranks: Ranks) -> Literal["none", "ddp", "fsdp"]:
    """How the processes of a run share its network."""
    return choose_parallel(plan.config.train.parallel, held_bytes(plan), ranks, plan.device)


def check_room(plan: Plan, world: int, beside: int) -> None:
    """That the memory there is can hold what a new run takes at the very least, before anything is built: the network,
    what is kept of one image, and the pixels of a batch. `beside`: processes on this machine."""
    config, spent = plan.config, cost(plan.model, whole=False)
    trains = config.kind != "probe" and not config.lora.rank and not config.optimizer.freeze
    held = 4 * spent.parameters * (3 if trains else 0 if plan.weights else 1)  # weights, gradients, a moment
    image = 0.0 if config.train.recompute or not trains else spent.saved
    height, width = plan.model.image_size
    batch = 1 if config.kind == "probe" else max(1, config.train.batch_size // world)
    pixels = float(batch * height * width * plan.model.channels)
    if plan.device.type == "cuda":
        checked = [(held / world + image, float(torch.cuda.get_device_properties(plan.device).total_memory))]
        checked.append((pixels, available_memory() / beside))
    else:
        checked = [(held / world + image + pixels, available_memory() / beside)]
    for needed, there in checked:
        if needed > there:
            size = f"{height}x{width} px, a batch of {config.train.batch_size:,}"
            raise UserError(
                f"this run needs more than {needed / 1e9:,.1f} GB of memory ({spent.parameters:,} parameters, {size}), "
                f"and there are {there / 1e9:,.1f} GB: use a smaller model, image size or train.batch_size"
            )


def micro_batch_for(plan: Plan, module: nn.Module, objective: Objective, pattern: Batch, ranks: Ranks) -> int:
    """The most images at a time, up to those of `pattern`, that this process has memory for."""
    held, divided = held_bytes(plan), parallel_for(plan, ranks) == "fsdp"
    if plan.device.type == "cuda" and not divided:
        return _divisor(len(pattern), _tried(plan, module, objective, pattern))
    if plan.device.type == "cuda":  # the network is not divided yet, and as it is it may not even fit
        room = SHARE * torch.cuda.get_device_properties(plan.device).total_memory - held / ranks.world
    else:
        room = SHARE * available_memory() / ranks.beside - 0.75 * held  # the weights are there already
    spent = cost(plan.model, whole=False)
    precision = 1.0 if plan.config.precision.compute == "bf16" else FLOAT32
    fits = int(room / (precision * (spent.saved + spent.passing)))
    return len(pattern) if fits >= len(pattern) else _divisor(len(pattern), max(1, fits))


def _divisor(images: int, most: int) -> int:
    """Parts of equal size, so that no shape is compiled twice; unless they would be far smaller than need be."""
    best = max(size for size in range(1, most + 1) if images % size == 0)
    return best if 2 * best > most else most


def _tried(plan: Plan, module: nn.Module, objective: Objective, pattern: Batch) -> int:
    """Forward and backward passes until one does not run out of memory, with room left for what the optimizer keeps,
    for batches on their way (bytes, floats, mixed with each other) and for what nobody foresees."""
    cast = autocast(plan.config.precision.compute, plan.device)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    batches = BATCHES * pattern.pixels.numel() * pattern.pixels.element_size()
    spare = int(SPARE * torch.cuda.get_device_properties(plan.device).total_memory)
    kept = (3 if plan.config.train.ema else 2) * trained + batches + spare
    size = len(pattern)
    module.train()
    while True:
        try:
            _try(module, objective, pattern.part(0, size), cast, kept)
            return size
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise UserError(
                    "the GPU has no memory for training on even one image: use --set train.recompute=true, a smaller "
                    "model or image size, or several GPUs with train.parallel=fsdp"
                ) from None
            size = -(-size // 2)
        finally:
            module.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()


def _try(
    module: nn.Module,
    objective: Objective,
    batch: Batch,
    cast: Callable[[], AbstractContextManager[object]],
    kept: int,
) -> None:
    place = torch.empty(kept, dtype=torch.uint8, device=batch.pixels.device)
    with cast():
        found = objective(module, batch)
    found.total.backward()
    torch.cuda.synchronize()
    del place
