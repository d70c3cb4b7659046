"""The 1,000 images of a task of VTAB-1k that are trained and validated on, and its test images."""

from __future__ import annotations

import numpy as np

from vitrail.data.dataset import Dataset, Samples
from vitrail.data.splits import group_ids
from vitrail.errors import UserError
from vitrail.metrics.vtab import TRAIN, VAL, VtabTask

CANDIDATES = 3  # times the images to validate on, to choose those from that stand apart from training images


def thousand(dataset: Dataset, task: VtabTask) -> tuple[Samples, Samples, Samples]:
    """The 800, the 200 and the test images. Where they are not published, they are drawn by the content of the images:
    the same ones whatever their names and order."""
    splits = dataset.splits
    if dataset.multilabel:
        raise UserError(f"the images of '{dataset.root}' have any number of labels, and those of {task.name} have one")
    if "all" in splits:
        images = splits["all"]
        learned, watched, rest = _parted(images, task, dataset)
        test = images.subset(rest)
    elif "train" in splits and "test" in splits:
        images, test = splits["train"], splits["test"]
        learned = _order(images)
        last = len(learned) if "val" in splits else int(len(learned) * task.learned)
        learned, watched = learned[:last], learned[last:]
    else:
        raise UserError(f"'{dataset.root}' has the splits {', '.join(splits)}: {task.name} needs train and test")
    given = splits["val"] if "all" not in splits and "val" in splits else None
    to_validate = len(watched) if given is None else len(given)
    if len(learned) < TRAIN or to_validate < VAL:
        raise UserError(
            f"'{dataset.root}' has {len(learned):,} images to train and {to_validate:,} to validate on, and VTAB-1k "
            f"takes {TRAIN} and {VAL}"
        )
    learned = learned[:TRAIN]
    val = images.subset(_apart(images, learned, watched)) if given is None else given.subset(_order(given)[:VAL])
    return images.subset(learned), val, test


def _apart(images: Samples, learned: np.ndarray, watched: np.ndarray) -> np.ndarray:
    """The first rows to validate on that belong together with none that is trained on; others only for want of such."""
    candidates = watched[: CANDIDATES * VAL]
    groups = group_ids(images, np.concatenate([learned, candidates]))
    with_learned = np.isin(groups[len(learned) :], groups[: len(learned)])
    return candidates[np.argsort(with_learned, kind="stable")][:VAL]


def _parted(images: Samples, task: VtabTask, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to train, to validate and to test on."""
    order = _order(images)
    if task.per_class:
        own = [order[images.labels[order] == label][: task.per_class] for label in range(len(images.classes))]
        learned = np.concatenate(own)
        learned = learned[_order(images.subset(learned))]
        last = int(len(learned) * task.learned)
        return learned[:last], learned[last:], np.setdiff1d(order, learned)
    if task.parts is None:
        raise UserError(f"'{dataset.root}' comes without a split, and {task.name} has one: {task.split}")
    first, second = (int(len(order) * share) for share in (task.parts[0], task.parts[0] + task.parts[1]))
    return order[:first], order[first:second], order[second:]


def _order(samples: Samples) -> np.ndarray:
    return np.argsort(samples.original_digests, kind="stable")
