"""Find images of a dataset that weights were not trained on, and count those that they were trained on.

In: a path and the `TrainingRecord` of each weights file. Out: the images to measure on, with a description that states
what was excluded.
"""

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

MAX_STRAY_FRACTION = 0.01  # if at most this fraction is known to be training images, images of unknown origin are kept


class TrainingRecord(NamedTuple):
    """What weights record about the images that they and their starting weights were trained on."""

    card: Card
    digests: np.ndarray = np.empty(0, np.uint64)  # of all images; the first format has a part of them, in its card

    @classmethod
    def of(cls, weights: Weights | Classifier) -> TrainingRecord:
        file = weights.file if isinstance(weights, Classifier) or weights.layout == "vitrail" else None
        return cls(weights.card) if file is None else cls(weights.card, read_trained_on(file))


def unseen_images(
    data: str,
    weights: Sequence[TrainingRecord],
    split: str | None,
    quarantine: str,
    scanned: Callable[[int, int], None],
    follow_links: bool = True,
) -> tuple[Dataset, Samples, str]:
    """The dataset, the images to measure on, and a description of them.

    Images that any of the weights were trained on are excluded. The classes are in the order of the first weights."""
    cards = [record.card for record in weights]
    card = cards[0]
    trained_by: dict[Any, dict[str, Any]] = {card.data.get("fingerprint"): card.data for card in reversed(cards)}

    def rule(fingerprint: str, _: object) -> SplitRule | None:
        facts = trained_by.get(fingerprint)
        return None if facts is None else SplitRule.of({"group_similar": False} | facts)  # missing in old weights

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
        descriptions = {"train": "train split, on which these weights were trained"}
        if "test" not in dataset.splits:
            descriptions["val"] = "validation split: these weights were trained on the rest of this folder"
    else:
        name = split or next(known for known in ("test", "val", "all", "train") if known in dataset.splits)
        descriptions = {"all": "folder"}
    if name not in dataset.splits:
        splits = list(dataset.splits)
        raise UserError(f"{data} has no split '{name}'{did_you_mean(name, splits) or '.'} It has: {', '.join(splits)}.")
    samples, sentence = dataset.splits[name], descriptions.get(name, f"{name} split")
    multilabel = card.task == "multilabel"
    if name == "real" and not multilabel:
        sentence += ", where any label of an image's set is correct"
    elif (samples.sets is not None) != multilabel:
        if multilabel:
            raise UserError(f"these weights are multilabel, but the images of {data} have one label each")
        raise UserError(f"these weights give one label per image, but the images of {data} are multilabel")

    if name == "train":  # --split train measures on training images
        return dataset, samples, sentence
    return dataset, *_without_trained(data, dataset, samples, sentence, weights)


def _without_trained(
    data: str, dataset: Dataset, samples: Samples, sentence: str, weights: Sequence[TrainingRecord]
) -> tuple[Samples, str]:
    """The images without those that any of the weights were trained on, and the description with their number.

    Old weights record a part of their training images only (a sketch). Images that it says nothing about are doubtful:
    they are excluded too, unless few of the others are training images (`MAX_STRAY_FRACTION`)."""
    seen, doubtful, chance = np.zeros(len(samples), bool), np.zeros(len(samples), bool), 0.0
    for card, digests in weights:
        seen |= match_digests(samples, digests)
        for earlier, (sketch, size) in enumerate(_sketches(card)):
            matched, beyond = match_sketch(samples, sketch, size)
            seen |= matched
            if matched.any() and (earlier or dataset.fingerprint != card.data.get("fingerprint")):
                doubtful |= beyond
                chance = max(chance, float(matched.sum() / (~beyond).sum()))
    if not all(len(record.digests) or record.card.data.get("trained_on") for record in weights):
        sentence += (
            "; these weights have no record of their training images, so some of these images may be among those"
        )
    if not seen.any():
        return samples, sentence
    doubtful &= ~seen
    keep_doubtful = chance < MAX_STRAY_FRACTION  # a few stray copies, not the training set
    kept = ~seen if keep_doubtful else ~(seen | doubtful)
    if not kept.any():
        raise UserError(f"these weights were trained on every image of {data}: no image is left to measure on")
    excluded = f"{int(seen.sum()):,} images that these weights were trained on are excluded"
    more = int(doubtful.sum())
    if more and not keep_doubtful:
        excluded += f", and {more:,} more that may be training images"
    elif round(chance * more):
        excluded += f", and about {chance * more:.0f} of the other images may be training images too"
    return samples.subset(np.flatnonzero(kept)), f"{sentence}; {excluded}"


def _sketches(card: Card) -> list[tuple[list[str], int]]:
    """The sketches in a card (the training images, then those of its starting weights) with their largest size."""
    before = [(sketch, EARLIER_SKETCH_SIZE) for sketch in card.data.get("trained_before", [])]
    return [(card.data.get("trained_on", []), SKETCH_SIZE), *before]


def earlier_training(weights: Sequence[TrainingRecord]) -> tuple[np.ndarray, list[list[str]]]:
    """The record that a run keeps of the training images of its starting weights and teacher: all digests, and the
    beginning of the sketches that are incomplete."""
    sketches = [sketch for record in weights for sketch in _sketches(record.card)]
    incomplete = {tuple(sketch[:EARLIER_SKETCH_SIZE]): None for sketch, size in sketches if len(sketch) >= size}
    digests = [*(record.digests for record in weights), *(_numbers(sketch) for sketch, _ in sketches), _numbers([])]
    return np.unique(np.concatenate(digests)), list(map(list, incomplete))


def count_seen(samples: Samples, weights: TrainingRecord) -> int:
    """The number of images that weights, or their starting weights, are known to have been trained on."""
    sketches = [_numbers(sketch) for sketch, _ in _sketches(weights.card)]
    return count_seen_digests(samples, np.concatenate([weights.digests, *sketches]))


def count_seen_digests(samples: Samples, digests: np.ndarray) -> int:
    """The number of images whose digests are in `digests`."""
    return int(match_digests(samples, digests).sum())


def earlier_digests(facts: Mapping[str, Any]) -> np.ndarray:
    """The digests of earlier training images in the facts of a checkpoint; old checkpoints have lists only."""
    return np.concatenate([facts.get("digests_before", _numbers([])), *map(_numbers, facts["trained_before"])])


def _numbers(digests: Sequence[str]) -> np.ndarray:
    return np.array([int(digest, 16) for digest in digests], np.uint64)


def check_class_names(weights: str | Path, card: Card) -> None:
    """Raise UserError if weights have no class names, which are matched with folder names."""
    advice = f"train one on your data with `vitrail train DATA --from {weights}`"
    count = card.model.num_classes
    if not count:
        raise UserError(f"{weights} has no classifier: {advice}")
    if not card.classes:
        raise UserError(f"{weights} has {count:,} classes without names, so no folder matches them: {advice}")
