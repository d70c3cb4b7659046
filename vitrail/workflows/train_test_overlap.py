"""Images to measure weights on: those that none of them was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.dataset import (
    EARLIER_SKETCH_SIZE,
    SKETCH_SIZE,
    Dataset,
    Samples,
    match_digests,
    match_sketch,
    open_dataset,
)
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.splits import SplitRule
from vitrail.errors import UserError, did_you_mean
from vitrail.inference.classifier import Classifier
from vitrail.weights.bundle import Card, read_trained_on
from vitrail.weights.read import Weights

STRAY = 0.01  # share of images known to be trained on, below which those of which nothing is known may stay


class TrainingRecord(NamedTuple):
    """Weights by what they tell of the images that they, and the weights that they came from, were trained on."""

    card: Card
    digests: np.ndarray = np.empty(0, np.uint64)  # of all of them; those of the first format tell in their card

    @classmethod
    def of(cls, weights: Weights | Classifier) -> TrainingRecord:
        own = weights.file if isinstance(weights, Classifier) or weights.layout == "vitrail" else None
        return cls(weights.card) if own is None else cls(weights.card, read_trained_on(own))


def unseen_images(
    data: str,
    weights: Sequence[TrainingRecord],
    split: str | None,
    quarantine: str,
    scanned: Callable[[int, int], None],
    follow_links: bool = True,
) -> tuple[Dataset, Samples, str]:
    """The dataset, the images to measure on, and what they are, in words. The classes are in the order of the first
    weights; images of the training of any are left out."""
    cards = [one.card for one in weights]
    card = cards[0]
    trained_by: dict[Any, dict[str, Any]] = {one.data.get("fingerprint"): one.data for one in reversed(cards)}

    def rule(fingerprint: str, _: object) -> SplitRule | None:
        own = trained_by.get(fingerprint)
        return None if own is None else SplitRule.of({"group_similar": False} | own)  # older weights lack it

    dataset = open_dataset(
        data,
        rule,
        classes=card.classes,
        max_pixels=card.data.get("max_pixels", MAX_PIXELS),
        quarantine=quarantine,
        follow_links=follow_links,
        progress=scanned,
    )
    if dataset.fingerprint in trained_by:
        name = split or ("test" if "test" in dataset.splits else "val")
        words = {"train": "train split, on which these weights were trained"}
        if "test" not in dataset.splits:
            words["val"] = "held-out split: these weights were trained on the rest of this folder"
    else:
        name = split or next(known for known in ("test", "val", "all", "train") if known in dataset.splits)
        words = {"all": "folder"}
    if name not in dataset.splits:
        known = list(dataset.splits)
        raise UserError(f"{data} has no split '{name}'{did_you_mean(name, known) or '.'} It has: {', '.join(known)}.")
    samples, sentence = dataset.splits[name], words.get(name, f"{name} split")
    multilabel = card.task == "multilabel"
    if name == "real" and not multilabel:
        sentence += ", where any label of an image's set is right"
    elif (samples.sets is not None) != multilabel:
        ours, theirs = ("several labels", "one") if multilabel else ("one label", "any number")
        raise UserError(f"these weights give an image {ours}, and the images of {data} have {theirs}")
    if name == "train":  # asked for the training images, one gets them
        return dataset, samples, sentence
    return dataset, *_without_trained(data, dataset, samples, sentence, weights)


def _without_trained(
    data: str, dataset: Dataset, samples: Samples, sentence: str, weights: Sequence[TrainingRecord]
) -> tuple[Samples, str]:
    seen, doubtful, chance = np.zeros(len(samples), bool), np.zeros(len(samples), bool), 0.0
    for card, digests in weights:
        seen |= match_digests(samples, digests)
        for earlier, (known, size) in enumerate(_sketches(card)):
            own, beyond = match_sketch(samples, known, size)
            seen |= own
            if own.any() and (earlier or dataset.fingerprint != card.data.get("fingerprint")):
                doubtful |= beyond
                chance = max(chance, float(own.sum() / (~beyond).sum()))
    if not all(len(one.digests) or one.card.data.get("trained_on") for one in weights):
        sentence += "; these weights do not tell what they were trained on, which may be among them"
    if not seen.any():
        return samples, sentence
    doubtful &= ~seen
    spared = chance < STRAY  # copies that strayed into another set, not a set that was trained on
    kept = ~seen if spared else ~(seen | doubtful)
    if not kept.any():
        raise UserError(f"these weights were trained on every image of {data}: nothing is left to measure on")
    left_out = f"{int(seen.sum()):,} images that these weights were trained on are left out"
    more = int(doubtful.sum())
    if more and not spared:
        left_out += f", and {more:,} more that cannot be told from such"
    elif round(chance * more):
        left_out += f", and about {chance * more:.0f} more may be among the rest"
    return samples.subset(np.flatnonzero(kept)), f"{sentence}; {left_out}"


def _sketches(card: Card) -> list[tuple[list[str], int]]:
    """What a card itself tells: of the images that weights were trained on, then of those that the weights they came
    from were."""
    before = [(known, EARLIER_SKETCH_SIZE) for known in card.data.get("trained_before", [])]
    return [(card.data.get("trained_on", []), SKETCH_SIZE), *before]


def earlier_training(weights: Sequence[TrainingRecord]) -> tuple[np.ndarray, list[list[str]]]:
    """What a run remembers of the images that its starting weights, or its teacher, were trained on: all digests that
    they know, and of cards that know a part of their images the beginning of it."""
    sketches = [sketch for one in weights for sketch in _sketches(one.card)]
    partly = {tuple(known[:EARLIER_SKETCH_SIZE]): None for known, size in sketches if len(known) >= size}
    told = [_numbers(known) for known, _ in sketches]
    return np.unique(np.concatenate([*(one.digests for one in weights), *told, _numbers([])])), list(map(list, partly))


def count_seen(samples: Samples, weights: TrainingRecord) -> int:
    """How many images weights are known to have been trained on, or the weights that they came from."""
    told = [_numbers(known) for known, _ in _sketches(weights.card)]
    return count_seen_digests(samples, np.concatenate([weights.digests, *told]))


def count_seen_digests(samples: Samples, digests: np.ndarray) -> int:
    """How many images are among those of these digests."""
    return int(match_digests(samples, digests).sum())


def earlier_digests(about: Mapping[str, Any]) -> np.ndarray:
    """The digests of a run's checkpoint; one of an earlier version has lists alone."""
    return np.concatenate([about.get("digests_before", _numbers([])), *map(_numbers, about["trained_before"])])


def _numbers(known: Sequence[str]) -> np.ndarray:
    return np.array([int(digest, 16) for digest in known], np.uint64)


def check_class_names(weights: str | Path, card: Card) -> None:
    """That weights can be measured on folders named after classes."""
    advice = f"train one on your data with `vitrail train DATA --from {weights}`"
    count = card.model.num_classes
    if not count:
        raise UserError(f"{weights} has no classifier: {advice}")
    if not card.classes:
        raise UserError(f"{weights} has {count:,} classes without names, which no folder can be matched with: {advice}")
