"""The network against the original JAX code: logits, loss and every gradient norm of small random networks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.model.vit import VisionTransformer
from vitrail.weights import google

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ["google_vit_token", "google_vit_gap", "google_vit_representation"]


def run(name: str) -> tuple[dict[str, np.ndarray], VisionTransformer, torch.Tensor, torch.Tensor]:
    """The recorded numbers, and our network after one backward pass on the recorded input."""
    recorded = dict(np.load(FIXTURES / f"{name}.npz"))
    pixels = torch.from_numpy(recorded["input"]).permute(0, 3, 1, 2)
    foreign = google.read(FIXTURES / f"{name}.npz", image_size=(pixels.shape[2], pixels.shape[3]))
    net = VisionTransformer(foreign.model)
    net.load_state_dict(foreign.state)
    logits = net(pixels)
    loss = F.cross_entropy(logits, torch.tensor(json.loads(str(recorded["meta"]))["labels"]))
    loss.backward()
    return recorded, net, logits, loss


def our_gradient(net: VisionTransformer, name: str) -> torch.Tensor:
    """The gradient of the parameter that flax calls `name`."""
    direct = {
        "cls": net.tokens.class_token,
        "embedding/kernel": net.tokens.projection.weight,
        "embedding/bias": net.tokens.projection.bias,
        "Transformer/posembed_input/pos_embedding": net.positions.table,
    }
    if name in direct:
        return direct[name].grad
    *path, kind = name.split("/")
    attribute = {"kernel": "weight", "scale": "weight", "bias": "bias"}[kind]
    if path[0] != "Transformer" or path[1] == "encoder_norm":
        module = {"encoder_norm": net.encoder.norm, "head": net.head}.get(path[-1]) or net.representation.layer
        return getattr(module, attribute).grad
    block = net.encoder.blocks[int(path[1].removeprefix("encoderblock_"))]
    if path[-1] in ("query", "key", "value"):
        width = net.config.width
        start = width * ("query", "key", "value").index(path[-1])
        return getattr(block.attention.qkv, attribute).grad[start : start + width]
    modules = {"LayerNorm_0": block.norm1, "LayerNorm_1": block.norm2, "out": block.attention.out}
    modules |= {"Dense_0": block.mlp.up, "Dense_1": block.mlp.down}
    return getattr(modules[path[-1]], attribute).grad


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss_are_those_of_the_original(name):
    recorded, _, logits, loss = run(name)
    np.testing.assert_allclose(logits.detach().numpy(), recorded["output/logits"], rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(loss.item(), recorded["output/loss"], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_norm_is_that_of_the_original(name):
    recorded, net, _, _ = run(name)
    norms = {key.removeprefix("output/grad_norm/"): value for key, value in recorded.items() if "grad_norm" in key}
    assert len(norms) == sum(key.startswith("params/") for key in recorded)
    for key, value in norms.items():
        # A key's bias shifts all scores of a query alike: its gradient is zero, and what was recorded is rounding.
        absolute = 1e-6 if key.endswith("key/bias") else 0.0
        np.testing.assert_allclose(our_gradient(net, key).norm().item(), value, rtol=1e-5, atol=absolute, err_msg=key)
    ours = torch.stack([parameter.grad.norm() for parameter in net.parameters()]).norm().item()
    np.testing.assert_allclose(ours, np.linalg.norm(list(norms.values())), rtol=1e-5)


def test_the_other_gelu_is_told_apart():
    """The tolerance above is fine enough to see the one constant that other code bases change."""
    recorded, net, _, _ = run("google_vit_token")
    other = VisionTransformer(net.config.model_copy(update={"gelu": "erf"}))
    other.load_state_dict(net.state_dict())
    logits = other(torch.from_numpy(recorded["input"]).permute(0, 3, 1, 2))
    assert np.abs(logits.detach().numpy() - recorded["output/logits"]).max() > 1e-4
