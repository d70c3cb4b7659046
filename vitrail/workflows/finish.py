"""The end of a run: the last measurement, the weights file that carries it, and the report."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.data.dataset import Samples, content_digests
from vitrail.data.splits import SplitRule
from vitrail.metrics.scores import Scores
from vitrail.models.build import Network
from vitrail.models.flops import count_macs, count_parameters
from vitrail.report.model_card import write_model_card
from vitrail.report.page import ReportFacts, write_report
from vitrail.report.provenance import provenance
from vitrail.tasks.table import prediction_task, task_name
from vitrail.terminal import escape
from vitrail.training.precision import validates_in_float32
from vitrail.training.progress import downsample_curves, read_metrics
from vitrail.training.run_context import RunContext
from vitrail.weights.bundle import TRAINED_ON, Card, created_with, digest_tensor, write_bundle
from vitrail.workflows.measure import Measurement, measure, show_scores, write_predictions
from vitrail.workflows.resolve import Plan
from vitrail.workflows.run_folder import NEW, check_not_replaced
from vitrail.workflows.run_training import TrainResult
from vitrail.workflows.show import data_name
from vitrail.workflows.train_test_overlap import count_seen_digests, earlier_digests
from vitrail.workflows.tune import with_tuning
from vitrail.workflows.vitrail_files import MODEL_CARD, PREDICTIONS


def finish(plan: Plan, net: Network, run: RunContext, seconds: float) -> TrainResult:
    """Measure the network and write its files, the weights last: with them, the run counts as finished."""
    weights = run.folder / "model.safetensors"
    if not plan.model.num_classes:
        return TrainResult(run.folder, weights, None, _finish_pretraining(plan, net, run))
    scores = _finish_classifier(plan, net.to(plan.device), run, seconds)
    return TrainResult(run.folder, weights, run.folder / "report.html", scores)


def _finish_classifier(plan: Plan, net: Network, run: RunContext, seconds: float) -> Scores:
    """Measure once on the test images; write predictions.csv, report.html, model_card.md and model.safetensors."""
    folder, about, console = run.folder, run.facts, run.console
    name = "test" if "test" in plan.dataset.splits else "val"
    samples = plan.dataset.splits[name]
    copies, before = _known(plan, samples), count_seen_digests(samples, earlier_digests(about))
    split = _split(name, copies, before)
    data, interrupts = plan.config.data, run.interrupts
    task = prediction_task(task_name(plan.config, plan.dataset), len(plan.dataset.classes))
    with interrupts.interruptible():  # all that training made has been saved
        found = measure(net, split, samples, plan.preprocess, data, plan.device, interrupts, task=task)
    show_scores(console, found)
    if name == "val" and plan.steps and not validates_in_float32(plan.config.precision):
        console.print("[dim]measured in float32; the lines before it in the precision of the weights, bf16[/]")
    baseline = about["baseline"]
    # As the report has it: where the interval reaches the probe's accuracy, these images cannot tell which is better.
    if baseline and found.scores.interval[1] < baseline["accuracy"]:
        advice = "--from WEIGHTS starts from trained ones" if not about["source"] else "--recipe probe fits one on them"
        console.print(f"[yellow]worse than the linear probe on {escape(baseline['features'])}[/]: {advice}")
    metrics = found.scores.numbers() | ({"seen_before": before} if before else {})
    found = with_tuning(
        found, samples
    )  # for the report; nothing of it is written into the weights without being asked for
    place = _place(run)
    history = read_metrics(place / "metrics.jsonl")
    card = _card(plan, found.sentence, metrics, about, history)
    config = (place / "config.toml").read_text(encoding="utf-8")
    facts = _facts(plan, found, folder, about, seconds, card, history, config)
    write_predictions(place / PREDICTIONS, found, samples)
    write_report(place / "report.html", facts)
    write_model_card(place / MODEL_CARD, facts)
    write_bundle(place / "model.safetensors", _with_digests(plan, net, about), card)
    console.print(f"weights: [bold]{escape(str(folder / 'model.safetensors'))}[/]")
    console.print(f"report:  [bold]{escape(str(folder / 'report.html'))}[/]")
    console.print(f"card:    [bold]{escape(str(folder / MODEL_CARD))}[/]")
    return found.scores


def _place(run: RunContext) -> Path:
    """Where the files go: to the folder, or beside what it holds if the run has not saved anything before."""
    new = run.folder / NEW
    if new.exists():
        return new
    check_not_replaced(run.folder, run.lock)
    return run.folder


def _known(plan: Plan, samples: Samples) -> int:
    """How many images lie among those of the training as well."""
    return int(np.isin(samples.original_digests, plan.dataset.splits["train"].original_digests).sum())


def _with_digests(plan: Plan, net: Network, about: dict[str, Any]) -> dict[str, Tensor]:
    """The weights, and the digests of all images that they and the weights before them learned from."""
    own = content_digests(plan.dataset.splits["train"])
    return {**net.state_dict(), TRAINED_ON: digest_tensor(np.concatenate([own, earlier_digests(about)]))}


def _split(name: str, copies: int, before: int) -> str:
    """Which images were measured on, and what makes their numbers too good."""
    words = "test split" if name == "test" else "held-out split"
    if copies:
        words += f", {copies:,} of which are exact copies of training images"
    if before:
        words += f"; {before:,} were in the training of the weights it started from, which makes the numbers too good"
    return words if name == "test" or copies or before else f"{words}, which training never saw"


def _finish_pretraining(plan: Plan, net: Network, run: RunContext) -> dict[str, float]:
    """After masked-patch pre-training: the network without a classifier, to fine-tune from."""
    folder, console = _place(run), run.console
    history = read_metrics(folder / "metrics.jsonl")
    last = [row for row in history if "val_loss" in row][-1]
    found = {key: value for key, value in last.items() if key != "step"}
    card = _card(plan, "masked patches of held-out images", found, run.facts, history)
    write_bundle(folder / "model.safetensors", _with_digests(plan, net, run.facts), card)
    right = f", {found['val_accuracy']:.1%} of the corrupted patches right" if found.get("val_accuracy") else ""
    console.print(f"held-out loss [bold]{found['val_loss']:.4f}[/]{right}")
    console.print(f"weights: [bold]{escape(str(folder / 'model.safetensors'))}[/]")
    console.print(
        f"next:    vitrail train DATA --from {escape(shlex.quote(str(folder)))} fine-tunes them to classes",
    )
    return found


def _card(
    plan: Plan, sentence: str, metrics: dict[str, Any], about: dict[str, Any], history: list[dict[str, Any]]
) -> Card:
    dataset, data = plan.dataset, plan.config.data
    recipe = plan.config.model_dump(mode="json", exclude_none=True)
    recipe["data"]["path"] = Path(dataset.root).name  # a whole path tells about the machine, not about the weights
    recipe["model"]["weights"] = about["source"]
    return Card(
        model=plan.model,
        preprocess=plan.preprocess,
        classes=dataset.classes if plan.model.num_classes else (),
        task=task_name(plan.config, dataset) if plan.model.num_classes else "classification",
        recipe=recipe,
        data={
            "name": Path(dataset.root).name,
            "fingerprint": dataset.fingerprint,
            "images": {name: len(samples) for name, samples in dataset.splits.items()},
            "given_split": dataset.given_split,
            **asdict(SplitRule.of(data.model_dump())),
            "max_pixels": data.max_pixels,
            "trained_before": about["trained_before"],
        },
        metrics={"measured_on": sentence, **metrics},
        curves=downsample_curves(history),
        source=about["source"],
        licence=about["licence"],
        created_with=created_with(),
    )


def _facts(
    plan: Plan,
    found: Measurement,
    folder: Path,
    about: dict[str, Any],
    seconds: float,
    card: Card,
    history: list[dict[str, Any]],
    config: str,
) -> ReportFacts:
    dataset, baseline = plan.dataset, about["baseline"]
    speeds = [row["images_per_second"] for row in history if "images_per_second" in row]
    weights = str(folder / "model.safetensors")
    cost = [("training time", f"{seconds / 60:.1f} minutes")] if plan.steps else [("time", f"{seconds:.0f} s")]
    cost += [("speed", f"{sorted(speeds)[len(speeds) // 2]:.0f} images/s")] if speeds else []
    cost += [
        ("parameters", f"{count_parameters(plan.model):,}"),
        ("compute", f"{count_macs(plan.model) / 1e9:.2f} GMAC an image"),
        ("device", about["environment"]["device"]),
    ]
    return found.facts(
        (f"linear probe on {baseline['features']}", baseline["accuracy"]) if baseline else None,
        title=data_name(dataset.root),
        subtitle=f"{plan.config.recipe} of a {plan.config.model.name or 'ViT'}, {dataset_line(plan)}",
        history=history,
        val_baseline=baseline["watched"] if baseline else None,
        predictions_file=PREDICTIONS,
        decisions=[(row["what"], row["value"], row["why"]) for row in about["decisions"]],
        data=data_rows(plan),
        excluded=dataset.excluded,
        notes=dataset.notes,
        cost=cost,
        config_toml=config,
        commands=[
            ["vitrail", "predict", weights, "photo.jpg"],
            ["vitrail", "evaluate", weights, plan.config.data.path],
            ["vitrail", "train", "--recipe", str(folder / "config.toml"), "--out", "again"],
        ],
        card=provenance(card),
    )


def dataset_line(plan: Plan) -> str:
    return f"{len(plan.dataset.classes)} classes, {len(plan.dataset.splits['train']):,} training images"


def data_rows(plan: Plan) -> list[tuple[str, str]]:
    return [(name, f"{len(samples):,} images") for name, samples in plan.dataset.splits.items()]
