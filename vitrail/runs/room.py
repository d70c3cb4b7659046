"""How many images a process can take at a time: tried out on a GPU, estimated elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from vitrail.errors import UserError
from vitrail.images.loading.memory import available_memory
from vitrail.model.cost import cost
from vitrail.objectives.batch import Objective, Prepared
from vitrail.runs.plan import Plan
from vitrail.training.precision import autocast

SHARE = 0.7  # of the memory that is left: the estimate is for bfloat16 on a GPU, and images need room too
FLOAT32 = 2.0  # times what activations take in bfloat16


def micro_batch_for(plan: Plan, module: nn.Module, objective: Objective, pattern: Prepared, beside: int) -> int:
    """The most images at a time, up to those of `pattern`, that this process has memory for."""
    if plan.device.type == "cuda":
        return _tried(plan, module, objective, pattern)
    size, spent = len(pattern), cost(plan.model, whole=False)
    kept = 4 if plan.config.train.ema else 3  # gradients, two moments and the average; the weights are there already
    room = SHARE * available_memory() / beside - 4 * kept * spent.parameters
    precision = 1.0 if plan.config.precision.compute == "bf16" else FLOAT32
    while size > 1 and precision * (spent.saved + spent.passing) * size > room:
        size = -(-size // 2)
    return size


def _tried(plan: Plan, module: nn.Module, objective: Objective, pattern: Prepared) -> int:
    """Forward and backward passes with room left for what the optimizer keeps, until one does not run out of memory."""
    cast = autocast(plan.config.precision.compute, plan.device)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    size = len(pattern)
    module.train()
    while True:
        try:
            _try(module, objective, pattern.part(0, size), cast, (3 if plan.config.train.ema else 2) * trained)
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
    batch: Prepared,
    cast: Callable[[], AbstractContextManager[object]],
    kept: int,
) -> None:
    place = torch.empty(kept, dtype=torch.uint8, device=batch.pixels.device)
    with cast():
        found = objective(module, batch)
    found.total.backward()
    torch.cuda.synchronize()
    del place
