"""Masked-patch prediction: what is drawn (acceptance test 11 of the paper's notes), what is to be predicted, and that a
network learns it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.config import MaskedConfig, ModelConfig, Preprocess
from vitrail.data.transforms import normalise
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.masked import KEPT, MASK, OTHER, MaskedPatchNetwork
from vitrail.tasks.masked_patch import MaskedPatch
from vitrail.tasks.task import Batch

CPU = torch.device("cpu")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def objective(target="color", share=0.5, size=(224, 224), patch=(16, 16), seed=0, **spec):
    return MaskedPatch(MaskedConfig(target=target, mask_ratio=share), Preprocess(size=size, **spec), patch, seed)


def keys(count, epoch=0):
    return torch.full((count,), epoch), torch.arange(count)


def test_exactly_half_of_the_patches_four_fifths_masked():
    where, kind, _ = objective().corruption(*keys(50), CPU)
    assert where.shape == (50, 98)
    assert all(len(set(row)) == 98 for row in where.tolist())
    assert where.min() == 0 and where.max() == 195
    assert (kind == MASK).sum(1).tolist() == [78] * 50
    assert (kind == OTHER).sum(1).tolist() == [10] * 50
    assert (kind == KEPT).sum(1).tolist() == [10] * 50


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), percent=st.integers(1, 99), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_counts_and_sources_for_any_grid(rows, columns, percent, seed):
    patches, size = rows * columns, (2 * rows, 2 * columns)
    count = patches * percent // 100
    if not count:
        with pytest.raises(UserError, match=r"masked\.mask_ratio"):
            objective(share=percent / 100, size=size, patch=(2, 2))
        return
    drawn = objective(share=percent / 100, size=size, patch=(2, 2), seed=seed).corruption(*keys(3), CPU)
    tenth = math.floor(count / 10 + 0.5)
    for where, kind, source in zip(*drawn, strict=True):
        assert len(where) == len(set(where.tolist())) == count
        assert sorted(kind.tolist()) == [1] * (count - 2 * tenth) + [2] * tenth + [3] * tenth
        assert source.min() >= 0 and source.max() < patches
        assert torch.equal(source == where, kind != OTHER)  # another patch, never itself


def test_every_patch_and_every_pair_is_as_likely():
    where, kind, source = objective(share=0.5, size=(12, 12), patch=(2, 2)).corruption(*keys(20_000), CPU)
    expected = 20_000 / 36
    for chosen in (MASK, OTHER, KEPT):
        times = torch.bincount(where[kind == chosen], minlength=36)
        per_patch = expected * (kind[0] == chosen).sum()
        assert (times - per_patch).abs().max() < 5 * per_patch**0.5
    changed = kind == OTHER
    steps = torch.bincount((source - where)[changed] % 36, minlength=36)
    per_step = changed.sum() / 35
    assert steps[0] == 0 and (steps[1:] - per_step).abs().max() < 5 * per_step**0.5


def test_corruption_depends_only_on_the_keys():
    epoch, sample = torch.tensor([0, 0, 1, 1]), torch.tensor([3, 4, 3, 2**40])
    whole = objective().corruption(epoch, sample, CPU)
    for row in range(4):
        alone = objective().corruption(epoch[row : row + 1], sample[row : row + 1], CPU)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True))
    assert len({tuple(row) for row in whole.where.tolist()}) == 4
    assert not torch.equal(objective(seed=1).corruption(epoch, sample, CPU).where, whole.where)


@pytest.mark.parametrize("spec", [{}, IMAGENET])
def test_colors_of_plain_patches_are_those_by_hand(spec):
    """Bytes on the edge of two colours are the test: 31 and 32 are 0 and 1 of 8."""
    image = torch.zeros(1, 3, 4, 6, dtype=torch.uint8)
    colors = [(0, 0, 0), (255, 255, 255), (32, 0, 0), (31, 32, 63), (0, 0, 224), (96, 128, 160)]
    for index, color in enumerate(colors):
        row, column = divmod(index, 3)
        image[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = torch.tensor(color)[:, None, None]
    spec = Preprocess(size=(4, 6), **spec)
    masked = MaskedPatch(MaskedConfig(), spec, (2, 2), 0)
    where = torch.tensor([[5, 4, 3, 2, 1, 0]])
    targets = masked.patch_targets(normalise(image, spec), where)
    assert targets.shape == (1, 6, 1)
    assert targets.flatten().tolist() == [64 * 3 + 8 * 4 + 5, 7, 8 + 1, 64, 511, 0]


def test_every_color_has_a_distinct_target():
    spec = Preprocess(size=(64, 128), **IMAGENET)  # 16 x 32 patches
    levels = torch.arange(8) * 32 + 31 * (torch.arange(8) % 2)
    color = torch.cartesian_prod(levels, levels, levels).to(torch.uint8)  # (512, 3), blue fastest
    image = color.T.reshape(1, 3, 16, 32).repeat_interleave(4, 2).repeat_interleave(4, 3)
    masked = MaskedPatch(MaskedConfig(), spec, (4, 4), 0)
    targets = masked.patch_targets(normalise(image, spec), torch.arange(512)[None])
    assert targets.flatten().tolist() == list(range(512))


def bins(patch, sides):
    """Colours of the parts of one patch, uint8 (3, h, w), in whole numbers."""
    height, width = patch.shape[1:]
    found = []
    for i in range(sides):
        for j in range(sides):
            part = patch[
                :,
                i * height // sides : -(-(i + 1) * height // sides),
                j * width // sides : -(-(j + 1) * width // sides),
            ].astype(np.int64)
            red, green, blue = part.sum((1, 2)) // (32 * part[0].size)
            found.append(64 * red + 8 * green + blue)
    return found


@pytest.mark.parametrize(("target", "sides"), [("color", 1), ("grid", 4)])
@pytest.mark.parametrize("patch", [(16, 16), (14, 14), (6, 9), (2, 3)])
def test_colors_of_any_patch_are_those_in_whole_numbers(target, sides, patch):
    rng = np.random.default_rng(0)
    size = (3 * patch[0], 2 * patch[1])
    image = rng.integers(0, 256, (4, 3, *size), dtype=np.uint8)
    image[1:] = image[1:] // 16 + rng.integers(0, 15, (3, 3, 1, 1)).astype(np.uint8) * 16  # near the edges of colours
    spec = Preprocess(size=size, **IMAGENET)
    masked = MaskedPatch(MaskedConfig(target=target), spec, patch, 0)
    where = torch.tensor([[0, 5], [1, 4], [2, 3], [3, 0]])
    targets = masked.patch_targets(normalise(torch.from_numpy(image), spec), where)
    for row, places in enumerate(where.tolist()):
        for place, got in zip(places, targets[row].tolist(), strict=True):
            top, left = place // 2 * patch[0], place % 2 * patch[1]
            assert got == bins(image[row, :, top : top + patch[0], left : left + patch[1]], sides)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixel_targets_are_the_pixels(channels):
    half = (0.5,) * channels
    masked = objective("pixels", size=(4, 9), patch=(2, 3), mean=half, std=half)
    pixels = torch.randn(2, channels, 4, 9)
    where = torch.tensor([[5, 0, 1], [3, 2, 4]])
    targets = masked.patch_targets(pixels, where)
    for row, places in enumerate(where.tolist()):
        for place, got in zip(places, targets[row], strict=True):
            top, left = place // 3 * 2, place % 3 * 3
            assert torch.equal(got, pixels[row, :, top : top + 2, left : left + 3].flatten())
    predicted, weights = torch.randn(targets.shape), torch.tensor([2.0, 0.5])
    loss = masked.loss_of_patches(predicted, targets, weights)
    each = ((predicted.double() - targets.double()) ** 2).mean((1, 2))
    assert loss.total.item() == pytest.approx((each * weights).sum().item(), rel=1e-5)
    assert loss.correct.isnan()  # nothing is right or wrong


@pytest.mark.parametrize(("target", "parts"), [("color", 1), ("grid", 16)])
def test_the_loss_is_torchs_over_corrupted_patches_weighted_by_image(target, parts):
    torch.manual_seed(0)
    masked = objective(target)
    predicted, targets = torch.randn(3, 98, parts * 512), torch.randint(0, 512, (3, 98, parts))
    weights = torch.tensor([1.0, 0.0, 0.25])
    predicted.view(3, 98, parts, 512)[2, :49].scatter_(-1, targets[2, :49, :, None], 50.0)
    loss = masked.loss_of_patches(predicted, targets, weights)
    logits = predicted.double().view(3, -1, 512)
    each = torch.stack([F.cross_entropy(logits[i], targets[i].flatten()) for i in range(3)])
    assert loss.total.item() == pytest.approx((each * weights).sum().item(), rel=1e-5)
    right = (logits.argmax(-1) == targets.view(3, -1)).double().mean(1)
    assert loss.correct.item() == pytest.approx((right * weights).sum().item(), rel=1e-5)
    assert right[2] >= 0.5


def test_grey_images_have_no_colors():
    with pytest.raises(UserError, match="needs images with 3 channels, not 1"):
        objective("grid", mean=(0.5,), std=(0.5,))


def a_network(target, **options):
    torch.manual_seed(0)
    small = {"width": 48, "depth": 2, "mlp_dim": 96, "heads": 4, "patch": (8, 8), "image_size": (32, 32)}
    return MaskedPatchNetwork(build_model(ModelConfig(**{**small, "num_classes": 0, **options})), target)


def a_batch(count=8):
    """Images of four plain quarters each."""
    rng = np.random.default_rng(0)
    quarters = torch.from_numpy(rng.integers(0, 256, (count, 3, 2, 2), dtype=np.uint8))
    image = quarters.repeat_interleave(16, 2).repeat_interleave(16, 3)
    pixels = normalise(image, Preprocess(size=(32, 32)))
    return Batch(pixels, torch.zeros(count, 1), torch.linspace(0.5, 1.5, count), *keys(count))


@pytest.mark.parametrize("target", ["color", "grid"])
def test_a_fresh_network_has_the_loss_of_guessing(target):
    net, batch = a_network(target), a_batch()
    loss = objective(target, size=(32, 32), patch=(8, 8)).loss(net, batch)
    assert (loss.total / batch.weights.sum()).item() == pytest.approx(math.log(512), rel=1e-6)


@pytest.mark.parametrize("target", ["color", "grid", "pixels"])
def test_micro_batch_losses_add_up_to_the_batch_loss(target):
    net, batch = a_network(target), a_batch()
    nn.init.normal_(net.head.weight, std=0.1)
    masked = objective(target, size=(32, 32), patch=(8, 8))
    whole, parts = (
        masked.loss(net, batch),
        [masked.loss(net, batch.micro_batch(first, first + 3)) for first in (0, 3, 6)],
    )
    assert torch.allclose(sum(part.total for part in parts), whole.total, rtol=1e-5)
    assert torch.allclose(sum(part.correct for part in parts), whole.correct, equal_nan=True)


def test_a_batch_without_keys_is_refused():
    batch = a_batch()
    with pytest.raises(ValueError, match="epoch and sample"):
        objective(size=(32, 32), patch=(8, 8)).loss(
            a_network("color"), Batch(batch.pixels, batch.targets, batch.weights)
        )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["color", "grid", "pixels"])
def test_a_network_learns_to_predict_what_it_does_not_see(target):
    net, batch = a_network(target), a_batch()
    masked = objective(target, size=(32, 32), patch=(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    seen = []
    for _ in range(60):
        loss = masked.loss(net, batch)
        (loss.total / batch.weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.total / batch.weights.sum()).item())
    assert seen[-1] < 0.3 * seen[0]
    if target != "pixels":
        assert loss.correct / batch.weights.sum() > 0.8
