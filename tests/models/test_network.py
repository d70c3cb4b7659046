"""The whole network: dropout as in the paper, any image shape, and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tokens import every_token
from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.variants import config_from_name
from vitrail.models.vit import VisionTransformer

SMALL = {"width": 24, "depth": 2, "mlp_dim": 40, "heads": 3, "patch": (4, 4), "image_size": (8, 12), "num_classes": 5}


def random_net(**options) -> VisionTransformer:
    """A network with random values in all parameters, in float64."""
    net = VisionTransformer(ModelConfig(**{**SMALL, **options})).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return net


def written_out(net: VisionTransformer, pixels: Tensor, drop) -> Tensor:
    """The forward pass of the original code line by line, with `drop` for its dropout layers."""
    p = dict(net.named_parameters())
    config = net.config
    ph, pw = config.patch
    batch, channels = pixels.shape[:2]
    rows, columns = config.grid
    patches = (
        pixels.view(batch, channels, rows, ph, columns, pw)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(batch, -1, channels * ph * pw)
    )
    x = patches @ p["patch_embed.proj.weight"].flatten(1).T + p["patch_embed.proj.bias"]
    x = torch.cat([p["cls_token"].expand(batch, -1, -1), x], 1)
    x = drop(x + p["pos_embed.table"])

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    for index in range(config.depth):
        block = f"blocks.{index}"
        q, k, v = dense(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").chunk(3, dim=-1)
        head = config.width // config.heads
        mixed = []
        for start in range(0, config.width, head):
            qh, kh, vh = (t[..., start : start + head] for t in (q, k, v))
            mixed.append(((qh @ kh.transpose(1, 2)) / head**0.5).softmax(-1) @ vh)
        x = x + drop(dense(torch.cat(mixed, -1), f"{block}.attn.proj"))
        hidden = dense(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        x = x + drop(dense(drop(gelu), f"{block}.mlp.fc2"))
    return dense(norm(x, "norm")[:, 0], "head")


class Masks:
    """Dropout whose mask depends only on the call and the index of a value, not on the number of tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, p: float = 0.1, training: bool = True, inplace: bool = False) -> Tensor:
        self.calls += 1
        batch, tokens, width = x.shape
        whole = torch.rand(batch, 7, width, generator=torch.Generator().manual_seed(self.calls)) > p
        return x * whole[:, :tokens] / (1 - p) if training else x


def test_dropout_is_where_the_paper_has_it(monkeypatch):
    net = random_net(dropout=0.1).train()
    pixels = torch.randn(3, 3, 8, 12, dtype=torch.float64)
    expected = written_out(net, pixels, Masks())
    masks = Masks()
    monkeypatch.setattr(F, "dropout", masks)
    assert torch.allclose(net(pixels), expected, rtol=0, atol=1e-10)
    assert masks.calls == 1 + 3 * net.config.depth
    assert not torch.allclose(expected, written_out(net, pixels, lambda x: x), atol=1e-3)


