"""Throughput of prediction from a folder of JPEGs to a CSV file: vitrail, timm and the transformers pipeline.

    python -m bench.predict [--images 4000] [--rounds 3] [--device cuda] [--quick]

All use a network of the same size with random weights, the same preprocessing, and write one row per image. timm is
used as in its script `inference.py`: its dataset and loader with worker processes, softmax and top-1 per batch, and a
table at the end. The pipeline gets paths, the same batch size and the same number of workers. The network is loaded and
warmed up before the clock starts. The start of the workers is included.

vitrail's loader is also measured alone, without a network, for each image size. The throughput of predictions relative
to it shows how long a GPU waits for data.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import vitrail
from bench.harness import Candidate, Spread, order
from bench.loader import processor_seconds
from bench.photos import QUALITY, SIZE, make_photos
from bench.record import RESULTS, installed, machine_facts, write_results
from vitrail.cli.prediction_rows import print_rows
from vitrail.commands.predict import BATCH, GPU_BATCH, predict_rows
from vitrail.config import Preprocess
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.loader.loader import evaluation_loader
from vitrail.data.loader.reader import Reader
from vitrail.data.scan import cores
from vitrail.data.sources.images import find_images
from vitrail.inference.classifier import Classifier
from vitrail.inference.device import device_of
from vitrail.models.build import create
from vitrail.weights.bundle import Card
from vitrail.weights.reference_models import make_torchvision_importable

SIDE, CLASSES = 224, 1000
HALF = (0.5, 0.5, 0.5)
TARGET = 0.8  # throughput on a GPU relative to the loader alone
Work = Callable[[Path, Path], object]  # arguments: a folder of images and the CSV file to write


def random_classifier(device: str) -> Classifier:
    """Ti/16 at 224 px with random weights."""
    net = create("Ti/16", CLASSES, SIDE).to(device).eval().requires_grad_(False)
    names = tuple(f"class {index}" for index in range(CLASSES))
    card = Card(model=net.config, preprocess=Preprocess(size=(SIDE, SIDE)), classes=names, created_with="bench")
    return Classifier(net, card)


def vitrail_predict(classifier: Classifier) -> Work:
    """`vitrail predict WEIGHTS FOLDER --csv` after the weights are loaded."""

    def work(root: Path, out: Path) -> None:
        with out.open("w", newline="") as file, contextlib.redirect_stdout(file):
            print_rows(predict_rows(classifier, [root]), "csv", 1)

    return work


def loader_alone(classifier: Classifier) -> Work:
    device = device_of(classifier.net)

    def work(root: Path, out: Path) -> None:
        reader = Reader(find_images([root]), classifier.preprocess, MAX_PIXELS)
        for batch in evaluation_loader(reader, batch_size(device.type), None, device):
            del batch

    return work


def timm_script(device: str, workers: int) -> Work:
    make_torchvision_importable()
    import timm
    from timm.data import ImageDataset, create_loader

    net = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES).to(device).eval()

    def work(root: Path, out: Path) -> None:
        dataset = ImageDataset(str(root))
        loader = create_loader(
            dataset,
            input_size=(3, SIDE, SIDE),
            batch_size=batch_size(device),
            use_prefetcher=device == "cuda",
            num_workers=workers,
            interpolation="bilinear",
            mean=HALF,
            std=HALF,
            crop_pct=1.0,
            crop_mode="squash",
            device=torch.device(device),
        )
        predictions: list[tuple[float, int]] = []
        with torch.inference_mode():
            for pixels, _ in loader:
                best = net(pixels.to(device)).softmax(-1).topk(1)
                predictions += zip(best.values[:, 0].tolist(), best.indices[:, 0].tolist(), strict=True)
        names = dataset.filenames()
        write_csv(out, [(name, str(label), p) for name, (p, label) in zip(names, predictions, strict=True)])

    return work


def transformers_pipeline(device: str, workers: int) -> Work:
    make_torchvision_importable()
    from transformers import ViTConfig, ViTForImageClassification, pipeline

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, num_labels=CLASSES
    )
    net = ViTForImageClassification(config).eval()
    processor = image_processor()(size={"height": SIDE, "width": SIDE}, image_mean=HALF, image_std=HALF)
    pipe = pipeline("image-classification", model=net, image_processor=processor, device=device)

    def work(root: Path, out: Path) -> None:
        paths = sorted(map(str, root.rglob("*.jpg")))
        predictions = pipe(paths, batch_size=batch_size(device), num_workers=workers, top_k=1)
        rows = [(name, best["label"], best["score"]) for name, (best,) in zip(paths, predictions, strict=True)]
        write_csv(out, rows)

    return work


def image_processor() -> Any:
    """The image processor that does not need torchvision; its name depends on the version of transformers."""
    import transformers

    return getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor


def write_csv(path: Path, rows: list[tuple[str, str, float]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "probability"), *rows])


def batch_size(device: str) -> int:
    return GPU_BATCH if device == "cuda" else BATCH


def timed(work: Work, root: Path, out: Path, images: int) -> tuple[float, float]:
    """Return the wall time and the CPU time of all processes. Check that the CSV file has one row per image."""
    out.unlink(missing_ok=True)
    start, busy = time.perf_counter(), processor_seconds()
    work(root, out)
    took = time.perf_counter() - start, processor_seconds() - busy
    if out.exists():
        with out.open(newline="") as file:
            assert sum(1 for _ in csv.reader(file)) == images + 1
    return took


def compare(candidates: dict[str, Work], root: Path, images: int, rounds: int, console: Console) -> dict[str, Any]:
    """Time the candidates in turns, in an order that changes every round: images/s, and time relative to the first."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    out = root.parent / "predictions.csv"
    for number in range(-1, rounds):  # the first one warms up
        for candidate in order([Candidate(name, list) for name in candidates], max(0, number)):
            name = candidate.name
            took = timed(candidates[name], root, out, images)
            console.print(f"round {number + 1}: {name} {images / took[0]:,.0f} images/s")
            if number >= 0:
                seconds[name].append(took)
    first = next(iter(candidates))
    results = {}
    for name, times in seconds.items():
        pairs = list(zip(times, seconds[first], strict=True))
        ratios = [[measured[k] / reference[k] for measured, reference in pairs] for k in (0, 1)]
        results[name] = {
            "images_per_second": round(images / statistics.median(wall for wall, _ in times), 1),
            "processor_ms_per_image": round(1e3 * statistics.median(busy for _, busy in times) / images, 3),
            "wall_ratio": Spread.of(ratios[0]).rounded(),
            "processor_ratio": Spread.of(ratios[1]).rounded(),
        }
    return results


