import numpy as np
import pytest
import torch
from torch import nn

from vitrail.config import LoraConfig, ModelConfig, OptimizerConfig, ResNetConfig, ScheduleConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model, create
from vitrail.models.lora import add_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.training.blocks import transformer_blocks
from vitrail.training.ema import EMA
from vitrail.training.optimizer import (
    build_optimizer,
    freeze,
    parameter_groups,
    set_learning_rate,
    step_if_finite,
)
from vitrail.training.schedule import learning_rate

SMALL = {"width": 32, "depth": 3, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (16, 16), "num_classes": 3}


def tiny():
    torch.manual_seed(0)
    return create("Ti/8", 3, 16)


def small(**options):
    torch.manual_seed(0)
    return build_model(ModelConfig(**{**SMALL, **options}))


def small_resnet():
    return build_model(ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(16, 16), num_classes=3))


def gradients(net, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def in_double(net):
    return {name: p.detach().double().numpy().copy() for name, p in net.named_parameters()}


class Adam64:
    """Adam's direction, written out in float64."""

    def __init__(self, like, beta1=0.9, beta2=0.999, eps=1e-8):
        self.m = {name: np.zeros_like(p) for name, p in like.items()}
        self.v = {name: np.zeros_like(p) for name, p in like.items()}
        self.beta1, self.beta2, self.eps, self.step = beta1, beta2, eps, 0

    def __call__(self, grads):
        self.step += 1
        found = {}
        for name, g in grads.items():
            self.m[name] = self.beta1 * self.m[name] + (1 - self.beta1) * g
            self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * g**2
            mean = self.m[name] / (1 - self.beta1**self.step)
            found[name] = mean / (np.sqrt(self.v[name] / (1 - self.beta2**self.step)) + self.eps)
        return found


def assert_same(net, expected, **tolerance):
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], err_msg=name, **tolerance)


def grads_of(net):
    return {name: p.grad.double().numpy().copy() for name, p in net.named_parameters()}


def test_adamw_is_the_papers_adam_with_decay_times_lr_on_every_parameter():
    net = tiny()
    config = OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.3, weight_decay_params="all")
    optimizer = build_optimizer(net, config)
    expected = in_double(net)
    adam = Adam64(expected)
    for step in range(1, 4):
        gradients(net, step)
        direction = adam(grads_of(net))
        optimizer.step()
        expected = {name: p - 1e-2 * direction[name] - 1e-2 * 0.3 * p for name, p in expected.items()}
    assert_same(net, expected, rtol=1e-4, atol=1e-6)


def test_decay_times_schedule_is_big_visions_order_of_operations():
    """Clip, Adam, times lr, plus decay times the weights, and all of that times the schedule; kernels only decay."""
    net, lr, decay, total = tiny(), 1e-2, 1e-3, 6
    settings = OptimizerConfig(
        lr=lr, weight_decay=decay, weight_decay_params="matrices", weight_decay_scale="schedule", betas=(0.9, 0.95)
    )
    schedule = ScheduleConfig(shape="cosine", warmup=2)
    optimizer = build_optimizer(net, settings)
    expected = in_double(net)
    adam = Adam64(expected, beta2=0.95)
    kernels = {"patch_embed.proj.weight", "head.weight"} | {
        f"blocks.{i}.{layer}.weight" for i in range(12) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert kernels < set(expected)
    for step in range(total):
        gradients(net, step)
        grads = grads_of(net)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        set_learning_rate(optimizer, learning_rate(step, lr, total, schedule))
        optimizer.step()
        share = min(1, step / 2) * 0.5 * (1 + np.cos(np.pi * max(0, step - 2) / (total - 2)))
        direction = adam({name: g / norm for name, g in grads.items()})
        for name, p in expected.items():
            update = lr * direction[name] + (decay * p if name in kernels else 0)
            expected[name] = p - share * update
    assert_same(net, expected, rtol=2e-4, atol=2e-6)


def test_big_visions_decay_is_a_hundredfold_adamw_decay_at_its_learning_rate():
    config = OptimizerConfig(lr=1e-3, weight_decay=1e-4, weight_decay_scale="schedule")
    assert build_optimizer(tiny(), config).param_groups[0]["weight_decay"] == pytest.approx(0.1)
    slower = build_optimizer(small(), config.model_copy(update={"layer_decay": 0.5}))
    for group in slower.param_groups:  # whatever the rate of a group, its decay in a step is the same
        assert group["weight_decay"] * group["lr"] == pytest.approx(1e-4)


def test_weight_decay_of_matrices_excludes_biases_norms_positions_and_class_token():
    net = tiny()
    groups = build_optimizer(net, OptimizerConfig(weight_decay=0.1, weight_decay_params="matrices")).param_groups
    names = {id(p): name for name, p in net.named_parameters()}
    decayed = {names[id(p)] for p in groups[0]["params"]}
    spared = {names[id(p)] for p in groups[1]["params"]}
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0
    assert "pos_embed.table" in spared and "cls_token" in spared and "norm.weight" in spared
    assert "patch_embed.proj.weight" in decayed and "head.weight" in decayed
    assert not any(name.endswith("bias") for name in decayed)
    assert len(decayed | spared) == len(names)


def test_lora_matrices_have_weight_decay():
    net = small()
    add_lora(net, LoraConfig(rank=2))
    decayed = build_optimizer(net, OptimizerConfig(weight_decay=0.1, weight_decay_params="matrices")).param_groups[0]
    assert len(decayed["params"]) == 3 * 2 * 2 + 1  # two in each of two layers of three blocks, and the head's


def test_sgd_has_plain_momentum():
    net = tiny()
    optimizer = build_optimizer(net, OptimizerConfig(name="sgd", lr=0.1, momentum=0.9))
    expected = in_double(net)
    momentum = {name: np.zeros_like(p) for name, p in expected.items()}
    for step in range(3):
        gradients(net, step)
        for name, g in grads_of(net).items():
            momentum[name] = 0.9 * momentum[name] + g
            expected[name] = expected[name] - 0.1 * momentum[name]
        optimizer.step()
    assert_same(net, expected, rtol=1e-4, atol=1e-6)


def test_decay_of_sgd_goes_through_its_momentum():
    net = small()
    optimizer = build_optimizer(net, OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.2))
    expected = in_double(net)
    momentum = {name: np.zeros_like(p) for name, p in expected.items()}
    for step in range(3):
        gradients(net, step)
        for name, g in grads_of(net).items():
            momentum[name] = 0.9 * momentum[name] + g + 0.2 * expected[name]
            expected[name] = expected[name] - 0.1 * momentum[name]
        optimizer.step()
    assert_same(net, expected, rtol=1e-4, atol=1e-6)


