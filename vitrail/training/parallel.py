"""How the processes of a run share a network: a copy each, or its weights divided."""

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

FSDP_SHARE = 0.4  # of a GPU's memory: where weights and optimizer take more, they are divided among the processes


def choose_parallel(
    model: nn.Module, train: TrainConfig, ranks: Ranks, device: torch.device
) -> Literal["none", "ddp", "fsdp"]:
    """How the processes of a run share the network: as the settings say, else by the memory of a GPU."""
    if ranks.world_size == 1:
        return "none"
    if train.parallel != "auto":
        return train.parallel
    if device.type != "cuda":
        return "ddp"
    room = FSDP_SHARE * torch.cuda.get_device_properties(device).total_memory
    return "fsdp" if train_state_bytes(sum(p.numel() for p in model.parameters()), train) > room else "ddp"


def train_state_bytes(parameters: int, train: TrainConfig) -> int:
    """Of float32 weights, gradients, two moments and the average, where there is one."""
    return 4 * parameters * (5 if train.ema else 4)


def distribute(
    net: nn.Module, how: Literal["none", "ddp", "fsdp"], precision: PrecisionConfig, device: torch.device
) -> nn.Module:
    """The network to call in training. With ddp every process has a whole copy; with fsdp each block's weights are
    divided by rows, and brought together only while the block works."""
    if how == "none":
        return net
    if how == "ddp":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        places = [torch.cuda.current_device()] if device.type == "cuda" else None
        with warnings.catch_warnings():  # newer releases have another name for it, which older ones do not know
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(net, places, broadcast_buffers=False, gradient_as_bucket_view=True)
        if precision.reduce == "bf16":
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Weights travel in float32 and are rounded where they are used, as on one GPU: the same numbers come out.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if precision.reduce == "bf16" else torch.float32)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in transformer_blocks(net):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def compile_blocks(net: nn.Module) -> None:
    """Compile each block by itself; blocks that differ only in their weights share what is made."""
    # The first, the last and those between differ, in training and not, in whole batches and not.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 32)
    for block in transformer_blocks(net):
        block.compile()


@contextlib.contextmanager
def no_gradient_sync(network: nn.Module, enabled: bool) -> Iterator[None]:
    """Backward passes that only add up gradients in this process; the last one of a step sends the sum."""
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
    """Give back what fsdp brought together for a forward pass that no backward pass followed."""
    for module in net.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor that may be divided among the processes, in one piece; all of them must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_rows(tensor: Tensor) -> tuple[int, int] | None:
    """First and last row that this process holds of a divided tensor; none if it holds all of it."""
    if not hasattr(tensor, "to_local"):
        return None
    rank, world, length = dist.get_rank(), dist.get_world_size(), tensor.shape[0]
    chunk = -(-length // world)  # as torch.chunk divides
    return min(rank * chunk, length), min((rank + 1) * chunk, length)
