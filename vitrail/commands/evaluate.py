"""`vitrail evaluate`: score weights on labelled images, with a report."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rich.console import Console

from vitrail.config import DataConfig, Size
from vitrail.data.dataset import Dataset, Samples
from vitrail.distributed import process_group
from vitrail.errors import UserError, user_path
from vitrail.inference.classifier import Classifier, as_classifier
from vitrail.inference.device import device_of
from vitrail.interrupt import Interrupts
from vitrail.metrics.scores import Scores
from vitrail.models.flops import count_macs, count_parameters
from vitrail.models.variants import parse_image_size
from vitrail.report.model_card import write_model_card
from vitrail.report.page import ReportFacts, write_report
from vitrail.report.provenance import provenance
from vitrail.terminal import escape, make_console
from vitrail.weights.bundle import Card
from vitrail.weights.names import local_path
from vitrail.workflows.measure import Measurement, compute_logits, score_outputs, show_scores, write_predictions
from vitrail.workflows.show import data_name, scan_progress, show_data
from vitrail.workflows.train_test_overlap import TrainingRecord, check_class_names, unseen_images
from vitrail.workflows.tune import fitted_note, show_tuning, with_tuning, writable_weights_file, write_postprocess
from vitrail.workflows.vitrail_files import (
    MODEL_CARD,
    OLD_PREDICTIONS,
    PREDICTIONS,
    refuse_foreign_files,
    remove_old_predictions,
)

MAX_NAME = 100  # characters of the data set name in the file name of a report


def evaluate(
    weights: str | Path | Classifier,
    data: str | Path,
    *,
    split: str | None = None,
    image_size: int | Size | None = None,
    report: str | Path | None = None,
    quarantine: str | Path | None = None,
    target_accuracy: float | None = None,
    write: bool = False,
    follow_links: bool = True,
    device: str = "auto",
    console: Console | None = None,
) -> Scores:
    """Score weights on labelled images. Prints the scores and writes a report, a table of predictions and a model card.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    data
        Anything `train` takes. Images that the weights were trained on are excluded.
    split
        "train", "val", "test", "all" or "real". If None, the test split if there is one, else the validation split. A
        folder without splits is used completely, or without its training images if the weights were trained on it.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    report
        The HTML file to write; by default next to the weights, named after the data.
    quarantine
        A list of images to exclude, as written by `vitrail check`.
    target_accuracy
        Find the probability above which at least this fraction of predictions is correct, such as 0.95.
    write
        Write the fitted temperature, that threshold, or the thresholds of multilabel weights into the weights file.
        Requires the path of the weights.
    follow_links
        Whether to follow symbolic links in folders.
    device
        "cpu", "cuda", "mps", or "auto" for the best available device.
    console
        Where to print; by default the terminal.

    Returns
    -------
    Scores
        The numbers of the report: `headline` with its 95 % `interval`, `n`, `per_class`, and the usual metrics of the
        task, such as `top1` and `confusion`. `to_dict()` returns plain values for JSON.

    Examples
    --------
    >>> scores = vitrail.evaluate("runs/photos", "more_photos/")
    >>> print(f"{scores.headline:.1%} of {scores.n} images")
    """
    if write and isinstance(weights, Classifier):
        raise UserError("write=True changes a weights file: pass its path instead of a Classifier")
    with process_group() as ranks, Interrupts() as interrupts, interrupts.interruptible(ranks):
        console = console if console is not None and ranks.is_first else make_console()
        console.quiet = console.quiet or not ranks.is_first
        classifier = as_classifier(weights, image_size, device)
        card, spec = classifier.card, classifier.spec
        path = user_path(report) if report is not None else _default_report_path(spec, str(data), split)
        command = _command(spec, data, split, image_size, quarantine, target_accuracy, follow_links)
        _check_options(spec, classifier, path, target_accuracy, write, split)

        def open_images() -> tuple[Dataset, Samples, str]:
            with scan_progress(console, interrupts) as scanned:
                trained = [TrainingRecord.of(classifier)]
                return unseen_images(str(data), trained, split, str(quarantine or ""), scanned, follow_links)

        dataset, samples, split_used = ranks.broadcast(open_images)
        show_data(console, dataset)
        outputs = compute_logits(
            classifier.net,
            samples,
            card.preprocess,
            DataConfig(),
            device_of(classifier.net),
            interrupts,
            ranks,
            card.postprocess.temperature,
        )

        def score_and_report() -> Scores:
            measurement = score_outputs(
                classifier.net,
                outputs,
                split_used + fitted_note(card, samples),
                samples,
                card.preprocess,
                DataConfig(),
                task=classifier.task,
                postprocess=card.postprocess,
            )
            measurement = with_tuning(measurement, samples, card.postprocess, target_accuracy)
            show_scores(console, measurement)
            show_tuning(console, measurement)
            predictions, model_card = _predictions_path(path), _model_card_path(path)
            facts = _facts(spec, dataset, card, measurement, command, predictions.name)
            write_predictions(predictions, measurement, samples, card.postprocess)
            remove_old_predictions(path.with_name(f"{path.stem}-{OLD_PREDICTIONS}"))
            write_model_card(model_card, facts)
            write_report(path, facts)
            console.print(f"report: [bold]{escape(str(path))}[/]")
            console.print(f"in the same folder: {escape(predictions.name)}, {escape(model_card.name)}")
            if write:
                console.print(escape(write_postprocess(spec, card, measurement, samples)))
            return measurement.scores

        return ranks.broadcast(score_and_report)


def _check_options(
    weights: str | Path, classifier: Classifier, report: Path, target: float | None, write: bool, split: str | None
) -> None:
    """Raise errors for invalid options before any work is done."""
    check_class_names(weights, classifier.card)
    siblings = {_predictions_path(report): PREDICTIONS, _model_card_path(report): MODEL_CARD}
    refuse_foreign_files([(report, "report.html"), *siblings.items()], "choose another --report")
    if report.is_dir() or not report.absolute().parent.is_dir():
        raise UserError(f"cannot write the report to {report}: set --report to a file in an existing folder")
    if target is not None and not 0 < target < 1:
        raise UserError(f"--target-accuracy must be a fraction between 0 and 1, such as 0.95, not {target:g}")
    if target is not None and not classifier.task.abstains:
        raise UserError("--target-accuracy has no effect on multilabel weights: it needs one label per image")
    if write:
        writable_weights_file(weights)
        if split == "train":
            raise UserError("--write would fit to the training images of these weights: use another --split than train")


def _predictions_path(report: Path) -> Path:
    return report.with_name(f"{report.stem}-predictions.csv")


def _model_card_path(report: Path) -> Path:
    return report.with_name(f"{report.stem}-card.md")


def _default_report_path(weights: str | Path, data: str, split: str | None) -> Path:
    path = local_path(weights) or Path()  # the current folder, for bundled and downloaded weights
    folder = path if path.is_dir() else path.parent
    folder = folder if folder.is_dir() else Path()
    suffix = "" if split is None else "-" + re.sub(r"\W+", "-", split)  # a report per split
    return folder / f"evaluation-{data_name(os.path.normpath(user_path(data)))[:MAX_NAME]}{suffix}.html"


def _command(
    weights: str | Path,
    data: str | Path,
    split: str | None,
    image_size: int | Size | None,
    quarantine: str | Path | None,
    target_accuracy: float | None,
    follow_links: bool,
) -> list[str]:
    """Return the command that repeats the evaluation."""
    options = {
        "--split": split,
        "--image-size": "x".join(map(str, parse_image_size(image_size))) if image_size else None,
        "--quarantine": quarantine,
        "--target-accuracy": target_accuracy,
    }
    arguments = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    return ["vitrail", "evaluate", str(weights), str(data), *arguments, *([] if follow_links else ["--no-follow"])]


def _facts(
    weights: str | Path, dataset: Dataset, card: Card, measurement: Measurement, command: list[str], predictions: str
) -> ReportFacts:
    return measurement.facts(
        title=f"{Path(weights).name} on {data_name(dataset.root)}",
        subtitle=f"{len(dataset.classes)} classes, {measurement.scores.n:,} images",
        history=card.curves,
        predictions_file=predictions,
        data=[(name, f"{len(samples):,} images") for name, samples in dataset.splits.items()],
        excluded=dataset.excluded,
        notes=dataset.notes,
        cost=[
            ("parameters", f"{count_parameters(card.model):,}"),
            ("compute", f"{count_macs(card.model) / 1e9:.2f} GMAC per image"),
        ],
        commands=[
            command,
            ["vitrail", "predict", str(weights), "photo.jpg"],
        ],
        card=provenance(card),
    )
