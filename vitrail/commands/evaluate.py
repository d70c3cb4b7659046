"""`vitrail evaluate`: a weights file measured on images, with a report."""

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
from vitrail.workflows.vitrail_files import MODEL_CARD, PREDICTIONS, refuse_foreign_files

LONGEST_NAME = 100  # of data in the name of a report: file systems have a limit, and others add to the name


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
    """Measure weights on labelled images: print the scores, write a report, and beside it a table of the predictions
    and a model card.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    data
        Anything `train` takes. Images that the weights were trained on are left out.
    split
        "train", "val", "test", "all" or "real". If None, the test images where there are some, else the validation
        images; a plain folder of classes is used whole, unless the weights were trained on it: then the part that
        training never saw.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    report
        The HTML file to write; by default one beside the weights, named after the data.
    quarantine
        A list of images to leave out, as `vitrail check` writes it.
    target_accuracy
        Find the probability above which at least this fraction of predictions is correct, such as 0.95.
    write
        Write the fitted temperature, that threshold, or the thresholds of several labels into the weights file. It
        needs the path of the weights.
    follow_links
        Whether links in folders are followed.
    device
        "cpu", "cuda", "mps", or "auto" for the best there is.
    console
        Where to print; by default the terminal.

    Returns
    -------
    Scores
        The numbers of the report: `headline` and its 95 % `interval`, `n`, `per_class`, and what is usual for the kind
        of labels, such as `top1` and `confusion`. `to_dict()` gives plain values for JSON.

    Examples
    --------
    >>> scores = vitrail.evaluate("runs/photos", "more_photos/")
    >>> print(f"{scores.headline:.1%} of {scores.n} images")
    """
    if write and isinstance(weights, Classifier):
        raise UserError("write changes a weights file: give its path, not a loaded Classifier")
    with process_group() as ranks, Interrupts() as interrupts, interrupts.interruptible(ranks):
        console = console if console is not None and ranks.is_first else make_console()
        console.quiet = console.quiet or not ranks.is_first
        classifier = as_classifier(weights, image_size, device)
        card, spec = classifier.card, classifier.spec
        path = user_path(report) if report is not None else _beside(spec, str(data), split)
        again = _command(spec, data, split, image_size, quarantine, target_accuracy, follow_links)
        _check(spec, classifier, path, target_accuracy, write, split)

        def look() -> tuple[Dataset, Samples, str]:
            with scan_progress(console, interrupts) as scanned:
                trained = [TrainingRecord.of(classifier)]
                return unseen_images(str(data), trained, split, str(quarantine or ""), scanned, follow_links)

        dataset, samples, words = ranks.broadcast(look)
        show_data(console, dataset)
        place, settings = device_of(classifier.net), DataConfig()
        temperature = card.postprocess.temperature
        out = compute_logits(classifier.net, samples, card.preprocess, settings, place, interrupts, ranks, temperature)

        def tell() -> Scores:
            net, task, told = classifier.net, classifier.task, words + fitted_note(card, samples)
            found = score_outputs(
                net, out, told, samples, card.preprocess, settings, task=task, postprocess=card.postprocess
            )
            found = with_tuning(found, samples, card.postprocess, target_accuracy)
            show_scores(console, found)
            show_tuning(console, found)
            answers = _answers(path)
            facts = _facts(spec, dataset, card, found, again, answers.name)
            write_predictions(answers, found, samples, card.postprocess)
            write_model_card(_card(path), facts)
            write_report(path, facts)
            console.print(
                f"report: [bold]{escape(str(path))}[/]; beside it the answer to each image, {escape(answers.name)}, "
                f"and a model card, {escape(path.stem)}-card.md"
            )
            if write:
                console.print(escape(write_postprocess(spec, card, found, samples)))
            return found.scores

        return ranks.broadcast(tell)


def _check(
    weights: str | Path, classifier: Classifier, report: Path, target: float | None, write: bool, split: str | None
) -> None:
    """What would fail after the work is told before it."""
    check_class_names(weights, classifier.card)
    beside = {_answers(report): PREDICTIONS, _card(report): MODEL_CARD}
    refuse_foreign_files([(report, "report.html"), *beside.items()], "choose another --report")
    if report.is_dir() or not report.absolute().parent.is_dir():
        raise UserError(f"cannot write the report to {report}: name a file in a folder that exists (--report)")
    if target is not None and not 0 < target < 1:
        raise UserError(f"--target-accuracy is a share between 0 and 1, as 0.95, not {target:g}")
    if target is not None and not classifier.task.abstains:
        raise UserError("--target-accuracy is for weights that give an image one label, and these give any number")
    if write:
        writable_weights_file(weights)
        if split == "train":
            raise UserError("--write would fit to images that these weights were trained on: use another --split")


def _answers(report: Path) -> Path:
    return report.with_name(f"{report.stem}-predictions.csv")


def _card(report: Path) -> Path:
    return report.with_name(f"{report.stem}-card.md")


def _beside(weights: str | Path, data: str, split: str | None) -> Path:
    path = local_path(weights) or Path()  # here, for what lies in the package or in a cache
    folder = path if path.is_dir() else path.parent
    folder = folder if folder.is_dir() else Path()
    which = "" if split is None else "-" + re.sub(r"\W+", "-", split)  # or one split would take the place of another
    return folder / f"evaluation-{data_name(os.path.normpath(user_path(data)))[:LONGEST_NAME]}{which}.html"


def _command(
    weights: str | Path,
    data: str | Path,
    split: str | None,
    image_size: int | Size | None,
    quarantine: str | Path | None,
    target_accuracy: float | None,
    follow_links: bool,
) -> list[str]:
    """What measures the same again."""
    options = {
        "--split": split,
        "--image-size": "x".join(map(str, parse_image_size(image_size))) if image_size else None,
        "--quarantine": quarantine,
        "--target-accuracy": target_accuracy,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return ["vitrail", "evaluate", str(weights), str(data), *given, *([] if follow_links else ["--no-follow"])]


def _facts(
    weights: str | Path, dataset: Dataset, card: Card, found: Measurement, again: list[str], answers: str
) -> ReportFacts:
    return found.facts(
        title=f"{Path(weights).name} on {data_name(dataset.root)}",
        subtitle=f"{len(dataset.classes)} classes, {found.scores.n:,} images",
        history=card.curves,
        predictions_file=answers,
        data=[(name, f"{len(samples):,} images") for name, samples in dataset.splits.items()],
        excluded=dataset.excluded,
        notes=dataset.notes,
        cost=[
            ("parameters", f"{count_parameters(card.model):,}"),
            ("compute", f"{count_macs(card.model) / 1e9:.2f} GMAC an image"),
        ],
        commands=[
            again,
            ["vitrail", "predict", str(weights), "photo.jpg"],
        ],
        card=provenance(card),
    )
