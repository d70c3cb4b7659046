"""Data parallelism: DDP (each process has a copy of the network) or FSDP (the weights are sharded)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.config import PrecisionConfig, TrainConfig
from vitrail.distributed import Ranks
from vitrail.training.blocks import transformer_blocks

FSDP_MEMORY_FRACTION = 0.4  # with train.parallel=auto: FSDP if weights and optimizer take more of a GPU's memory


def choose_parallel(
    model: nn.Module, train: TrainConfig, ranks: Ranks, device: torch.device
) -> Literal["none", "ddp", "fsdp"]:
    """The kind of parallelism: `train.parallel`, and if that is "auto", FSDP for models that are large for the GPU."""
    if ranks.world_size == 1:
        return "none"
    if train.parallel != "auto":
        return train.parallel
    if device.type != "cuda":
        return "ddp"
    limit = FSDP_MEMORY_FRACTION * torch.cuda.get_device_properties(device).total_memory
    return "fsdp" if train_state_bytes(sum(p.numel() for p in model.parameters()), train) > limit else "ddp"


def train_state_bytes(parameters: int, train: TrainConfig) -> int:
    """Bytes of float32 weights, gradients, two moments and, with `train.ema`, the moving average."""
    return 4 * parameters * (5 if train.ema else 4)


def distribute(
    net: nn.Module, parallel: Literal["none", "ddp", "fsdp"], precision: PrecisionConfig, device: torch.device
) -> nn.Module:
    """Wrap the network for DDP, or shard it for FSDP: blocks one by one, each weight by rows. Returns the module to
    call in training."""
    if parallel == "none":
        return net
    if parallel == "ddp":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        device_ids = [torch.cuda.current_device()] if device.type == "cuda" else None
        with warnings.catch_warnings():  # about a renamed argument, which older releases do not accept
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(net, device_ids, broadcast_buffers=False, gradient_as_bucket_view=True)
        if precision.reduce == "bf16":
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Weights are gathered in float32 and autocast rounds them, as on one GPU, for the same results.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if precision.reduce == "bf16" else torch.float32)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in transformer_blocks(net):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def compile_blocks(net: nn.Module) -> None:
    """Compile each block on its own. Blocks that differ only in their weights share the compiled code."""
    # The first, last and middle blocks are compiled separately, for training and evaluation, full and partial batches.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 32)
    for block in transformer_blocks(net):
        block.compile()


@contextlib.contextmanager
def no_gradient_sync(network: nn.Module, enabled: bool) -> Iterator[None]:
    """Accumulate gradients in this process without communication, for all micro-batches of a step but the last."""
    if enabled and hasattr(network, "set_requires_gradient_sync"):  # fsdp
        network.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)  # type: ignore[operator]
    elif enabled and hasattr(network, "no_sync"):
        with network.no_sync():  # type: ignore[operator]
            yield
    else:
        yield


def reshard(net: nn.Module) -> None:
    """Free the full weights that FSDP gathered for a forward pass without a backward pass."""
    for module in net.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a possibly sharded one. All processes must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this process holds (a view), or the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_rows(tensor: Tensor) -> tuple[int, int] | None:
    """The rows (first, one past the last) of the shard that this process holds; None if the tensor is not sharded."""
    if not hasattr(tensor, "to_local"):
        return None
    rank, world, length = dist.get_rank(), dist.get_world_size(), tensor.shape[0]
    chunk = -(-length // world)  # as torch.chunk splits
    return min(rank * chunk, length), min((rank + 1) * chunk, length)
