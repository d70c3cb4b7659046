"""Mixup and CutMix against closed forms and timm, and on batches split over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.mixup import cutmix_bbox_and_lam

from vitrail.config import AugmentConfig
from vitrail.data.augment.mix import mix, mixing_ratios

BOTH = AugmentConfig(mixup=0.8, cutmix=1.0, mix_per="sample")


def batch(rows: int = 12, size: tuple[int, int] = (20, 16)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, *size), torch.eye(rows), torch.ones(rows)


def test_mixup_mixes_pixels_and_targets_by_one_ratio_of_at_least_half():
    pixels, targets, weights = batch()
    mixed, soft, counted = mix(pixels, targets, weights, AugmentConfig(mixup=0.4), 0, [3], np.arange(12))
    ratio = soft.diagonal()[0].item()
    assert 0.5 <= ratio <= 1
    assert torch.allclose(soft, ratio * torch.eye(12) + (1 - ratio) * torch.eye(12).roll(1, 0))
    assert torch.allclose(mixed, ratio * pixels + (1 - ratio) * pixels.roll(1, 0), atol=1e-6)
    assert torch.equal(counted, weights)


def test_mixup_ratios_are_those_of_earlier_versions():
    found = [mixing_ratios(AugmentConfig(mixup=0.4), 7, [step], np.arange(2), (8, 8))[0].item() for step in range(3)]
    assert found == pytest.approx(EARLIER, rel=1e-12)


EARLIER = [0.9595395180508913, 0.9999775213169784, 0.8079281651144006]


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_mixup_ratios_follow_the_folded_beta(per):
    config = AugmentConfig(mixup=0.8, mix_per=per)
    steps = range(1500) if per == "batch" else [0]
    found = np.concatenate([mixing_ratios(config, 0, [step], np.arange(1500), (8, 8))[0] for step in steps])
    assert len(found) == 1500
    assert stats.kstest(2 * found - 1, lambda x: 2 * stats.beta.cdf((1 + x) / 2, 0.8, 0.8) - 1).pvalue > 1e-3


def test_cutmix_pastes_a_box_and_counts_its_area():
    pixels, targets, weights = batch()
    config = AugmentConfig(cutmix=1.0, mix_per="sample")
    mixed, soft, _ = mix(pixels, targets, weights, config, 0, [1], np.arange(12))
    seen = []
    for row in range(12):
        pasted = (mixed[row] != pixels[row]).all(0)  # (H, W)
        assert torch.equal(mixed[row][:, pasted], pixels[row - 1][:, pasted])
        assert torch.equal(mixed[row][:, ~pasted], pixels[row][:, ~pasted])
        rows, columns = pasted.any(1).nonzero(), pasted.any(0).nonzero()
        if len(rows):  # a whole rectangle
            assert pasted.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        ratio = pasted.float().mean().item()
        assert soft[row, row].item() == pytest.approx(1 - ratio, abs=1e-6)
        assert soft[row, row - 1].item() == pytest.approx(ratio, abs=1e-6)
        seen.append(ratio)
    assert len(set(seen)) > 6


def test_cutmix_ratios_are_distributed_as_in_timm():
    count, size = 3000, (64, 48)
    ratios, cut, boxes = mixing_ratios(AugmentConfig(cutmix=1.0, mix_per="sample"), 0, [0], np.arange(count), size)
    assert cut.all()
    np.random.seed(0)
    drawn = [cutmix_bbox_and_lam((1, 3, *size), lam) for lam in np.random.beta(1.0, 1.0, size=count)]
    assert stats.ks_2samp(ratios, [lam for _, lam in drawn]).pvalue > 1e-3
    for column in range(4):
        assert stats.ks_2samp(boxes[:, column], [box[column] for box, _ in drawn]).pvalue > 1e-3


def test_mixup_and_cutmix_are_used_equally_often():
    _, cut, _ = mixing_ratios(BOTH, 0, [0], np.arange(4000), (8, 8))
    assert cut.mean() == pytest.approx(0.5, abs=0.03)
    per_batch = AugmentConfig(mixup=0.8, cutmix=1.0)
    cut = [mixing_ratios(per_batch, 0, [step], np.arange(2), (8, 8))[1][0] for step in range(1000)]
    assert np.mean(cut) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_of_a_mixture_is_the_weighted_loss_of_both_labels(loss):
    pixels, targets, _ = batch(6)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.5, 0.25, 0.0])
    ratio, _, _ = mixing_ratios(BOTH, 0, [2], np.arange(6), (20, 16))
    ratio = np.broadcast_to(ratio, 6)
    _, soft, counted = mix(pixels, targets, weights, BOTH, 0, [2], np.arange(6))
    logits = torch.randn(6, targets.shape[1], generator=torch.Generator().manual_seed(0))

    def losses(labels):
        if loss == "softmax":
            return -(labels * logits.log_softmax(-1)).sum(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1)

    own, previous = losses(targets), losses(targets.roll(1, 0))
    expected = [ratio[i] * weights[i] * own[i] + (1 - ratio[i]) * weights[i - 1] * previous[i] for i in range(6)]
    torch.testing.assert_close(counted * losses(soft), torch.stack(expected).float(), rtol=1e-5, atol=1e-6)
    assert counted[0] > 0 and (weights[0] == 1)  # mixed with an image of weight 0: only its own part counts


@pytest.mark.parametrize(
    "config",
    [
        BOTH,
        AugmentConfig(mixup=0.8, cutmix=1.0),
        AugmentConfig(mixup=0.2),
        AugmentConfig(cutmix=1.0),
        AugmentConfig(mixup=0.2, mix_per="sample"),
    ],
)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_ranks_mix_as_the_whole_batch(config, step):
    """Three ranks with a batch of twelve, each with the previous row in front."""
    pixels, targets, _ = batch()
    weights = torch.tensor([1.0] * 7 + [0.0] + [1.0] * 4)
    whole = mix(pixels, targets, weights, config, 3, [step], np.arange(12))
    parts = []
    for start in (0, 4, 8):
        rows = np.arange(start - 1, start + 4) % 12
        parts.append([out[1:] for out in mix(pixels[rows], targets[rows], weights[rows], config, 3, [step], rows)])
    for number, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[number] for part in parts]), expected)


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_merged_steps_equal_single_steps(per):
    config, steps = AugmentConfig(mixup=0.8, cutmix=1.0, mix_per=per), range(4, 10)
    pixels, targets, weights = batch(6 * 5)
    weights[7] = 0.0
    positions = np.tile(np.arange(5), 6)
    merged = mix(pixels, targets, weights, config, 3, steps, positions)
    for number, step in enumerate(steps):
        rows = slice(5 * number, 5 * number + 5)
        alone = mix(pixels[rows], targets[rows], weights[rows], config, 3, [step], np.arange(5))
        for part, whole in zip(alone, merged, strict=True):
            assert torch.equal(whole[rows], part)


def test_box_positions_are_independent_of_the_switch_and_of_each_other():
    count, size = 2000, (64, 48)
    _, cut, boxes = mixing_ratios(BOTH, 0, [0], np.arange(count), size)
    whole = (boxes[:, 0] > 0) & (boxes[:, 1] < size[0]) & (boxes[:, 2] > 0) & (boxes[:, 3] < size[1])
    down, across = boxes[:, :2].sum(1) / 2 / size[0], boxes[:, 2:].sum(1) / 2 / size[1]  # centres, 0 to 1
    for centre in (down, across):
        assert centre[cut].mean() == pytest.approx(0.5, abs=0.04)
        assert centre[~cut].mean() == pytest.approx(0.5, abs=0.04)
    assert whole[cut].sum() > 100  # boxes not clipped by the border
    for some in (cut, cut & whole):
        assert abs(np.corrcoef(down[some], across[some])[0, 1]) < 0.2
