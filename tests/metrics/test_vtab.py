"""The VTAB-1k table against published numbers, and the mean score."""

from collections import Counter

import pytest

from vitrail.metrics.vtab import VTAB_TASKS, summarize_vtab

# Number of test images, from the tests of google-research/task_adaptation or the papers of the datasets.
TEST_IMAGES = {
    "caltech101": 6084,
    "cifar": 10_000,
    "dtd": 1880,
    "oxford_flowers102": 6149,
    "oxford_iiit_pet": 3669,
    "sun397": 21_750,
    "svhn": 26_032,
    "patch_camelyon": 32_768,
    "eurosat": 27_000 // 5,
    "resisc45": 31_500 // 5,
    "diabetic_retinopathy": 42_670,
    "clevr_count": 15_000,
    "clevr_dist": 15_000,
    "dmlab": 22_735,
    "kitti": 711,
    "dsprites_loc": 737_280 // 10,
    "dsprites_ori": 737_280 // 10,
    "smallnorb_azi": 24_300 // 2,
    "smallnorb_ele": 24_300 // 2,
}


def test_nineteen_tasks_in_three_groups():
    assert Counter(task.group for task in VTAB_TASKS) == {"natural": 7, "specialized": 4, "structured": 8}
    assert {task.key: task.test for task in VTAB_TASKS} == TEST_IMAGES
    classes = [102, 100, 47, 102, 37, 397, 10, 2, 10, 45, 5, 8, 6, 6, 4, 16, 16, 18, 9]
    assert [task.classes for task in VTAB_TASKS] == classes


def test_split_fractions_of_data_without_a_published_split():
    assert {task.key: task.learned for task in VTAB_TASKS if task.learned != 0.9} == {"oxford_iiit_pet": 0.8}
    parts = {task.key: task.parts for task in VTAB_TASKS if task.parts}
    assert parts == {"eurosat": (0.6, 0.2, 0.2), "resisc45": (0.6, 0.2, 0.2)}
    assert {task.key: task.per_class for task in VTAB_TASKS if task.per_class} == {"caltech101": 30}


def test_flips_and_crops_that_would_change_a_label_are_off():
    assert {task.name for task in VTAB_TASKS if not task.flip} == {"dSpr-Ori", "sNORB-Azim", "dSpr-Loc"}
    assert {task.name for task in VTAB_TASKS if not task.crop} == {
        "Clevr-Count",
        "Clevr-Dist",
        "DMLab",
        "KITTI-Dist",
        "dSpr-Loc",
    }


def test_the_score_is_the_mean_over_tasks_not_groups():
    whole = summarize_vtab({task.key: 0.9 if task.group == "specialized" else 0.5 for task in VTAB_TASKS})
    assert whole.complete and whole.mean == pytest.approx((4 * 0.9 + 15 * 0.5) / 19)
    assert whole.groups == {"natural": 0.5, "specialized": pytest.approx(0.9), "structured": 0.5}
    part = summarize_vtab({"dtd": 0.4, "kitti": 0.2})
    assert not part.complete and part.tasks == 2
    assert part.groups == {"natural": 0.4, "specialized": None, "structured": 0.2}
