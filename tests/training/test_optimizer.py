import numpy as np
import torch

from vitrail.config import OptimizerConfig
from vitrail.model.build import create
from vitrail.training.average import Average
from vitrail.training.optimizer import build_optimizer


def tiny():
    torch.manual_seed(0)
    return create("Ti/8", 3, 16)


def gradients(net, step):
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_adamw_is_the_papers_adam_with_decay_times_lr_on_every_parameter():
    net = tiny()
    config = OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.3, decay="all")
    optimizer = build_optimizer(net, config)
    expected = {name: p.detach().double().numpy().copy() for name, p in net.named_parameters()}
    m = {name: np.zeros_like(p) for name, p in expected.items()}
    v = {name: np.zeros_like(p) for name, p in expected.items()}
    for step in range(1, 4):
        gradients(net, step)
        grads = {name: p.grad.double().numpy().copy() for name, p in net.named_parameters()}
        optimizer.step()
        for name, g in grads.items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            direction = (m[name] / (1 - 0.9**step)) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-8)
            expected[name] = expected[name] - 1e-2 * direction - 1e-2 * 0.3 * expected[name]
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-4, atol=1e-6)


def test_matrices_only_spares_biases_norms_positions_and_class_token():
    net = tiny()
    groups = build_optimizer(net, OptimizerConfig(weight_decay=0.1, decay="matrices")).param_groups
    names = {id(p): name for name, p in net.named_parameters()}
    decayed = {names[id(p)] for p in groups[0]["params"]}
    spared = {names[id(p)] for p in groups[1]["params"]}
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0
    assert "positions.table" in spared and "tokens.class_token" in spared and "encoder.norm.weight" in spared
    assert "tokens.projection.weight" in decayed and "head.weight" in decayed
    assert not any(name.endswith("bias") for name in decayed)
    assert len(decayed | spared) == len(names)


def test_sgd_is_plain_momentum():
    net = tiny()
    optimizer = build_optimizer(net, OptimizerConfig(name="sgd", lr=0.1, momentum=0.9))
    before = net.head.bias.detach().clone()
    momentum = torch.zeros_like(before)
    for step in range(3):
        gradients(net, step)
        momentum = 0.9 * momentum + net.head.bias.grad
        before = before - 0.1 * momentum
        optimizer.step()
    assert torch.allclose(net.head.bias, before, atol=1e-6)


def test_average_follows_its_formula():
    net = tiny()
    average = Average(net, 0.9)
    expected = net.head.bias.detach().clone()
    for step in range(1, 30):
        with torch.no_grad():
            net.head.bias += 1
        average.update(net, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * net.head.bias
    assert torch.allclose(average.model.head.bias, expected, rtol=1e-5)
