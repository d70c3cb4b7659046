"""How many images a process can take at a time: tried out on a GPU, estimated elsewhere."""

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

SHARE = 0.7  # of the memory that is left: the estimate is for bfloat16 on a GPU, and images need room too
FLOAT32 = 2.0  # times what activations take in bfloat16
BATCHES = 4  # as large as a batch of floats, on their way to the network
SPARE = 0.05  # of a GPU's memory


def check_memory(
    config: RunConfig, model: NetworkConfig, device: torch.device, *, ranks: Ranks, pretrained: bool
) -> None:
    """That the memory there is can hold what a new run takes at the very least, before anything is built: the network,
    what is kept of one image, and the pixels of a batch.

    Parameters
    ----------
    pretrained
        Whether the run starts from weights, which are in memory already.
    """
    spent = cost(model, whole=False)
    trains = config.kind != "probe" and not config.lora.rank and not config.optimizer.freeze
    held = 4 * spent.parameters * (3 if trains else 0 if pretrained else 1)  # weights, gradients, a moment
    image = 0.0 if config.train.gradient_checkpointing or not trains else spent.saved
    height, width = model.image_size
    batch = 1 if config.kind == "probe" else max(1, config.train.batch_size // ranks.world_size)
    pixels = float(batch * height * width * model.channels)
    if device.type == "cuda":
        needs = [(held / ranks.world_size + image, float(torch.cuda.get_device_properties(device).total_memory))]
        needs.append((pixels, available_memory() / ranks.local_world_size))
    else:
        needs = [(held / ranks.world_size + image + pixels, available_memory() / ranks.local_world_size)]
    for needed, there in needs:
        if needed > there:
            size = f"{height}x{width} px, a batch of {config.train.batch_size:,}"
            raise UserError(
                f"this run needs more than {needed / 1e9:,.1f} GB of memory ({spent.parameters:,} parameters, {size}), "
                f"and there are {there / 1e9:,.1f} GB: use a smaller model, image size or train.batch_size"
            )


def choose_micro_batch(
    module: nn.Module, loss: LossFunction, example: Batch, config: RunConfig, model: NetworkConfig, ranks: Ranks
) -> int:
    """The most images at a time, up to those of the batch `example`, that this process has memory for; `model` is the
    network inside of `module`."""
    device, train = example.weights.device, config.train
    held, sharded = (
        train_state_bytes(count_parameters(model), train),
        choose_parallel(module, train, ranks, device) == "fsdp",
    )
    if device.type == "cuda" and not sharded:
        return _divisor(len(example), _tried(module, loss, example, config))
    if device.type == "cuda":  # the network is not sharded yet, and as it is it may not even fit
        room = SHARE * torch.cuda.get_device_properties(device).total_memory - held / ranks.world_size
    else:
        room = SHARE * available_memory() / ranks.local_world_size - 0.75 * held  # the weights are there already
    spent = cost(model, whole=False)
    precision = 1.0 if config.precision.compute == "bf16" else FLOAT32
    fits = int(room / (precision * (spent.saved + spent.passing)))
    return len(example) if fits >= len(example) else _divisor(len(example), max(1, fits))


def _divisor(images: int, most: int) -> int:
    """Parts of equal size, so that no shape is compiled twice; unless they would be far smaller than need be."""
    best = max(size for size in range(1, most + 1) if images % size == 0)
    return best if 2 * best > most else most


def _tried(module: nn.Module, loss: LossFunction, example: Batch, config: RunConfig) -> int:
    """Forward and backward passes until one does not run out of memory, with room left for what the optimizer keeps,
    for batches on their way (bytes, floats, mixed with each other) and for what nobody foresees."""
    device = example.weights.device
    cast = autocast(config.precision.compute, device)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    batches = BATCHES * example.pixels.numel() * example.pixels.element_size()
    spare = int(SPARE * torch.cuda.get_device_properties(device).total_memory)
    kept = (3 if config.train.ema else 2) * trained + batches + spare
    size = len(example)
    module.train()
    while True:
        try:
            _try(module, loss, example.micro_batch(0, size), cast, kept)
            return size
        except torch.cuda.OutOfMemoryError:
            if size == 1:
                raise UserError(
                    "out of GPU memory with a batch of one image: use --set train.gradient_checkpointing=true, a "
                    "smaller model or image size, or several GPUs with train.parallel=fsdp"
                ) from None
            size = -(-size // 2)
        finally:
            module.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()


def _try(
    module: nn.Module,
    loss: LossFunction,
    batch: Batch,
    cast: Callable[[], AbstractContextManager[object]],
    kept: int,
) -> None:
    place = torch.empty(kept, dtype=torch.uint8, device=batch.pixels.device)
    with cast():
        result = loss(module, batch)
    result.total.backward()
    torch.cuda.synchronize()
    del place
