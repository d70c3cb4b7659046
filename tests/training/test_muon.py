"""Muon, beside torch's own on every matrix by itself."""

import copy

import numpy as np
import pytest
import torch

from vitrail.config import LoraConfig, ModelConfig, OptimizerConfig, ResNetConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.lora import add_lora
from vitrail.training.muon import Muon, orthogonalize
from vitrail.training.optimizer import build_optimizer, set_learning_rate

SMALL = {"width": 32, "depth": 2, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (16, 16), "num_classes": 3}


def small(**options):
    torch.manual_seed(0)
    return build_model(ModelConfig(**{**SMALL, "class_token": False, "pool": "map", **options}))


def gradients(net, step):
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.fixture
def torch_in_float32(monkeypatch):
    """Torch's Muon goes to bfloat16 by this method, which some processors die of; ours stays in float32 on a CPU."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone(), raising=False)


class Twin:
    """A copy of a network, trained by torch's Muon and AdamW: each matrix by itself, the stacked ones cut apart."""

    def __init__(self, net, config, scale=lambda name: 1.0):
        self.values = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.optimizers = []
        for name, value in self.values.items():
            lr = config.lr * scale(name)
            layer = name.split(".")[-2] if "." in name else ""
            inside = name.startswith(("blocks.", "attn_pool.")) and name.endswith(".weight") and "norm" not in name
            pieces = value.chunk({"qkv": 3, "kv": 2}.get(layer, 1)) if inside else [value]
            for number, piece in enumerate(pieces):
                if inside:
                    optimizer = torch.optim.Muon(
                        [piece],
                        lr=lr,
                        weight_decay=config.weight_decay,
                        momentum=config.momentum,
                        nesterov=True,
                        adjust_lr_fn="match_rms_adamw",
                    )
                else:
                    optimizer = torch.optim.AdamW(
                        [piece], lr=lr, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps, fused=True
                    )
                self.optimizers.append((optimizer, name, number, len(pieces)))

    def step(self, net):
        grads = {name: p.grad for name, p in net.named_parameters()}
        for optimizer, name, number, count in self.optimizers:
            optimizer.param_groups[0]["params"][0].grad = grads[name].chunk(count)[number].clone()
            optimizer.step()


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_matches_torchs_muon_for_matrices_and_adamw_for_the_rest(torch_in_float32, layer_decay):
    def scale(name):
        depth = 0 if name.startswith(("patch_embed.", "cls_token", "reg_token", "pos_embed.")) else 3
        depth = int(name.split(".")[1]) + 1 if name.startswith("blocks") else depth
        return layer_decay ** (3 - depth)

    net = small()
    config = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, momentum=0.95, layer_decay=layer_decay)
    twin, optimizer = Twin(net, config, scale), build_optimizer(net, config)
    for step in range(4):
        gradients(net, step)
        twin.step(net)
        optimizer.step()
    muon = 0
    for name, p in net.named_parameters():
        if "momentum_buffer" in optimizer.state[p]:
            muon += 1
            torch.testing.assert_close(p.detach(), twin.values[name], rtol=0, atol=2e-5, msg=name)
        else:
            assert torch.equal(p, twin.values[name]), name
    assert muon == 2 * 4 + 5  # qkv, proj, fc1 and fc2 of two blocks; q, kv, proj, fc1 and fc2 of the pool


def test_the_scaled_update_is_as_large_as_adamws():
    """Root mean square 0.2 times the learning rate, whatever the shape: then both kinds share one rate."""
    net = small(width=64, mlp_dim=256)
    optimizer = build_optimizer(net, OptimizerConfig(name="muon", lr=0.01))
    before = copy.deepcopy(net)
    gradients(net, 0)
    optimizer.step()
    for (name, p), old in zip(net.named_parameters(), before.parameters(), strict=True):
        if "momentum_buffer" in optimizer.state[p]:
            # sqrt of the mean square of an orthogonal matrix is 1 / sqrt(longer side)
            assert (p - old).square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.2), name


@pytest.mark.parametrize("shape", [(6, 16, 16), (3, 10, 24), (3, 24, 10), (1, 1, 7)])
def test_stacked_matrices_are_orthogonalised_separately(shape):
    """Against the iteration in float64, applied to the singular values of each: it leaves the singular vectors."""
    torch.manual_seed(0)
    matrices = torch.randn(shape) * torch.logspace(-4, 4, shape[0])[:, None, None]
    found = orthogonalize(matrices)
    for matrix, result in zip(matrices.double().numpy(), found.double().numpy(), strict=True):
        u, values, v = np.linalg.svd(matrix, full_matrices=False)
        values /= np.linalg.norm(values)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        np.testing.assert_allclose(result, u * values @ v, atol=1e-4)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_matrices_of_the_same_shape_are_orthogonalised_in_one_batch(monkeypatch):
    shapes = []
    monkeypatch.setattr("vitrail.training.muon.orthogonalize", lambda stack: shapes.append(tuple(stack.shape)) or stack)
    net = small(pool="token", class_token=True)
    gradients(net, 0)
    build_optimizer(net, OptimizerConfig(name="muon", layer_decay=0.9)).step()
    assert sorted(shapes) == [(2, 32, 40), (2, 40, 32), (8, 32, 32)]


def test_parameters_without_gradient_do_not_change():
    net = small()
    optimizer = build_optimizer(net, OptimizerConfig(name="muon", lr=0.1, weight_decay=0.1))
    gradients(net, 0)
    left_out = ("head.bias", "blocks.1.attn.qkv.weight")
    before = {name: net.get_parameter(name).detach().clone() for name in left_out}
    for name in left_out:
        net.get_parameter(name).grad = None
    optimizer.step()
    assert all(torch.equal(net.get_parameter(name), value) for name, value in before.items())
    assert not any(optimizer.state.get(net.get_parameter(name)) for name in left_out)


def test_a_restored_state_continues_bit_for_bit():
    config = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1)
    net = small()
    optimizer = build_optimizer(net, config)
    for step in range(2):
        gradients(net, step)
        optimizer.step()
    again = small()
    again.load_state_dict(net.state_dict())
    other = build_optimizer(again, config)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert all(isinstance(value, torch.Tensor) for value in optimizer.state[p].values())
        other.state[q].update({key: value.clone() for key, value in optimizer.state[p].items()})
    for model, each in ((net, optimizer), (again, other)):
        set_learning_rate(each, 0.005)
        gradients(model, 2)
        each.step()
    assert all(map(torch.equal, net.parameters(), again.parameters()))


def test_muon_lowers_a_loss():
    torch.manual_seed(0)
    net = small()
    optimizer = build_optimizer(net, OptimizerConfig(name="muon", lr=0.003))
    pixels, targets = torch.randn(12, 3, 16, 16), torch.arange(12) % 3
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(net(pixels), targets)
        losses.append(loss.item())
        loss.backward()
        optimizer.step(lambda: None)
        optimizer.zero_grad()
    assert losses[-1] < 0.2 * losses[0]


def test_networks_and_parameters_without_matrices_are_refused():
    resnet = build_model(ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(16, 16), num_classes=3))
    with pytest.raises(UserError, match="name=adamw"):
        build_optimizer(resnet, OptimizerConfig(name="muon"))
    net = small()
    add_lora(net, LoraConfig(rank=2))
    with pytest.raises(UserError, match="name=adamw"):
        build_optimizer(net, OptimizerConfig(name="muon"))
    with pytest.raises(ValueError, match="3 matrices"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(4, 4))], "muon": True, "num_matrices": 3}], 0.1)
