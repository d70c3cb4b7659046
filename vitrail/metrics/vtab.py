"""VTAB-1k (Zhai et al. 2019): its 19 tasks in one table, and how their scores become one.

Of each task 800 images train and 200 validate; what is chosen on the 200 is then trained on all 1,000 and measured on
the whole test split. Splits and rules for classes are those of google-research/task_adaptation; which changes of images
would change a label, and so are left out in training, is from the appendix of BiT (Kolesnikov et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Group = Literal["natural", "specialized", "structured"]
TRAIN, VAL = 800, 200


@dataclass(frozen=True)
class VtabTask:
    key: str  # the folder it lies in
    name: str
    group: Group
    classes: int
    test: int  # images
    rule: str  # what a class is
    split: str  # where the 800, the 200 and the test images come from
    missing: str = ""  # why the layout it is published in cannot be read; empty: it can
    flip: bool = True  # may be mirrored in training
    crop: bool = True  # may be cut in training
    parts: tuple[float, float, float] | None = None  # shares of train, val and test where the data has no split
    learned: float = 0.9  # share of the training images that trains, where the data has no validation split
    per_class: int = 0  # images of each class that train and validate where the data has no split


_BOTH = "train and validation as published"
_NINE = "90 % and 10 % of the published training images"
_FOLDERS = (0.6, 0.2, 0.2)
_SPRITES = "dSprites is one .npz of bitmaps, which is not read"
_NORB = "Small NORB is .mat files in a format of its own, which is not read"

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
        "train, validation and test as drawn by TensorFlow Datasets",
        missing="the lists by which TensorFlow Datasets draws its splits are not part of SUN397",
    ),
    VtabTask(
        "svhn",
        "SVHN",
        "natural",
        10,
        26_032,
        "the digit in the middle",
        _NINE,
        missing="its pixels lie in train_32x32.mat, which is not read",
    ),
    VtabTask(
        "patch_camelyon",
        "Camelyon",
        "specialized",
        2,
        32_768,
        "tumour tissue in the middle, or none",
        _BOTH,
        missing="PatchCamelyon is HDF5, which needs a library of its own",
    ),
    VtabTask(
        "eurosat", "EuroSAT", "specialized", 10, 5400, "the use of land", "60 %, 20 % and 20 % of all", parts=_FOLDERS
    ),
    VtabTask(
        "resisc45",
        "Resisc45",
        "specialized",
        45,
        6300,
        "the scene from above",
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
        missing="the images of Kaggle have yet to be cut and scaled as btgraham-300 does",
    ),
    VtabTask(
        "clevr_count",
        "Clevr-Count",
        "structured",
        8,
        15_000,
        "how many objects, less 3",
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
        "how far an object is (close, far, very far), and whether it is one to take",
        _BOTH,
        missing="DMLab is published as TFRecord files, which are not read",
        crop=False,
    ),
    VtabTask(
        "kitti",
        "KITTI-Dist",
        "structured",
        4,
        711,
        "the distance of the closest vehicle: up to 8 m, 20 m, beyond, or none",
        "train, validation and test as drawn by TensorFlow Datasets",
        missing="the drives by which TensorFlow Datasets draws its splits are not part of KITTI",
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
    """Means over the tasks that were run."""

    groups: dict[Group, float | None]  # none: no task of it
    mean: float  # over tasks, as the paper averages
    tasks: int

    @property
    def complete(self) -> bool:
        """Whether the mean is a score of VTAB, and not of some of its tasks."""
        return self.tasks == len(VTAB_TASKS)


def summarize_vtab(accuracies: Mapping[str, float]) -> VtabSummary:
    """From the accuracy of each task, by its key."""
    groups: dict[Group, float | None] = {}
    for group in GROUPS:
        own = [accuracies[task.key] for task in VTAB_TASKS if task.group == group and task.key in accuracies]
        groups[group] = sum(own) / len(own) if own else None
    return VtabSummary(groups, sum(accuracies.values()) / len(accuracies), len(accuracies))
