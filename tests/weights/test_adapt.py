"""Adapting pretrained weights: what is kept, resampled, newly initialized or rejected."""

from __future__ import annotations

import pytest
import scipy.ndimage
import torch

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.vit import VisionTransformer
from vitrail.weights.resize import adapt_state_dict

OLD = ModelConfig(
    width=24, depth=2, mlp_dim=48, heads=3, patch=(8, 8), image_size=(32, 32), num_classes=10, representation=24
)


def changed(**options) -> ModelConfig:
    return ModelConfig(**{**OLD.model_dump(), **options})


@pytest.fixture
def old_state(randomise):
    return randomise(VisionTransformer(OLD)).state_dict()


def test_fine_tuning_as_in_the_paper(old_state):
    """Other image size and classes: positions are resampled, and a zero head replaces both layers of the old one."""
    new = changed(image_size=(48, 64), num_classes=3, representation=0)
    state, changes = adapt_state_dict(old_state, OLD, new)
    assert changes == [
        "position embedding resampled, bilinear as in the paper: grid 4x4 -> 6x8",
        "representation layer: dropped",
        "head: new, 10 -> 3 classes",
    ]
    net = VisionTransformer(new)
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert (set(missing), unexpected) == ({"head.weight", "head.bias"}, [])
    assert not net(torch.randn(2, 3, 48, 64)).any()
    table = old_state["pos_embed.table"][0]
    zoomed = scipy.ndimage.zoom(table[1:].view(4, 4, 24).numpy(), (6 / 4, 8 / 4, 1), order=1)
    torch.testing.assert_close(state["pos_embed.table"][0, 1:].view(6, 8, 24), torch.from_numpy(zoomed))
    assert torch.equal(state["pos_embed.table"][0, 0], table[0])
    kept = set(state) - {"pos_embed.table"}
    assert all(torch.equal(state[name], old_state[name]) for name in kept)


def test_only_the_head_starts_afresh_when_nothing_else_changes(old_state):
    state, changes = adapt_state_dict(old_state, OLD, changed(dropout=0.1, drop_path=0.1, head_bias=-10.0))
    assert set(old_state) - set(state) == {"head.weight", "head.bias"}
    assert all(torch.equal(tensor, old_state[name]) for name, tensor in state.items())
    assert changes == ["head: new, 10 classes"]


@pytest.mark.parametrize(
    ("options", "gone", "change"),
    [
        ({"num_classes": 3}, {"head"}, "head: new, 10 -> 3 classes"),
        ({"num_classes": 0}, {"head"}, "head: dropped"),
        ({"representation": 12}, {"head", "pre_logits"}, "representation layer: new, 12 values"),
        ({"representation": 0}, {"head", "pre_logits"}, "head: new, 10 classes"),
    ],
    ids=["fewer classes", "no classes", "other representation", "no representation"],
)
def test_parameters_that_do_not_fit_are_dropped(old_state, options, gone, change):
    state, changes = adapt_state_dict(old_state, OLD, changed(**options))
    assert {name.partition(".")[0] for name in set(old_state) - set(state)} == gone
    assert change in changes


def test_a_first_head(randomise):
    old = changed(num_classes=0, representation=0)
    state, changes = adapt_state_dict(VisionTransformer(old).state_dict(), old, changed(representation=0))
    assert changes == ["head: new, 10 classes"]
    assert not any(name.startswith("head") for name in state)


def moved(randomise, **options) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a network with these options before and after adapting it from 4x4 to 6x8 patches."""
    old = changed(representation=0, **options)
    before = randomise(VisionTransformer(old)).state_dict()
    after, _ = adapt_state_dict(before, old, changed(representation=0, image_size=(48, 64), **options))
    net = VisionTransformer(changed(representation=0, image_size=(48, 64), **options))
    assert set(net.load_state_dict(after, strict=False).missing_keys) == {"head.weight", "head.bias"}
    return before, after


@pytest.mark.parametrize("positions_at", ["stem", "layers", "shared"])
def test_learned_2d_positions_are_stretched_along_each_axis(randomise, positions_at):
    before, after = moved(randomise, positions="2d", positions_at=positions_at)
    for start in ["pos_embed.0", "pos_embed.1"] if positions_at == "layers" else ["pos_embed"]:
        for axis, count in (("rows", 6), ("columns", 8)):
            table = before[f"{start}.{axis}"]
            zoomed = scipy.ndimage.zoom(table.numpy(), (count / 4, 1), order=1)
            torch.testing.assert_close(after[f"{start}.{axis}"], torch.from_numpy(zoomed))


@pytest.mark.parametrize("positions_at", ["layers", "shared"])
def test_tables_of_every_layer_are_stretched(randomise, positions_at):
    before, after = moved(randomise, positions_at=positions_at)
    for name in ["pos_embed.0.table", "pos_embed.1.table"] if positions_at == "layers" else ["pos_embed.table"]:
        grid = before[name][0, 1:].view(4, 4, 24).numpy()
        zoomed = scipy.ndimage.zoom(grid, (6 / 4, 8 / 4, 1), order=1)
        torch.testing.assert_close(after[name][0, 1:].view(6, 8, 24), torch.from_numpy(zoomed))
        assert torch.equal(after[name][0, 0], before[name][0, 0])


def test_relative_positions_keep_their_meaning(randomise):
    before, after = moved(randomise, positions="relative")
    for block in (0, 1):
        old, new = (state[f"blocks.{block}.attn.relative.table"] for state in (before, after))
        assert torch.equal(new[-3:], old[-3:])  # pairs with the class token
        assert torch.equal(new[47], old[15])  # no step at all
        # One row down of six is 3/5 of a row down of four: between no step and one row there.
        torch.testing.assert_close(new[47 + 8], 0.4 * old[15] + 0.6 * old[15 + 4])
        # One column of eight is 3/7 of one of four.
        torch.testing.assert_close(new[47 + 1], 4 / 7 * old[15] + 3 / 7 * old[15 + 1])


def test_the_given_state_is_left_alone(old_state):
    before = dict(old_state)
    adapt_state_dict(old_state, OLD, changed(image_size=(48, 48), num_classes=2))
    assert list(before) == list(old_state)
    assert all(before[name] is old_state[name] for name in before)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"width": 48}, "width 48 .*width 24"),
        ({"depth": 3}, "depth 3 .*depth 2"),
        ({"heads": 4}, "heads 4 .*heads 3"),
        ({"patch": (16, 16)}, "patch 16x16 .*patch 8x8"),
        ({"channels": 1}, "channels 1 .*channels 3"),
        ({"pool": "gap", "class_token": False}, "class_token False .*class_token True"),
        ({"gelu": "erf"}, "gelu erf .*gelu tanh"),
        ({"norm_eps": 1e-12}, "norm_eps 1e-12.*norm_eps 1e-06"),
    ],
    ids=str,
)
def test_networks_that_do_not_fit(old_state, options, pattern):
    with pytest.raises(UserError, match=pattern):
        adapt_state_dict(old_state, OLD, changed(**options))