def candidates_on(device: str, workers: int, console: Console) -> dict[str, Work]:
    """Set up the installed libraries. vitrail is first, with its loader alone after it."""
    small, bundled = random_classifier(device), vitrail.load("bundled", device=device)
    works = {
        "ours": vitrail_predict(small),
        "our loader alone": loader_alone(small),
        "ours, bundled Ti/8 at 64 px": vitrail_predict(bundled),
        "our loader alone, 64 px": loader_alone(bundled),
    }
    for name, make in (("timm", timm_script), ("transformers", transformers_pipeline)):
        if installed(name):
            works[name] = make(device, workers)
        else:
            console.print(f"{name} is not installed")
    return works


def show(results: dict[str, Any], device: str, console: Console) -> None:
    caption = "ratios: time relative to ours, median and quartiles of the rounds"
    table = Table(title=f"JPEG files to a CSV of predictions, {device}", caption=caption)
    for heading in ("", "images/s", "CPU ms/image", "wall ratio", "CPU ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in results.items():
        spreads = [row[key] for key in ("wall_ratio", "processor_ratio")]
        cells = [f"{s['median']:.2f} ({s['low']:.2f}–{s['high']:.2f})" for s in spreads]
        table.add_row(name, f"{row['images_per_second']:,.0f}", f"{row['processor_ms_per_image']:.2f}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="200 images, one round")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    images, rounds = (200, 1) if options.quick else (options.images, options.rounds)
    workers, console = min(16, cores()), Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "photos"
        about = make_photos(root, images)
        os.environ["VITRAIL_CACHE"] = f"{folder}/cache"
        with contextlib.redirect_stderr(io.StringIO()):  # version warnings of the libraries
            candidates = candidates_on(device, workers, console)
        results = compare(candidates, root, images, rounds, console)
    show(results, device, console)
    rates = {name: row["images_per_second"] for name, row in results.items()}
    fractions = {
        "Ti/16 at 224 px": rates["ours"] / rates["our loader alone"],
        "bundled Ti/8 at 64 px": rates["ours, bundled Ti/8 at 64 px"] / rates["our loader alone, 64 px"],
    }
    for name, fraction in fractions.items():
        console.print(f"{name}: {fraction:.0%} of the throughput of the loader alone (target on a GPU: {TARGET:.0%})")
    record = {
        "settings": {"rounds": rounds, "workers": workers, "batch": batch_size(device), "classes": CLASSES},
        "images": {**about, "height": SIZE[0], "width": SIZE[1], "quality": QUALITY},
        "machine": machine_facts(device),
        "contestants": results,
        "of_the_loader_alone": {name: round(fraction, 3) for name, fraction in fractions.items()},
    }
    name = f"predict-quick-{device}" if options.quick else f"predict-{device}"
    console.print(f"written: {write_results(Path(options.out), name, record)}")


if __name__ == "__main__":
    main()
