"""Position embeddings, compared with their definitions and with the resampling of other libraries."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F
from timm.layers.pos_embed import resample_abs_pos_embed

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.pos_embed import build_pos_embed, resample_axis, resample_offsets, resample_pos_embed
from vitrail.models.variants import config_from_name

FIXTURES = Path(__file__).parents[1] / "fixtures"
SMALL = {"width": 24, "depth": 3, "mlp_dim": 40, "heads": 3, "patch": (4, 4), "image_size": (8, 12), "num_classes": 5}
# Table 8 of the paper: kind, and positions_at
CELLS = [
    ("none", "stem"),
    ("1d", "stem"),
    ("1d", "layers"),
    ("1d", "shared"),
    ("2d", "stem"),
    ("2d", "layers"),
    ("2d", "shared"),
    ("relative", "stem"),
]


def small(**options) -> ModelConfig:
    return ModelConfig(**{**SMALL, **options})


def random_net(**options):
    net = build_model(small(**options)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return net


def table(rows: int, columns: int, extra: int) -> torch.Tensor:
    return torch.randn(1, extra + rows * columns, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("registers", [0, 2])
def test_learned_rows_for_every_token_or_for_patches_only(registers):
    tokens = torch.zeros(1, 7 + registers, 24)
    every = build_pos_embed(small(registers=registers))
    assert torch.equal(every(tokens), every.table)
    patches = build_pos_embed(small(registers=registers, prefix_positions=False))
    assert patches.table.shape == (1, 6, 24)
    added = patches(tokens)[0]
    assert not added[: 1 + registers].any()
    assert torch.equal(added[1 + registers :], patches.table[0])


def test_learned_2d_joins_a_column_half_and_a_row_half():
    positions = build_pos_embed(small(positions="2d"))
    added = positions(torch.zeros(1, 7, 24))[0]
    assert not added[0].any()  # the class token is not in the grid
    for row in range(2):
        for column in range(3):
            expected = torch.cat([positions.columns[column], positions.rows[row]])
            assert torch.equal(added[1 + row * 3 + column], expected)
    assert positions.columns.std().item() == pytest.approx(0.02, rel=0.5)


def test_sincos_by_its_formula():
    """[sin x, cos x, sin y, cos y] with frequencies 10000^(-i/(q-1)); not stored in the state dict."""
    net = build_model(small(positions="sincos", pool="gap", class_token=False))
    assert "pos_embed.waves" not in net.state_dict()
    added = net.pos_embed(torch.zeros(1, 6, 24))[0]
    quarter = 6
    for row in range(2):
        for column in range(3):
            waves = [
                function(position * 10_000 ** (-index / (quarter - 1)))
                for position, function in ((column, math.sin), (column, math.cos), (row, math.sin), (row, math.cos))
                for index in range(quarter)
            ]
            assert torch.allclose(added[row * 3 + column], torch.tensor(waves), atol=1e-6)


@pytest.mark.parametrize("class_token", [True, False])
def test_relative_attention_by_its_definition(class_token):
    """Scores q.k + q.r for the offset of two positions in raster order, scaled together. Pairs with the class token
    have separate vectors."""
    net = random_net(positions="relative", class_token=class_token, pool="token" if class_token else "gap")
    attn, first = net.blocks[0].attn, int(class_token)
    assert attn.relative.table.shape == (11 + 3 * first, 8)
    x = torch.randn(1, 6 + first, 24, dtype=torch.float64)
    q, k, v = (part.view(-1, 3, 8) for part in attn.qkv(x)[0].chunk(3, dim=-1))  # (T, heads, 8)
    mixed = torch.zeros(6 + first, 3, 8, dtype=torch.float64)
    for head in range(3):
        for i in range(6 + first):
            scores = []
            for j in range(6 + first):
                outside = {(True, False): 11, (False, True): 12, (True, True): 13}.get((i < first, j < first))
                row = outside if outside is not None else (i - j) + 5
                scores.append(q[i, head] @ (k[j, head] + attn.relative.table[row]) / 8**0.5)
            mixed[i, head] = torch.stack(scores).softmax(0) @ v[:, head]
    expected = attn.proj(mixed.flatten(1))
    assert torch.allclose(attn(x)[0], expected, rtol=0, atol=1e-12)
    assert torch.allclose(attn(x, keep=2)[0], expected[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "positions_at"), CELLS)
def test_every_cell_of_table_8_trains(kind, positions_at):
    net = build_model(small(positions=kind, positions_at=positions_at))
    loss = F.cross_entropy(net(torch.randn(4, 3, 8, 12)), torch.arange(4))
    loss.backward()
    torch.nn.init.normal_(net.head.weight)  # a zero head has zero gradients
    F.cross_entropy(net(torch.randn(4, 3, 8, 12)), torch.arange(4)).backward()
    trained = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    expected = {name for name, _ in net.named_parameters() if "pos_embed" in name or "relative" in name}
    assert expected <= trained
    tables = {"none": 0, "1d": 1, "2d": 2, "relative": 3}[kind] * (3 if positions_at == "layers" else 1)
    assert len(expected) == tables


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_every_layer_adds_before_its_block(kind):
    net = random_net(positions=kind, positions_at="layers")
    pixels = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    x = net.add_prefix_tokens(net.patch_embed(pixels))
    for positions, block in zip(net.pos_embed, net.blocks, strict=True):
        x = block.forward(positions(x))
    expected = net.head(net.norm(x)[:, 0])
    assert torch.allclose(net(pixels), expected, rtol=0, atol=1e-12)


def test_shared_positions_are_one_table_at_every_layer():
    net = random_net(positions_at="shared")
    copies = random_net(positions_at="layers")
    state = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("pos_embed")}
    state |= {f"pos_embed.{index}.table": net.pos_embed.table for index in range(3)}
    copies.load_state_dict(state)
    pixels = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    assert torch.equal(net(pixels), copies(pixels))


def test_without_positions_a_network_sees_a_bag_of_patches():
    pixels = torch.randn(4, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shuffled = pixels.clone()
    shuffled[..., :4, :4], shuffled[..., 4:, 8:] = pixels[..., 4:, 8:], pixels[..., :4, :4]
    bag = random_net(positions="none")
    assert torch.allclose(bag(pixels), bag(shuffled), atol=1e-10)
    for kind in ("1d", "2d", "sincos", "relative"):
        net = random_net(positions=kind)
        for parameter in (p for name, p in net.named_parameters() if "relative" in name):
            parameter.data.mul_(10)
        assert (net(pixels) - net(shuffled)).abs().max() > 1e-3


@pytest.mark.parametrize("positions", ["none", "1d", "2d", "sincos", "relative"])
@pytest.mark.parametrize("pool", ["token", "gap"])
def test_the_stream_of_residuals_is_float32_under_autocast(positions, pool):
    net = build_model(small(positions=positions, pool=pool, class_token=pool == "token"))
    seen: list[torch.dtype] = []
    net.blocks[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    plain = net.patch_embed.proj.forward
    net.patch_embed.proj.forward = lambda pixels: plain(pixels).bfloat16()  # as with autocast
    net(torch.randn(2, 3, 8, 12))
    assert seen == [torch.float32]


def test_offsets_keep_their_direction_on_another_grid():
    """A table with the offsets (rows, columns) as fractions of the image has the same property after resampling."""

    def steps(grid: tuple[int, int]) -> torch.Tensor:
        last = grid[0] * grid[1] - 1
        offsets = torch.arange(-last, last + 1)
        down = torch.round(offsets / grid[1])
        return torch.stack([down / (grid[0] - 1), (offsets - down * grid[1]) / (grid[1] - 1)], dim=1)

    for old, new in (((14, 14), (28, 28)), ((14, 14), (7, 28)), ((5, 7), (9, 4))):
        moved = resample_offsets(steps(old), old, new)
        expected = steps(new)
        # An offset of nearly half a row is ambiguous: half a row right, or one row down and half a row left.
        clear = (expected[:, 1].abs() < 0.5 - 1 / (min(old[1], new[1]) - 1)) & (expected[:, 0].abs() < 1)
        assert clear.float().mean() > 0.2
        assert torch.allclose(moved[clear], expected[clear], atol=1e-5)
    table = torch.randn(2 * 12 - 1, 8)
    assert torch.equal(resample_offsets(table, (3, 4), (3, 4)), table)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"positions": "relative", "positions_at": "layers"}, "positions_at must be 'stem'"),
        ({"positions": "none", "positions_at": "shared"}, "positions_at must be 'stem'"),
        ({"positions": "sincos", "positions_at": "layers"}, "'stem' or 'shared'"),
        ({"positions": "sincos", "width": 18, "heads": 3}, "divisible by 4"),
        ({"positions": "3d"}, "'positions'"),
    ],
)
def test_invalid_positions(options, pattern):
    with pytest.raises(UserError, match=pattern):
        config_from_name("S/16", 10, **options)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(
    ("old", "new"), [((7, 7), (12, 12)), ((14, 14), (24, 24)), ((14, 14), (7, 7)), ((4, 6), (9, 5)), ((3, 3), (1, 4))]
)
def test_resample_equals_zoom_of_the_original_code(old, new, extra):
    positions = table(*old, extra)
    grid = positions[0, extra:].reshape(*old, 16).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    result = resample_pos_embed(positions, old, new)
    assert result.shape == (1, extra + new[0] * new[1], 16)
    np.testing.assert_allclose(result[0, extra:].numpy(), zoomed.reshape(-1, 16), atol=1e-5)  # of values near one
    assert torch.equal(result[:, :extra], positions[:, :extra])


def test_resample_equals_big_vision():
    with np.load(FIXTURES / "bigvision_resample_positions.npz") as recorded:
        result = resample_pos_embed(torch.from_numpy(recorded["old"]), (7, 7), (12, 12))
        np.testing.assert_allclose(result.numpy(), recorded["new"], atol=1e-5)


@pytest.mark.parametrize("how", ["bicubic", "bicubic_antialias"])
@pytest.mark.parametrize(("old", "new"), [((7, 7), (12, 12)), ((14, 14), (7, 9)), ((4, 6), (9, 5))])
def test_resample_equals_timm(old, new, how):
    positions = table(*old, 2)
    antialias = how == "bicubic_antialias"
    expected = resample_abs_pos_embed(positions, new, old, num_prefix_tokens=2, antialias=antialias)
    assert torch.allclose(resample_pos_embed(positions, old, new, how), expected, atol=1e-6)


@pytest.mark.parametrize("how", ["paper", "bicubic", "bicubic_antialias"])
def test_the_same_grid_changes_nothing(how):
    positions = table(5, 3, 1)
    assert torch.equal(resample_pos_embed(positions, (5, 3), (5, 3), how), positions)
    assert torch.equal(resample_axis(positions[0], 16, how), positions[0])


def test_a_line_is_resampled_between_its_ends():
    line = torch.tensor([[0.0], [1.0], [4.0]])
    assert resample_axis(line, 5).flatten().tolist() == [0.0, 0.5, 1.0, 2.5, 4.0]


def test_half_precision_stays_half_precision():
    assert resample_pos_embed(table(4, 4, 1).bfloat16(), (4, 4), (6, 6)).dtype == torch.bfloat16
    assert resample_axis(table(4, 4, 1)[0].bfloat16(), 6).dtype == torch.bfloat16
