"""Choose the micro-batch size that fits in memory: by trial on a GPU, by an estimate elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from vitrail.config import NetworkConfig, RunConfig
from vitrail.data.loader.memory import available_memory
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.models.flops import cost, count_parameters
from vitrail.tasks.task import Batch, LossFunction
from vitrail.training.parallel import choose_parallel, train_state_bytes

MEMORY_FRACTION = 0.7  # of the free memory may be used: the estimate is rough, and images need memory, too
FLOAT32_FACTOR = 2.0  # activations in float32 relative to bfloat16
BATCH_COPIES = 4  # of a float batch in memory, while it is loaded and augmented
SPARE_FRACTION = 0.05  # of a GPU's memory to keep free


def check_memory(
    config: RunConfig, model: NetworkConfig, device: torch.device, *, ranks: Ranks, pretrained: bool
) -> None:
    """Raise an error if a new run cannot fit in memory, before anything is built.

    The estimate is a lower bound: the network, the activations of one image, and the pixels of a batch.

    Parameters
    ----------
    pretrained
        Whether the run starts from weights, which are already in memory.
    """
    model_cost = cost(model, whole=False)
    trains = config.kind != "probe" and not config.lora.rank and not config.optimizer.freeze
    copies = 3 if trains else 0 if pretrained else 1  # weights, gradients and one moment, at least
    network = 4 * model_cost.parameters * copies / ranks.world_size
    activations = 0.0 if config.train.gradient_checkpointing or not trains else model_cost.saved
    height, width = model.image_size
    batch = 1 if config.kind == "probe" else max(1, config.train.batch_size // ranks.world_size)
    pixels = float(batch * height * width * model.channels)
    host_memory = available_memory() / ranks.local_world_size
    if device.type == "cuda":
        gpu_memory = float(torch.cuda.get_device_properties(device).total_memory)
        needs = [(network + activations, gpu_memory), (pixels, host_memory)]
    else:
        needs = [(network + activations + pixels, host_memory)]
    for needed, available in needs:
        if needed > available:
            raise UserError(
                f"this run needs more than {needed / 1e9:,.1f} GB of memory ({model_cost.parameters:,} parameters, "
                f"{height}x{width} px, batch size {config.train.batch_size:,}), but only {available / 1e9:,.1f} GB are "
                "available: use a smaller model, image size or train.batch_size"
            )


def choose_micro_batch_size(
    module: nn.Module, loss: LossFunction, example: Batch, config: RunConfig, model: NetworkConfig, ranks: Ranks
) -> int:
    """The largest micro-batch that fits in the memory of this process, at most the batch `example`.

    Parameters
    ----------
    module
        The module to train.
    model
        The config of the network inside `module`.
    """
    device, train = example.weights.device, config.train
    state_bytes = train_state_bytes(count_parameters(model), train)
    sharded = choose_parallel(module, train, ranks, device) == "fsdp"
    if device.type == "cuda" and not sharded:
        return _even_size(len(example), _largest_that_fits(module, loss, example, config))
    if device.type == "cuda":  # a trial is impossible: the network is not sharded yet and may not fit
        total = torch.cuda.get_device_properties(device).total_memory
        free = MEMORY_FRACTION * total - state_bytes / ranks.world_size
    else:  # the weights are already in memory
        free = MEMORY_FRACTION * available_memory() / ranks.local_world_size - 0.75 * state_bytes
    model_cost = cost(model, whole=False)
    factor = 1.0 if config.precision.compute == "bf16" else FLOAT32_FACTOR
    fits = int(free / (factor * (model_cost.saved + model_cost.transient_bytes)))
    return len(example) if fits >= len(example) else _even_size(len(example), max(1, fits))


def _even_size(images: int, most: int) -> int:
    """A micro-batch size of at most `most`: a divisor of `images`, so that all have one shape to compile, unless that
    is less than half of `most`."""
    best = max(size for size in range(1, most + 1) if images % size == 0)
    return best if 2 * best > most else most


def _largest_that_fits(module: nn.Module, loss: LossFunction, example: Batch, config: RunConfig) -> int:
    """Halve the batch until a forward and backward pass fits in GPU memory, next to reserved memory for the optimizer,
    the EMA, batches being loaded and a margin."""
    device = example.weights.device
    cast = autocast(config.precision.compute, device)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    batches = BATCH_COPIES * example.pixels.numel() * example.pixels.element_size()
    spare = int(SPARE_FRACTION * torch.cuda.get_device_properties(device).total_memory)
    reserved = (3 if config.train.ema else 2) * trained + batches + spare
    size = len(example)
    module.train()
    while True:
        try:
            _try_step(module, loss, example.micro_batch(0, size), cast, reserved)
            return size
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise UserError(
                    "out of GPU memory with one image per micro-batch: use --set train.gradient_checkpointing=true, "
                    "a smaller model or image size, or several GPUs with train.parallel=fsdp"
                ) from None
            size = -(-size // 2)
        finally:
            module.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()


def _try_step(
    module: nn.Module,
    loss: LossFunction,
    batch: Batch,
    cast: Callable[[], AbstractContextManager[object]],
    reserved: int,
) -> None:
    placeholder = torch.empty(reserved, dtype=torch.uint8, device=batch.pixels.device)
    with cast():
        result = loss(module, batch)
    result.total.backward()
    torch.cuda.synchronize()
    del placeholder
