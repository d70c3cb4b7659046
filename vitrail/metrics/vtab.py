"""VTAB-1k (Zhai et al. 2019): the table of its 19 tasks, and the mean score.

Each task trains on 800 images and validates on 200. The best setting is then trained on all 1,000 and measured on the
whole test split. Splits and class definitions follow google-research/task_adaptation. Which tasks allow flips and crops
follows the appendix of BiT (Kolesnikov et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Group = Literal["natural", "specialized", "structured"]
TRAIN, VAL = 800, 200


@dataclass(frozen=True)
class VtabTask:
    """One task of VTAB-1k."""

    key: str  # folder name
    name: str
    group: Group
    classes: int
    test: int  # number of test images
    rule: str  # what a class is
    split: str  # where the training, validation and test images come from
    missing: str = ""  # why the published files cannot be read; empty if they can
    flip: bool = True  # whether training may flip images
    crop: bool = True  # whether training may crop images
    parts: tuple[float, float, float] | None = None  # fractions of train, val and test if the data has no split
    learned: float = 0.9  # fraction of the training images to train on if the data has no validation split
    per_class: int = 0  # training and validation images of each class if the data has no split


_BOTH = "train and validation as published"
_NINE = "90 % and 10 % of the published training images"
_FOLDERS = (0.6, 0.2, 0.2)
_SPRITES = "dSprites is published as one .npz file, which vitrail cannot read"
_NORB = "Small NORB is published in a special .mat format, which vitrail cannot read"

VTAB_TASKS: tuple[VtabTask, ...] = (
    VtabTask(
        "caltech101",
        "Caltech101",
        "natural",
        102,
        6084,
        "the object, or background",
        f"30 images of each class train: {_NINE}; the others test",
        per_class=30,
    ),
    VtabTask("cifar", "CIFAR-100", "natural", 100, 10_000, "the object", _NINE),
    VtabTask("dtd", "DTD", "natural", 47, 1880, "the texture", f"{_BOTH}, of the first of ten folds"),
    VtabTask("oxford_flowers102", "Flowers102", "natural", 102, 6149, "the flower", _BOTH),
    VtabTask(
        "oxford_iiit_pet",
        "Pets",
        "natural",
        37,
        3669,
        "the breed",
        "80 % and 20 % of the published training images",
        learned=0.8,
    ),
    VtabTask(
        "sun397",
        "Sun397",
        "natural",
        397,
        21_750,
        "the scene",
        "train, validation and test as in TensorFlow Datasets",
        missing="the split lists of TensorFlow Datasets are not part of SUN397",
    ),
    VtabTask(
        "svhn",
        "SVHN",
        "natural",
        10,
        26_032,
        "the digit in the centre",
        _NINE,
        missing="its images are in train_32x32.mat, which vitrail cannot read",
    ),
    VtabTask(
        "patch_camelyon",
        "Camelyon",
        "specialized",
        2,
        32_768,
        "tumour tissue in the centre, or none",
        _BOTH,
        missing="PatchCamelyon is published as HDF5, which vitrail cannot read",
    ),
    VtabTask(
        "eurosat", "EuroSAT", "specialized", 10, 5400, "the land use", "60 %, 20 % and 20 % of all", parts=_FOLDERS
    ),
    VtabTask(
        "resisc45",
        "Resisc45",
        "specialized",
        45,
        6300,
        "the aerial scene",
        "60 %, 20 % and 20 % of all",
        parts=_FOLDERS,
    ),
    VtabTask(
        "diabetic_retinopathy",
        "Retinopathy",
        "specialized",
        5,
        42_670,
        "the degree of disease",
        _BOTH,
        missing="the Kaggle images must first be cropped and resized as in btgraham-300",
    ),
    VtabTask(
        "clevr_count",
        "Clevr-Count",
        "structured",
        8,
        15_000,
        "the number of objects, minus 3",
        f"{_NINE}; the validation images test",
        crop=False,
    ),
    VtabTask(
        "clevr_dist",
        "Clevr-Dist",
        "structured",
        6,
        15_000,
        "the depth of the closest object: up to 8, 8.5, 9, 9.5, 10, beyond",
        f"{_NINE}; the validation images test",
        crop=False,
    ),
    VtabTask(
        "dmlab",
        "DMLab",
        "structured",
        6,
        22_735,
        "the distance of an object (close, far, very far) and whether it gives a reward",
        _BOTH,
        missing="DMLab is published as TFRecord files, which vitrail cannot read",
        crop=False,
    ),
    VtabTask(
        "kitti",
        "KITTI-Dist",
        "structured",
        4,
        711,
        "the distance of the closest vehicle: up to 8 m, 20 m, beyond, or none",
        "train, validation and test as in TensorFlow Datasets",
        missing="the drive lists by which TensorFlow Datasets splits KITTI are not part of it",
        crop=False,
    ),
    VtabTask(
        "dsprites_loc",
        "dSpr-Loc",
        "structured",
        16,
        73_728,
        "the position from left to right, 32 values in 16 bins",
        "80 %, 10 % and 10 % of all",
        missing=_SPRITES,
        flip=False,
        crop=False,
    ),
    VtabTask(
        "dsprites_ori",
        "dSpr-Ori",
        "structured",
        16,
        73_728,
        "the orientation, 40 values in 16 bins",
        "80 %, 10 % and 10 % of all",
        missing=_SPRITES,
        flip=False,
    ),
    VtabTask(
        "smallnorb_azi",
        "sNORB-Azim",
        "structured",
        18,
        12_150,
        "the azimuth of the camera",
        "published training images; the halves of the test images validate and test",
        missing=_NORB,
        flip=False,
    ),
    VtabTask(
        "smallnorb_ele",
        "sNORB-Elev",
        "structured",
        9,
        12_150,
        "the elevation of the camera",
        "published training images; the halves of the test images validate and test",
        missing=_NORB,
    ),
)
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True)
class VtabSummary:
    """Mean accuracies over the tasks that were run."""

    groups: dict[Group, float | None]  # None: no task of the group was run
    mean: float  # over tasks, not groups, as in the paper
    tasks: int

    @property
    def complete(self) -> bool:
        """Whether all tasks of VTAB were run."""
        return self.tasks == len(VTAB_TASKS)


def summarize_vtab(accuracies: Mapping[str, float]) -> VtabSummary:
    """Average the accuracies of tasks, given by key."""
    groups: dict[Group, float | None] = {}
    for group in GROUPS:
        values = [accuracies[task.key] for task in VTAB_TASKS if task.group == group and task.key in accuracies]
        groups[group] = sum(values) / len(values) if values else None
    return VtabSummary(groups, sum(accuracies.values()) / len(accuracies), len(accuracies))
