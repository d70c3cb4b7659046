"""Speed of the networks of vitrail, timm, transformers and torchvision with equal weights, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from bench.harness import Candidate, Clock, Comparison, Effort, compare, cuda_clock, processor_clock, wall_clock
from bench.peers import PEERS, NotComparable, Peer, build_ours, build_peer, disagreement
from bench.record import RESULTS, machine_facts, table, write_results
from bench.variants import variant
from vitrail.config import NetworkConfig

Kind = Literal["forward", "training"]
CLASSES = 1000
IMAGE_SIZE = 224
LOGITS_TOLERANCE = 1e-4  # the largest difference, in single precision
GRADIENTS_TOLERANCE = 1e-9  # relative to their norm, in double precision

CPU: dict[Kind, dict[str, list[int]]] = {
    "forward": {
        "Ti/16": [1, 16],
        "S/16": [1, 8],
        "B/16": [1, 4],
        "S/16 gap": [8],
        "S/16 map": [8],
        "S/16 reg4+layerscale": [8],
        "R+Ti/16": [1, 16],
        "R26+S/32": [1, 8],
        "R50+B/16": [1, 4],
        "R50x1": [1, 8],
    },
    "training": {
        "Ti/16": [16],
        "S/16": [4],
        "B/16": [2],
        "S/16 gap": [4],
        "S/16 map": [4],
        "S/16 reg4+layerscale": [4],
        "R+Ti/16": [16],
        "R26+S/32": [8],
        "R50+B/16": [2],
        "R50x1": [8],
    },
}
CPU_QUICK: dict[Kind, dict[str, list[int]]] = {
    "forward": {"Ti/16": [4], "S/16": [1], "R+Ti/16": [4], "R50x1": [1]},
    "training": {"Ti/16": [2], "S/16": [1], "R+Ti/16": [2], "R50x1": [1]},
}
CUDA: dict[Kind, dict[str, list[int]]] = {
    "forward": {
        "Ti/16": [512],
        "S/16": [512],
        "B/16": [1, 256],
        "L/16": [128],
        "H/14": [64],
        "R50+B/16": [256],
        "R50x1": [256],
    },
    "training": {
        "Ti/16": [512],
        "S/16": [256],
        "B/16": [128],
        "L/16": [64],
        "H/14": [32],
        "R50+B/16": [128],
        "R50x1": [128],
    },
}
CUDA_QUICK: dict[Kind, dict[str, list[int]]] = {"forward": {"B/16": [64]}, "training": {"B/16": [64]}}
CASES = {("cpu", False): CPU, ("cpu", True): CPU_QUICK, ("cuda", False): CUDA, ("cuda", True): CUDA_QUICK}


@dataclass(frozen=True)
class Settings:
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    gelu: Literal["erf", "tanh"] = "erf"
    compile: bool = False
    quick: bool = False
    busy: bool = False  # for a shared machine: measure the CPU time of one thread
    control: bool = False  # measure our network twice; the ratio of the two shows the noise
    models: list[str] = field(default_factory=list)  # empty: those that take a few minutes on the device
    kinds: list[Kind] = field(default_factory=list)
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    out: str = str(RESULTS)

    @property
    def name(self) -> str:
        options = ["compiled"] * self.compile + ["busy"] * self.busy + ["quick"] * self.quick
        return "-".join(["model", self.dtype, *options])

    @property
    def clock(self) -> Clock:
        if self.device == "cuda":
            return cuda_clock
        return processor_clock if self.busy else wall_clock

    @property
    def effort(self) -> Effort:
        return Effort(seconds=2.5) if self.quick else Effort()


def run(settings: Settings, console: Console) -> None:
    """Check that all networks agree, compare their speed, print a table and write the results."""
    if settings.busy:
        torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the patch projection must be as exact as the other matrix products
    facts = machine_facts(settings.device)
    rows: list[tuple[list[str], Comparison]] = []
    cases: list[dict[str, Any]] = []
    agreement: dict[str, Any] = {}
    plan = by_model(settings)
    configs = {model: variant(model, CLASSES, IMAGE_SIZE, settings.gelu) for model in plan}
    for model, batches in plan.items():
        nets, agreement[model] = candidates(model, configs[model], settings, console)
        for kind, batch in batches:
            with console.status(f"{model} {kind}, batch {batch}"):
                result = compare_nets(nets, kind, batch, settings)
            speed = float(f"{batch / result.time(result.first).median:.4g}")
            rows.append(([model, kind, str(batch), f"{speed:g}"], result))
            cases.append({"model": model, "kind": kind, "batch": batch, "images_per_second": speed, **result.summary()})
    console.print(table(f"network, {settings.dtype}, {settings.device}", ["model", "work", "batch", "images/s"], rows))
    chosen = {name: value for name, value in asdict(settings).items() if name != "out"}
    results = {"settings": chosen, "machine": facts, "agreement": agreement, "cases": cases}
    path = write_results(Path(settings.out), f"{settings.name}-{settings.device}", results)
    console.print(f"written to {path}")


def by_model(settings: Settings) -> dict[str, list[tuple[Kind, int]]]:
    """The kinds and batch sizes to measure for each network; batch 1 for a network that is not in the table."""
    cases = CASES[settings.device, settings.quick]
    kinds = settings.kinds or list(cases)
    models = settings.models or list(dict.fromkeys(model for kind in kinds for model in cases[kind]))
    return {model: [(kind, batch) for kind in kinds for batch in cases[kind].get(model, [1])] for model in models}


def candidates(
    model: str, config: NetworkConfig, settings: Settings, console: Console
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Build our network and the peers with equal weights. Return them and their differences.

    Raises:
        AssertionError: If outputs or gradients differ by more than the tolerance.
    """
    ours = build_ours(config).to(settings.device)
    pixels = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, device=settings.device)
    nets: dict[str, nn.Module] = {"ours": ours}
    agreement = {}
    for name in settings.peers:
        try:
            peer = build_peer(name, ours).to(settings.device)
        except NotComparable as reason:
            console.print(f"{model}: {name} skipped: {reason}")
            continue
        logits, gradients = disagreement(ours, peer, pixels)
        console.print(f"{model}: {name} agrees with ours to {logits:.1e} (logits), {gradients:.1e} (gradients)")
        if not (logits <= LOGITS_TOLERANCE and gradients <= GRADIENTS_TOLERANCE):
            raise AssertionError(f"{name} does not compute the same {model}")
        nets[name] = peer
        agreement[name] = {"logits": logits, "gradients": gradients}
    if settings.control:
        nets["control"] = copy.deepcopy(ours)
    return nets, agreement


