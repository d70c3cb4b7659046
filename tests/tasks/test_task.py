"""What every task has in common: numbers on the validation images, its place in the table, and a result to render."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.report.test_page import Reader
from vitrail.config import MaskedConfig, ModelConfig, ObjectiveConfig, Preprocess
from vitrail.config.postprocess import Postprocess
from vitrail.distributed import SINGLE_PROCESS
from vitrail.errors import UserError
from vitrail.metrics.calibration import bin_confidence
from vitrail.metrics.multilabel import mean_average_precision
from vitrail.metrics.scores import Scores
from vitrail.models.build import build_model
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.report.model_card import model_card
from vitrail.report.page import ReportFacts, render_report
from vitrail.tasks.classification import Classification
from vitrail.tasks.distillation import Distillation
from vitrail.tasks.masked_patch import MaskedPatch
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.result import Column, Level, Result
from vitrail.tasks.table import TASKS, prediction_task
from vitrail.tasks.task import Batch, PredictionTask, Task, TrainingTask

SIGMOID = ObjectiveConfig(loss="sigmoid", label_smoothing=0.2)


def members(protocol: type) -> set[str]:
    own = {name for name in vars(protocol) if not name.startswith("_")} | set(protocol.__annotations__)
    return own.union(*(members(base) for base in protocol.__bases__ if base in (Task, TrainingTask)))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_in_the_table_has_all_members(name):
    task = TASKS[name]
    assert task.name == name and callable(task.from_run)
    wanted = members(PredictionTask if hasattr(task, "predictions") else Task)
    assert {"targets", "loss", "validation", "graph_safe"} <= wanted
    assert [one for one in wanted if not hasattr(task, one)] == []


def test_weights_for_an_unknown_task_are_refused():
    for name in ("segmentation", "masked_patch"):
        with pytest.raises(UserError, match=f"'{name}'"):
            prediction_task(name, 3)


def a_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))


def measured(task, model, batches):
    validation = task.validation()
    with torch.no_grad():
        for batch in batches:
            validation.update(model, batch)
    return validation.compute(SINGLE_PROCESS)


def test_classification_validation_ignores_unreadable_images():
    task, model = Classification(ObjectiveConfig(label_smoothing=0.1), 4), a_network()
    labels, weights = torch.arange(10) % 4, torch.ones(10)
    weights[[2, 7]] = 0
    batch = Batch(torch.randn(10, 3, 2, 2), task.targets(labels), weights)
    broken = Batch(torch.full((1, 3, 2, 2), torch.nan), task.targets(labels[:1]), torch.zeros(1))
    row = measured(task, model, [batch.micro_batch(0, 4), broken, batch.micro_batch(4, 10)])
    read = weights > 0
    logits = model(batch.pixels)[read]
    assert row["val_top1"] == pytest.approx((logits.argmax(-1) == labels[read]).double().mean().item())
    assert row["val_loss"] == pytest.approx(
        task.per_image(logits, batch.targets[read]).double().mean().item(), rel=1e-6
    )
    with pytest.raises(UserError, match="can be read any more"):
        measured(task, model, [broken])


def test_multilabel_validation_is_mean_average_precision():
    task, model = Multilabel(SIGMOID, 4), a_network()
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (12, 4), dtype=np.uint8))
    batch = Batch(torch.randn(12, 3, 2, 2), task.targets(labels), torch.tensor([1.0] * 11 + [0.0]))
    row = measured(task, model, [batch.micro_batch(0, 5), batch.micro_batch(5, 12)])
    logits = model(batch.pixels).detach().numpy()[:11]
    assert list(row) == ["val_loss", "val_map"]
    assert row["val_map"] == mean_average_precision(logits, labels.numpy()[:11])  # smoothing changes no label


@pytest.mark.parametrize("target", ["color", "pixels"])
def test_corrupted_patches_are_the_same_each_time(target):
    torch.manual_seed(0)
    model = ModelConfig(
        width=32, depth=1, mlp_dim=32, heads=2, patch=(8, 8), image_size=(32, 32), num_classes=0, class_token=True
    )
    net = MaskedPatchNetwork(build_model(model), target).eval()
    task = MaskedPatch(MaskedConfig(target=target), Preprocess(size=(32, 32)), (8, 8), seed=3)
    keys = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    batch = Batch(torch.randn(4, 3, 32, 32), task.targets(torch.zeros(4)), torch.tensor([1.0, 0.0, 1.0, 1.0]), *keys)
    row = measured(task, net, [batch.micro_batch(0, 3), batch.micro_batch(3, 4)])
    assert row == measured(task, net, [batch.micro_batch(0, 3), batch.micro_batch(3, 4)])
    assert list(row) == ["val_loss", *(["val_accuracy"] if target == "color" else [])]
    loss = task.loss(net, batch)
    assert row["val_loss"] == pytest.approx(loss.total.item() / 3, rel=1e-5)


@pytest.mark.parametrize("labels", [Classification(ObjectiveConfig(), 4), Multilabel(SIGMOID, 4)], ids=lambda t: t.name)
def test_distillation_validates_like_its_task(labels):
    task, model = Distillation(labels, a_network(), 0.5, "soft", 1.0, "softmax"), a_network()
    marks = (
        torch.eye(4, dtype=torch.uint8)[torch.arange(8) % 4] if isinstance(labels, Multilabel) else torch.arange(8) % 4
    )
    batch = Batch(torch.randn(8, 3, 2, 2), task.targets(marks), torch.ones(8))
    assert torch.equal(batch.targets, labels.targets(marks))
    assert measured(task, model, [batch]) == measured(labels, model, [batch])
    assert task.graph_safe


def test_predictions_apply_thresholds():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    single, many = (prediction_task(name, 3) for name in ("classification", "multilabel"))
    ((ranked, given),) = single.predictions(p, 2, None, Postprocess())
    assert [label for label, _ in ranked] == [0, 1] and [label for label, _ in given] == [0]
    ((_, given),) = single.predictions(p, 2, None, Postprocess(threshold=0.6))
    assert given == []
    ((ranked, given),) = many.predictions(p, 1, None, Postprocess(thresholds=(0.6, 0.1, 0.1)))
    assert [label for label, _ in ranked] == [0] and [label for label, _ in given] == [1, 2]
    ((_, given),) = many.predictions(p, 1, 0.25, Postprocess(thresholds=(0.6, 0.1, 0.1)))
    assert [label for label, _ in given] == [0, 1]
    ((_, given),) = many.predictions(p, 1, None, Postprocess())
    assert [label for label, _ in given] == [0]


class Area(Scores):
    """As a task of another kind would have them."""

    headline, interval = 0.7, (0.6, 0.8)


class AreaOfClass:
    name, count, iou = "sky", 12, 0.7


def test_a_report_shows_the_result_of_a_new_kind_of_task():
    right = np.arange(10) < 7
    scores = Area(n=10, per_class=[AreaOfClass()], reliability=bin_confidence(np.full(10, 0.7), right))
    result = Result(
        scores,
        summary="mIoU 70 %",
        cells=[("mIoU", "70 %")],
        metric="mean intersection over union",
        levels=[Level("this model", 0.7, (0.6, 0.8))],
        verdict=["It outlines most of it."],
        stats=[("12", "regions")],
        purpose="It outlines one kind of region.",
        calibration="Its probabilities are right.",
        tuning=[],
        columns=[Column("overlap", "iou")],
        column_notes="Overlap: of outlines.",
    )
    facts = ReportFacts("title", "subtitle", result, "Measured on 10 images.", history=[{"step": 3, "val_iou": 0.5}])
    page, card = " ".join(Reader(render_report(facts)).words), model_card(facts)
    for text in (page, card):
        assert "mean intersection over union" in text and "It outlines most of it." in text
        assert "overlap" in text and "70.0\u202f%" in text and "recall" not in text.lower()
    assert (
        "Validation iou" in render_report(facts)
        and "Confusion matrix" not in page
        and "Selective prediction" not in page
    )
