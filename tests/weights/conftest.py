"""Networks with random weights in all tensors, so that a swapped or missing tensor changes the logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.weights.configs import SMALL, card_of, random_state
from vitrail.cli.main import main
from vitrail.config import ModelConfig, Preprocess, network_config
from vitrail.models.build import build_model
from vitrail.models.vit import VisionTransformer
from vitrail.weights.bundle import Card, write_bundle
from vitrail.weights.read import Weights


@pytest.fixture
def randomise() -> Callable[[nn.Module], nn.Module]:
    def fill(module: nn.Module) -> nn.Module:
        """Randomise all parameters, scaled so that logits are near 1."""
        generator = torch.Generator().manual_seed(0)
        for name, parameter in module.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim in (2, 4) else 25
            parameter.data.normal_(std=fan_in**-0.5, generator=generator)
            if ("norm" in name and name.endswith("weight")) or "gain" in name or "ls" in name or "lambda" in name:
                parameter.data += 1
        return module.eval()

    return fill


@pytest.fixture
def logits() -> Callable[[Weights, Tensor], Tensor]:
    @torch.inference_mode()
    def run(weights: Weights, pixels: Tensor) -> Tensor:
        """Logits of vitrail's network with these weights; loading is strict."""
        net = build_model(weights.card.model).eval()
        net.load_state_dict(weights.state)
        return net(pixels)

    return run


@pytest.fixture
def card() -> Card:
    return Card(
        model=ModelConfig(
            width=24, depth=2, mlp_dim=48, heads=3, patch=(8, 8), image_size=(16, 24), num_classes=3, head_bias=-10
        ),
        preprocess=Preprocess(size=(16, 24), resize="short_side", crop_fraction=0.875, interpolation="bicubic"),
        classes=("chat", "chien", "zèbre"),
        recipe={"optimizer": {"lr": 0.003}},
        data={"fingerprint": "9f", "counts": [3, 4]},
        metrics={"accuracy": 0.75},
        source="hf-hub:someone/something",
        licence="CC BY 4.0",
        created_with="vitrail 0.1.0, torch 2.13.0",
    )


@pytest.fixture
def state(card, randomise) -> dict[str, Tensor]:
    return randomise(VisionTransformer(card.model)).state_dict()


@pytest.fixture
def convert(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        """Run `vitrail convert`; return exit code, stdout and stderr."""
        monkeypatch.setattr(sys, "argv", ["vitrail", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
            raise SystemExit(0)
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return int(stopped.value.code or 0), output.out, " ".join(output.err.split())

    return run


@pytest.fixture
def vitrail_file(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "ours.safetensors", **options: object) -> Path:
        """Write a small network in vitrail's layout; a Vision Transformer unless `kind` is passed."""
        model = network_config(options if "kind" in options else {**SMALL, **options}, "a test")
        card = card_of(model, classes=tuple("abcde")[: model.num_classes], licence="CC0", metrics={"accuracy": 0.5})
        write_bundle(tmp_path / name, random_state(model), card)
        return tmp_path / name

    return write
