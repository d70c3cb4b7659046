"""The end of a run: the final measurement, the weights file that carries its numbers, the report and the model card.

In: the `Plan` and the trained network. Out: a `TrainResult`, and the files in the run folder.
"""

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
from vitrail.workflows.vitrail_files import MODEL_CARD, OLD_PREDICTIONS, PREDICTIONS, remove_old_predictions


def finish(plan: Plan, net: Network, run: RunContext, seconds: float) -> TrainResult:
    """Measure the network and write the files of the run. The weights come last: a run with weights is finished."""
    weights = run.folder / "model.safetensors"
    if not plan.model.num_classes:
        return TrainResult(run.folder, weights, None, _finish_pretraining(plan, net, run))
    scores = _finish_classifier(plan, net.to(plan.device), run, seconds)
    return TrainResult(run.folder, weights, run.folder / "report.html", scores)


def _finish_classifier(plan: Plan, net: Network, run: RunContext, seconds: float) -> Scores:
    """Measure once on the test images; write predictions.csv, report.html, model_card.md and model.safetensors."""
    folder, run_facts, console = run.folder, run.facts, run.console
    name = "test" if "test" in plan.dataset.splits else "val"
    samples = plan.dataset.splits[name]
    copies, before = _count_training_copies(plan, samples), count_seen_digests(samples, earlier_digests(run_facts))
    split = _describe_split(name, copies, before)
    data, interrupts = plan.config.data, run.interrupts
    task = prediction_task(task_name(plan.config, plan.dataset), len(plan.dataset.classes))
    with interrupts.interruptible():  # a signal loses nothing: the last checkpoint is saved
        measurement = measure(net, split, samples, plan.preprocess, data, plan.device, interrupts, task=task)
    show_scores(console, measurement)
    if name == "val" and plan.steps and not validates_in_float32(plan.config.precision):
        console.print("[dim]measured in float32; the lines above were measured in bfloat16[/]")
    baseline = run_facts["baseline"]
    # As in the report: if the interval contains the accuracy of the probe, the difference is not significant.
    if baseline and measurement.scores.interval[1] < baseline["accuracy"]:
        advice = "use that linear probe with --recipe probe" if run_facts["source"] else "try --from WEIGHTS"
        features = escape(baseline["features"])
        console.print(
            f"[yellow]below the baseline, {baseline['accuracy']:.1%} by a linear probe on {features}[/]: {advice}"
        )
    metrics = measurement.scores.numbers() | ({"seen_before": before} if before else {})
    # For the report only: `vitrail evaluate --write` stores a temperature and thresholds in the weights.
    measurement = with_tuning(measurement, samples)
    output = _output_folder(run)
    history = read_metrics(output / "metrics.jsonl")
    card = _card(plan, measurement.sentence, metrics, run_facts, history)
    config = (output / "config.toml").read_text(encoding="utf-8")
    facts = _report_facts(plan, measurement, folder, run_facts, seconds, card, history, config)
    write_predictions(output / PREDICTIONS, measurement, samples)
    remove_old_predictions(output / OLD_PREDICTIONS)
    write_report(output / "report.html", facts)
    write_model_card(output / MODEL_CARD, facts)
    write_bundle(output / "model.safetensors", _with_digests(plan, net, run_facts), card)
    console.print(f"weights: [bold]{escape(str(folder / 'model.safetensors'))}[/]")
    console.print(f"report:  [bold]{escape(str(folder / 'report.html'))}[/]")
    console.print(f"card:    [bold]{escape(str(folder / MODEL_CARD))}[/]")
    return measurement.scores


def _output_folder(run: RunContext) -> Path:
    """The folder to write to: the run folder, or `NEW` in it if the run has not saved anything yet (a linear probe)."""
    new = run.folder / NEW
    if new.exists():
        return new
    check_not_replaced(run.folder, run.lock)
    return run.folder


def _count_training_copies(plan: Plan, samples: Samples) -> int:
    """The number of measured images that are exact copies of training images."""
    return int(np.isin(samples.original_digests, plan.dataset.splits["train"].original_digests).sum())