def test_sgd_refuses_weight_decay_scale_schedule():
    with pytest.raises(UserError, match="weight_decay_scale=lr"):
        build_optimizer(small(), OptimizerConfig(name="sgd", weight_decay=0.1, weight_decay_scale="schedule"))


def scales(net, **options):
    optimizer = build_optimizer(net, OptimizerConfig(layer_decay=0.5, **options))
    set_learning_rate(optimizer, 0.8)
    names = {id(p): name for name, p in net.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.8 * group["lr_scale"], rel=1e-6)
        found.update({names[id(p)]: group["lr_scale"] for p in group["params"]})
    assert found.keys() == dict(net.named_parameters()).keys()
    return found


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_layer_decay_lowers_the_learning_rate_of_earlier_blocks(name):
    found = scales(small(representation=8, registers=2), name=name)
    before = {key for key in found if key.startswith(("patch_embed.", "cls_token", "reg_token", "pos_embed."))}
    assert {"cls_token", "reg_token", "patch_embed.proj.bias", "pos_embed.table"} <= before
    for key, scale in found.items():
        if key in before:
            assert scale == 0.5**4
        elif key.startswith("blocks"):
            assert scale == 0.5 ** (3 - int(key.split(".")[1]))
        else:
            assert key.startswith(("norm.", "pre_logits.", "head.")) and scale == 1


def test_positions_in_a_block_have_the_depth_of_the_block():
    found = scales(small(positions_at="layers"))
    assert [found[f"pos_embed.{i}.table"] for i in range(3)] == [0.125, 0.25, 0.5]


def test_a_convolutional_stem_is_before_all_blocks_and_an_attention_pool_after_them():
    stem = {"blocks": (1,), "width": 32}
    found = scales(small(stem=stem, patch=(1, 1)))
    assert {scale for key, scale in found.items() if "stem" in key} == {0.5**4}
    found = scales(small(pool="map", class_token=False))
    assert {scale for key, scale in found.items() if key.startswith("attn_pool.")} == {1}


def test_mask_tokens_have_the_depth_before_all_blocks():
    torch.manual_seed(0)
    found = scales(MaskedPatchNetwork(build_model(ModelConfig(**{**SMALL, "num_classes": 0})), "color"))
    assert found["mask"] == found["net.cls_token"] == 0.5**4
    assert found["net.blocks.2.mlp.fc1.weight"] == 0.5 and found["head.weight"] == 1


