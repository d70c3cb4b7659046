import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vitrail.config import LoraConfig, ModelConfig, ResNetConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.lora import LoraLinear, add_lora, merge_lora

SMALL = {"width": 32, "depth": 2, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (16, 16), "num_classes": 3}
PIXELS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 1, 2, 0])


def small(**options):
    torch.manual_seed(0)
    net = build_model(ModelConfig(**{**SMALL, **options}))
    torch.nn.init.normal_(net.head.weight, std=0.1)  # a zero head would hide changes of the blocks
    return net


def with_lora(**options):
    net = small()
    add_lora(net, LoraConfig(**{"rank": 3, "alpha": 6.0, **options}))
    return net


def train(net, steps=3):
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        F.cross_entropy(net(PIXELS), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("matrices", ["attention", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_the_start_the_output_is_unchanged_to_the_bit(matrices, dtype):
    plain, net = small().to(dtype), with_lora(target_modules=matrices).to(dtype)
    assert torch.equal(net(PIXELS.to(dtype)), plain(PIXELS.to(dtype)))


@pytest.mark.parametrize(
    ("matrices", "layers"),
    [
        ("attention", ["attn.qkv", "attn.proj"]),
        ("all", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]),
    ],
)
def test_only_updates_and_the_head_are_trained_and_all_of_them(matrices, layers):
    net = with_lora(target_modules=matrices)
    expected = {"head.weight", "head.bias"} | {
        f"blocks.{i}.{layer}.{kind}" for i, layer, kind in itertools.product((0, 1), layers, ("lora_a", "lora_b"))
    }
    assert {name for name, p in net.named_parameters() if p.requires_grad} == expected
    F.cross_entropy(net(PIXELS), TARGETS).backward()
    for name, p in net.named_parameters():
        assert (p.grad is not None) == (name in expected), name
    frozen = {name: p.detach().clone() for name, p in net.named_parameters() if name not in expected}
    net.zero_grad()
    train(net)
    assert all(torch.equal(net.get_parameter(name), value) for name, value in frozen.items())
    assert all(net.get_parameter(name).any() for name in expected)


def test_the_update_is_that_of_the_paper():
    """Also its gradients: those of W + alpha/rank B A with respect to A and B, in float64."""
    torch.manual_seed(0)
    layer = LoraLinear(torch.nn.Linear(5, 7), rank=2, alpha=3.0).double()
    torch.nn.init.normal_(layer.lora_b)
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 5, dtype=torch.float64)
    a, b = (p.detach().clone().requires_grad_() for p in (layer.lora_a, layer.lora_b))
    expected = F.linear(x, layer.weight + 1.5 * b @ a, layer.bias)
    output = layer(x)
    torch.testing.assert_close(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    torch.testing.assert_close(layer.lora_a.grad, a.grad)
    torch.testing.assert_close(layer.lora_b.grad, b.grad)


@pytest.mark.parametrize("matrices", ["attention", "all"])
def test_merged_networks_are_plain_again_and_compute_the_same(matrices):
    plain, net = small(), train(with_lora(target_modules=matrices))
    expected = net(PIXELS)
    assert not torch.allclose(expected, plain(PIXELS), atol=1e-2)
    updates = {
        name: layer.weight.double() + 2.0 * layer.lora_b.double() @ layer.lora_a.double()
        for name, layer in net.named_modules()
        if isinstance(layer, LoraLinear)
    }
    merge_lora(net)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert not any(isinstance(layer, LoraLinear) for layer in net.modules())
    for name, weight in updates.items():
        torch.testing.assert_close(net.get_submodule(name).weight.double(), weight, rtol=0, atol=1e-7)
    torch.testing.assert_close(net(PIXELS), expected, rtol=1e-5, atol=1e-5)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(plain(PIXELS), net(PIXELS))
    merge_lora(net)  # nothing is left to merge
    assert torch.equal(plain(PIXELS), net(PIXELS))


def test_a_copy_can_be_merged_while_the_original_trains_on():
    net = train(with_lora())
    before = copy.deepcopy(net)
    other = copy.deepcopy(net)
    merge_lora(other)
    torch.testing.assert_close(other(PIXELS), net(PIXELS), rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, net.state_dict().values(), before.state_dict().values()))


def test_weights_stay_in_their_format_and_updates_in_float32():
    net = small().to(torch.bfloat16)
    add_lora(net, LoraConfig(rank=2))
    layer = net.blocks[0].attn.proj
    assert layer.weight.dtype == torch.bfloat16 and layer.lora_a.dtype == layer.lora_b.dtype == torch.float32
    merge_lora(net)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


def test_layers_run_under_autocast():
    """In float16, since matrix products in bfloat16 crash on some processors."""
    net = with_lora(target_modules="all")
    seen = []
    net.blocks[0].attn.proj.register_forward_hook(lambda _m, _i, given: seen.append(given.dtype))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(PIXELS)
        F.cross_entropy(logits, TARGETS).backward()
    assert seen == [torch.float16]
    torch.testing.assert_close(logits, net(PIXELS), rtol=0, atol=0.02)
    assert all(p.grad.dtype == torch.float32 for p in net.parameters() if p.requires_grad)


@pytest.mark.slow
def test_the_network_is_one_graph_for_the_compiler():
    net = train(with_lora(target_modules="all"))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(PIXELS), net(PIXELS))


def test_processes_can_average_its_gradients(tmp_path):
    net = with_lora(target_modules="all")
    expected = copy.deepcopy(net)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(net)
        train(wrapped, steps=2)  # the second step fails if a parameter had no gradient in the first
    finally:
        dist.destroy_process_group()
    train(expected, steps=2)
    assert all(map(torch.equal, net.parameters(), expected.parameters()))


def test_rank_zero_changes_nothing():
    net = small()
    add_lora(net, LoraConfig())
    assert all(p.requires_grad for p in net.parameters())
    assert list(net.state_dict()) == list(small().state_dict())


def test_training_mode_is_kept():
    net = small().eval()
    add_lora(net, LoraConfig(rank=2))
    assert not any(module.training for module in net.modules())
    merge_lora(net)
    assert not any(module.training for module in net.modules())


def test_ranks_and_networks_that_cannot_be_are_refused_before_anything_changes():
    net = small()
    with pytest.raises(UserError, match=r"lora.rank=33 .* 32$"):
        add_lora(net, LoraConfig(rank=33))
    assert all(p.requires_grad for p in net.parameters())
    resnet = build_model(ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(16, 16), num_classes=3))
    with pytest.raises(UserError, match="has none"):
        add_lora(resnet, LoraConfig(rank=2))