def compare_nets(nets: dict[str, nn.Module], kind: Kind, batch: int, settings: Settings) -> Comparison:
    torch.compiler.reset()
    pixels = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE, device=settings.device)
    prepare = {"forward": forward_work, "training": training_work}[kind]
    works = [Candidate(name, prepare(net, pixels, settings)) for name, net in nets.items()]
    return compare(works, settings.effort, settings.clock)


def forward_work(net: nn.Module, pixels: Tensor, settings: Settings) -> Callable[[], Tensor]:
    """Inference. bf16: weights and pixels are bf16."""
    net = net.eval()
    if settings.dtype == "bf16":
        net, pixels = copy.deepcopy(net).bfloat16(), pixels.bfloat16()
    call = compiled(net) if settings.compile else net

    def work() -> Tensor:
        with torch.no_grad():
            return call(pixels)

    return work


def training_work(net: nn.Module, pixels: Tensor, settings: Settings) -> Callable[[], None]:
    """Forward, loss and backward. bf16: autocast with fp32 weights."""
    net = net.train()
    call = compiled(net) if settings.compile else net
    labels = torch.arange(len(pixels), device=pixels.device) % CLASSES

    def work() -> None:
        net.zero_grad(set_to_none=True)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.dtype == "bf16"):
            loss = F.cross_entropy(call(pixels), labels)
        loss.backward()

    return work


def compiled(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """Compile a network; of a `Peer`, only the network inside, not the wrapper."""
    if not isinstance(net, Peer):
        return torch.compile(net)
    return Peer(cast(nn.Module, torch.compile(net.net)), net.translate)