def _with_digests(plan: Plan, net: Network, run_facts: dict[str, Any]) -> dict[str, Tensor]:
    """The weights, with the digests of all images that they and their starting weights were trained on."""
    digests = content_digests(plan.dataset.splits["train"])
    return {**net.state_dict(), TRAINED_ON: digest_tensor(np.concatenate([digests, earlier_digests(run_facts)]))}


def _describe_split(name: str, copies: int, before: int) -> str:
    """The measured split in words, with training images among them, which make the scores too high."""
    sentence = "test split" if name == "test" else "validation split"
    if copies:
        sentence += f", {copies:,} of which are exact copies of training images"
    if before:
        sentence += f"; the starting weights were trained on {before:,} of them, so the scores are too high"
    return sentence if name == "test" or copies or before else f"{sentence}, none of them trained on"


def _finish_pretraining(plan: Plan, net: Network, run: RunContext) -> dict[str, float]:
    """After masked-patch pre-training: write the network without a classifier, as weights to fine-tune."""
    folder, console = _output_folder(run), run.console
    history = read_metrics(folder / "metrics.jsonl")
    last = [row for row in history if "val_loss" in row][-1]
    metrics = {key: value for key, value in last.items() if key != "step"}
    card = _card(plan, "masked patches of the validation split", metrics, run.facts, history)
    write_bundle(folder / "model.safetensors", _with_digests(plan, net, run.facts), card)
    accuracy = f", accuracy {metrics['val_accuracy']:.1%} on corrupted patches" if metrics.get("val_accuracy") else ""
    console.print(f"validation loss [bold]{metrics['val_loss']:.4f}[/]{accuracy}")
    console.print(f"weights: [bold]{escape(str(folder / 'model.safetensors'))}[/]")
    console.print(
        f"next:    vitrail train DATA --from {escape(shlex.quote(str(folder)))}  (fine-tunes these weights)",
    )
    return metrics


def _card(
    plan: Plan, sentence: str, metrics: dict[str, Any], run_facts: dict[str, Any], history: list[dict[str, Any]]
) -> Card:
    dataset, data = plan.dataset, plan.config.data
    recipe = plan.config.model_dump(mode="json", exclude_none=True)
    recipe["data"]["path"] = Path(dataset.root).name  # the full path says nothing about the weights
    recipe["model"]["weights"] = run_facts["source"]
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
            "trained_before": run_facts["trained_before"],
        },
        metrics={"measured_on": sentence, **metrics},
        curves=downsample_curves(history),
        source=run_facts["source"],
        licence=run_facts["licence"],
        created_with=created_with(),
    )


def _report_facts(
    plan: Plan,
    measurement: Measurement,
    folder: Path,
    run_facts: dict[str, Any],
    seconds: float,
    card: Card,
    history: list[dict[str, Any]],
    config: str,
) -> ReportFacts:
    dataset, baseline = plan.dataset, run_facts["baseline"]
    speeds = [row["images_per_second"] for row in history if "images_per_second" in row]
    weights = str(folder / "model.safetensors")
    cost = [("training time", f"{seconds / 60:.1f} minutes")] if plan.steps else [("time", f"{seconds:.0f} s")]
    cost += [("speed", f"{sorted(speeds)[len(speeds) // 2]:.0f} images/s")] if speeds else []
    cost += [
        ("parameters", f"{count_parameters(plan.model):,}"),
        ("compute", f"{count_macs(plan.model) / 1e9:.2f} GMAC per image"),
        ("device", run_facts["environment"]["device"]),
    ]
    return measurement.facts(
        (f"a linear probe on {baseline['features']}", baseline["accuracy"]) if baseline else None,
        title=data_name(dataset.root),
        subtitle=f"{plan.config.model.name or 'ViT'}, recipe {plan.config.recipe}, {dataset_line(plan)}",
        history=history,
        val_baseline=baseline["watched"] if baseline else None,
        predictions_file=PREDICTIONS,
        decisions=[(row["what"], row["value"], row["why"]) for row in run_facts["decisions"]],
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
