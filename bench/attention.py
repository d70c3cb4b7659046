"""Short-sequence attention, forward and backward: vitrail's kernels compared with torch's.

    python -m bench.attention      # on a Hopper GPU

Input and gradient have the layout of a fused qkv projection. vitrail's kernels and `flash, deterministic` are
bit-reproducible; torch's other kernels run with their defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import Candidate, Effort, compare, cuda_clock
from bench.record import RESULTS, machine_facts, table, write_results
from vitrail.models.kernels.short_attention import short_attention, supports_short_attention

SHAPES = {  # images, tokens, heads
    "S/4 at 32 px": (512, 64, 6),
    "B/32 at 224 px": (256, 50, 12),
    "B/16 at 224 px": (256, 197, 12),
    "B/16 at 224 px, no class token": (256, 196, 12),
    "L/16 at 224 px": (128, 197, 16),
    "S/16 at 160 px": (256, 101, 6),
}
DEPTH = 64
TORCH_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def torch_attention(qkv: Tensor, heads: int, backend: SDPBackend | None) -> Tensor:
    parts = qkv.view(*qkv.shape[:2], 3, heads, DEPTH).unbind(2)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)
    return mixed.transpose(1, 2).flatten(2)


def capture_graph(
    attention: Callable[[Tensor], Tensor], qkv: Tensor, gradient: Tensor, deterministic: bool
) -> torch.cuda.CUDAGraph:
    """Capture both passes as a CUDA graph, since launching such short kernels takes longer than running them."""
    torch.use_deterministic_algorithms(deterministic)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(attention(qkv), qkv, gradient)
    with torch.cuda.graph(graph, stream=stream):
        torch.autograd.grad(attention(qkv), qkv, gradient)
    torch.use_deterministic_algorithms(False)
    return graph


def run(seconds: float, out: Path, console: Console) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rows, results = [], {}
    for name, (images, tokens, heads) in SHAPES.items():
        shape = images, tokens, heads * DEPTH
        gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        qkv = torch.randn(*shape[:2], 3 * shape[2], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        if not supports_short_attention(qkv, heads):
            raise SystemExit("vitrail's attention kernels do not support this GPU; use a Hopper GPU")
        functions: dict[str, Callable[[Tensor], Tensor]] = {"ours": partial(short_attention, heads=heads)}
        functions["torch's choice"] = partial(torch_attention, heads=heads, backend=None)
        functions |= {
            label: partial(torch_attention, heads=heads, backend=backend) for label, backend in TORCH_BACKENDS.items()
        }
        works = [
            Candidate(label, capture_graph(function, qkv, gradient, False).replay)
            for label, function in functions.items()
        ]
        works.append(Candidate("flash, deterministic", capture_graph(functions["flash"], qkv, gradient, True).replay))
        result = compare(works, Effort(seconds=seconds), cuda_clock)
        rows.append(([name], result))
        results[name] = {"images": images, "tokens": tokens, "heads": heads, **result.summary()}
    console.print(table("attention, forward and backward, bf16", ["network"], rows))
    facts: dict[str, Any] = {"machine": machine_facts("cuda"), "shapes": results}
    console.print(f"written to {write_results(out, 'attention-h200', facts)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description="Short-sequence attention.")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each comparison")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench.attention needs a CUDA device, and torch finds none")
    console = Console()
    run(options.seconds, Path(options.out), console if console.is_terminal else Console(width=160))


if __name__ == "__main__":
    main()