def test_skipping_unused_tokens_changes_no_logit_and_no_gradient():
    """With class-token pooling, the last block computes only that token."""
    net = random_net()
    pixels = torch.randn(3, 3, 8, 12, dtype=torch.float64)
    short = net(pixels)
    gradients = torch.autograd.grad(short.logsumexp(-1).sum(), list(net.parameters()))
    whole = net.head(net.pre_logits(net.pool(every_token(net, pixels))))
    expected = torch.autograd.grad(whole.logsumexp(-1).sum(), list(net.parameters()))
    assert torch.allclose(short, whole, rtol=0, atol=1e-12)
    for one, other in zip(gradients, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    seen: list[Tensor] = []
    net.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    net(pixels)
    assert seen[0].shape[1] == 1


def test_dropout_is_active_in_training_only():
    net = random_net(dropout=0.1)
    pixels = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    assert not torch.equal(net.train()(pixels), net(pixels))
    assert torch.equal(net.eval()(pixels), net(pixels))
    assert torch.allclose(net(pixels), written_out(net, pixels, lambda x: x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("class_token", [True, False])
def test_mean_pooling_looks_at_patches_only(class_token):
    net = random_net(pool="gap", norm="after_pool", class_token=class_token, num_classes=0)
    pixels = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    seen: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    features = net.forward_features(pixels)
    patches = seen[0][:, -6:]
    assert seen[0].shape[1] == 6 + class_token
    expected = F.layer_norm(patches.mean(1), (24,), net.fc_norm.weight, net.fc_norm.bias, 1e-6)
    assert torch.allclose(features, expected, rtol=0, atol=1e-12)
    assert torch.equal(net(pixels), features)


def test_raster_order_of_patches_on_a_non_square_image():
    net = random_net()
    pixels = torch.randn(1, 3, 8, 12, dtype=torch.float64)
    base = net.add_prefix_tokens(net.patch_embed(pixels))
    pixels[:, :, 4:8, 8:12] += 1  # the last patch of the second row
    changed = (net.add_prefix_tokens(net.patch_embed(pixels)) - base).abs().sum(-1)[0] > 0
    assert changed.tolist() == [False] * 6 + [True]


def test_another_image_size_is_refused_with_both_sizes_named():
    with pytest.raises(ValueError, match=r"8x12 images.* 12x8"):
        random_net()(torch.zeros(1, 3, 12, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"image_size": (8, 10)}, "8x10 .*patch 4x4"),
        ({"heads": 5}, "width 24 .* 5 heads"),
        ({"class_token": False}, "'token' .*class_token"),
    ],
)
def test_invalid_configs(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        ModelConfig(**{**SMALL, **options})


@pytest.mark.parametrize(("name", "hint"), [("b/16", "'B/16'"), ("S16", "'S/16'"), ("ViT-S/17x", "a size")])
def test_unknown_names_get_a_hint(name, hint):
    with pytest.raises(UserError, match=hint):
        config_from_name(name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token", "map", "relative", "axial", "hybrid", "resnet"])
def test_export_with_any_batch(kind):
    names = {"axial": "Axial-Ti/16", "hybrid": "R+Ti/16", "resnet": "R26x1"}
    options = {"map": {"pool": "map"}, "relative": {"positions": "relative", "registers": 2}}.get(kind, {})
    depth = {} if kind == "resnet" else {"depth": 1}
    net = build_model(config_from_name(names.get(kind, "Ti/16"), 5, 32, **depth, **options)).eval()
    torch.nn.init.normal_(net.head.weight)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(net, (torch.randn(3, 3, 32, 32),), dynamic_shapes=({0: batch},)).module()
    pixels = torch.randn(5, 3, 32, 32)
    assert torch.allclose(exported(pixels), net(pixels), atol=1e-4)
    assert net(pixels[:0]).shape == (0, 5)


def test_constants_of_a_stem_keep_its_blocks():
    timm = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance"}
    config = config_from_name("R50+B/16", 10, stem=timm)
    assert config.stem.blocks == (3, 4, 9) and config.stem.norm_eps == 1e-5 and config.sequence == 197
    with pytest.raises(UserError, match="no convolutional stem"):
        config_from_name("B/16", 10, stem=timm)


def test_names_of_the_paper():
    for name, same in {
        "ViT-B/16": "B/16",
        "R50+ViT-B/16": "R50+B/16",
        "R50x1+ViT-B/32": "R50+B/32",
        "Axial-ViT-B/16": "Axial-B/16",
        "BiT-R152x4": "R152x4",
    }.items():
        assert config_from_name(name, 10) == config_from_name(same, 10)
    for name, hint in {"ViT-b/32": "'S/32'", "BiT-B/16": "unknown model", "R50x2+B/16": "unknown model"}.items():
        with pytest.raises(UserError, match=hint):
            config_from_name(name, 10)
    with pytest.raises(UserError, match="unknown key 'pool'"):
        config_from_name("R50x1", 10, pool="gap")


def test_names():
    assert config_from_name("B/32", 10, (64, 96)).grid == (2, 3)
    assert config_from_name("ViT-L/16", 10).width == 1024
    assert not config_from_name("S/16", 10, pool="gap").class_token