def test_layer_decay_is_refused_for_a_resnet():
    with pytest.raises(UserError, match="layer_decay=1"):
        build_optimizer(small_resnet(), OptimizerConfig(layer_decay=0.9))
    assert [group["lr_scale"] for group in build_optimizer(small_resnet(), OptimizerConfig()).param_groups] == [1.0]


def trained(net):
    return {name for name, p in net.named_parameters() if p.requires_grad}


def test_first_blocks_are_frozen_with_all_before_them():
    net = small(positions_at="layers")
    everything = trained(net)
    freeze(net, 0)
    assert trained(net) == everything
    freeze(net, 2)
    frozen = everything - trained(net)
    expected = ("patch_embed.", "cls_token", "reg_token", "pos_embed.0.", "pos_embed.1.", "blocks.0.", "blocks.1.")
    assert frozen == {name for name in everything if name.startswith(expected)}
    groups = parameter_groups(net, OptimizerConfig())
    assert sum(len(group["params"]) for group in groups) == len(trained(net))


def test_the_whole_backbone_is_frozen():
    for net in (small(), small_resnet()):
        freeze(net, "backbone")
        assert trained(net) == {"head.weight", "head.bias"}
        build_optimizer(net, OptimizerConfig())


@pytest.mark.parametrize("count", [-1, 4])
def test_invalid_freeze_settings_are_refused(count):
    with pytest.raises(UserError, match="0 to 3"):
        freeze(small(), count)
    with pytest.raises(UserError, match=r"optimizer\.freeze .*no blocks"):
        freeze(small_resnet(), 1)
    assert len(transformer_blocks(small())) == 3


def test_freezing_everything_is_refused():
    net = small(num_classes=0)
    freeze(net, "backbone")
    with pytest.raises(UserError, match=r"frozen.*optimizer\.freeze"):
        build_optimizer(net, OptimizerConfig())


def snapshot(net, optimizer):
    kept = {f"weights {name}": p.detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        kept |= {f"{key} {name}": value.clone() for key, value in optimizer.state[p].items()}
    return kept


def optimizers():
    yield "adamw", OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1)
    yield "sgd", OptimizerConfig(name="sgd", lr=0.01, momentum=0.9, weight_decay=0.1)
    yield "sgd without momentum", OptimizerConfig(name="sgd", lr=0.01, momentum=0.0)
    yield "muon", OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in optimizers()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_without_finite_gradients_changes_nothing(config, bad):
    """Run beside a twin that is never shown those gradients: weights, moments and counts stay the same to the bit."""
    net, twin = small(), small()
    optimizer, plain = build_optimizer(net, config), build_optimizer(twin, config)
    for step, good in enumerate([False, True, False, False, True, True]):
        gradients(net, step)
        gradients(twin, step)
        if good:
            step_if_finite(plain, torch.tensor(True))
        else:
            for p in net.parameters():
                p.grad.view(-1)[::3] = bad
        step_if_finite(optimizer, torch.tensor(good))
        if any(plain.state.values()) or config.momentum == 0:
            expected, found = snapshot(twin, plain), snapshot(net, optimizer)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
        else:  # the first step of all was left out
            for name, value in snapshot(net, optimizer).items():
                assert name.startswith("weights ") or not value.any(), name
            assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in optimizers()])
def test_a_step_with_finite_gradients_matches_the_plain_optimizer(config):
    net, twin = small(), small()
    optimizer, plain = build_optimizer(net, config), build_optimizer(twin, config)
    for step in range(3):
        gradients(net, step)
        gradients(twin, step)
        step_if_finite(optimizer, torch.tensor(True))
        plain.step()
    expected, found = snapshot(twin, plain), snapshot(net, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_momentum_starts_with_the_first_gradient():
    """Torch's own fused SGD would stop at a list of which only some have begun."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(nn.ParameterList([first, second]), OptimizerConfig(name="sgd", lr=1.0, momentum=0.5))
    first.grad = torch.ones(2)
    step_if_finite(optimizer, torch.tensor(True))
    second.grad = torch.ones(2)
    step_if_finite(optimizer, torch.tensor(True))
    assert first.tolist() == [-1.5, -1.5] and second.tolist() == [0, 0]


@pytest.mark.parametrize("ramp", [True, False])
def test_ema_follows_its_formula(ramp):
    net = tiny()
    average = EMA(net, 0.9, ramp)
    expected = net.head.bias.detach().clone()
    for step in range(1, 30):
        with torch.no_grad():
            net.head.bias += 1
        average.update(net, step)
        decay = min(0.9, (1 + step) / (10 + step)) if ramp else 0.9
        expected = decay * expected + (1 - decay) * net.head.bias
    assert torch.allclose(average.tensors["head.bias"], expected, rtol=1e-5)
