"""Throughput of training data loaders on JPEG files: vitrail, timm, and a Pillow pipeline in torch's DataLoader.

    python -m bench.loader [--images 2000] [--rounds 7] [--quick]

All loaders read the same files with two worker processes, take a random crop of 8 to 100 % of the area, resize it to
224 pixels, flip half of the images, and return batches of 64 normalised float images in the main process. Measured are
wall time and the CPU time of all processes. The other loaders use persistent workers; vitrail starts new workers for
each pass.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.harness import Candidate, Spread, order
from bench.photos import QUALITY, SIZE, make_photos
from bench.record import RESULTS, installed, machine_facts, write_results
from vitrail.config import AugmentConfig, Preprocess
from vitrail.data.augment.batch import augment_batch
from vitrail.data.dataset import open_dataset
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.loader.cache import PixelCache
from vitrail.data.loader.loader import Loader, training_loader
from vitrail.data.loader.reader import Reader
from vitrail.data.samples import Samples
from vitrail.data.transforms import normalise
from vitrail.weights.reference_models import make_torchvision_importable

SIDE, BATCH, WORKERS = 224, 64, 2
SPEC = Preprocess(size=(SIDE, SIDE))
AUGMENT = AugmentConfig(crop="random_resized", scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
TARGET = 1.5  # speed relative to the fastest other loader
Pass = Callable[[], Iterable[Tensor]]  # one pass over the images: float32 (B, 3, 224, 224)


def vitrail_loader(samples: Samples, keep: bool) -> Loader:
    cache = PixelCache(samples.areas, 3) if keep else None
    return training_loader(
        Reader(samples, SPEC, MAX_PIXELS, cache, scaled=True), BATCH, AUGMENT, 0, WORKERS, torch.device("cpu")
    )


def vitrail_pass(samples: Samples, keep: bool = False) -> Pass:
    """vitrail's loader, augmenting and normalising batches as training does. Each pass continues the sample stream."""
    loader, steps, done = vitrail_loader(samples, keep), len(samples) // BATCH, [0]

    def next_epoch() -> Iterable[Tensor]:
        start, done[0] = done[0], done[0] + steps
        for batch in loader.from_step(start, start + steps):
            yield normalise(augment_batch(batch.pixels, AUGMENT, 0, batch.epoch, batch.sample), SPEC)

    return next_epoch


class PillowImages(Dataset[tuple[Tensor, int]]):
    """A dataset as users write it with Pillow and torch: decode, crop and resize in one call, flip, normalise."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=_random_box(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(0.5).div_(0.5), 0


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w <= width and h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def pillow_pass(files: list[Path]) -> Pass:
    loader = DataLoader(
        PillowImages(files), BATCH, shuffle=True, num_workers=WORKERS, drop_last=True, persistent_workers=True
    )
    return lambda: (pixels for pixels, _ in loader)


def timm_pass(root: Path, prefetcher: bool) -> Pass:
    """timm's loader. It normalises in the workers, or with `prefetcher` in the main process."""
    make_torchvision_importable()
    from timm.data import ImageDataset, create_loader

    half = (0.5, 0.5, 0.5)
    loader = create_loader(
        ImageDataset(str(root)),
        input_size=(3, SIDE, SIDE),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=prefetcher,
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        mean=half,
        std=half,
        num_workers=WORKERS,
        device=torch.device("cpu"),
        persistent_workers=True,
    )
    return lambda: (pixels for pixels, _ in loader)


def processor_seconds() -> float:
    """CPU time of this process and of all its children, running and ended."""
    tick = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    import resource  # POSIX only

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total += ended.ru_utime + ended.ru_stime
    for child in active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def timed(run_pass: Pass) -> tuple[float, float, int]:
    """Run one pass; return its wall time, the CPU time of all processes and the number of images."""
    wall, processor, images = time.perf_counter(), processor_seconds(), 0
    for pixels in run_pass():
        assert pixels.dtype == torch.float32 and pixels.shape[1:] == (3, SIDE, SIDE)
        images += len(pixels)
    return time.perf_counter() - wall, processor_seconds() - processor, images


def compare_loaders(passes: dict[str, Pass], rounds: int, console: Console) -> dict[str, Any]:
    """Time the loaders in turns, in an order that changes every round: per image, and relative to vitrail."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for run_pass in passes.values():
        timed(run_pass)
    candidates = [Candidate(name, run_pass) for name, run_pass in passes.items()]
    for number in range(rounds):
        for name in (candidate.name for candidate in order(candidates, number)):
            wall, processor, images = timed(passes[name])
            seconds[name].append((wall / images, processor / images))
            console.print(f"round {number + 1}: {name} {images / wall:.0f} images/s, {1e3 * processor / images:.2f} ms")
    results: dict[str, Any] = {}
    for name, times in seconds.items():
        ratios = [
            (wall / reference_wall, processor / reference_processor)
            for (wall, processor), (reference_wall, reference_processor) in zip(times, seconds["ours"], strict=True)
        ]
        results[name] = {
            "images_per_second": round(statistics.median(1 / wall for wall, _ in times), 1),
            "processor_ms_per_image": round(1e3 * statistics.median(processor for _, processor in times), 3),
            "wall_ratio": Spread.of([wall for wall, _ in ratios]).rounded(),
            "processor_ratio": Spread.of([processor for _, processor in ratios]).rounded(),
        }
    return results


def memory_of(pids: Iterable[int]) -> dict[str, float]:
    """Memory of processes in MB: RSS and, where the kernel reports it, PSS (shared pages counted once)."""
    total = {"rss": 0.0, "pss": 0.0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key = line.split(":")[0].lower()
            if key in total:
                total[key] += int(line.split()[1]) / 1024
    return total


def memory_over_epochs(samples: Samples, epochs: int, keep: bool) -> dict[str, Any]:
    """Memory in MB of this process and its workers at the end of each epoch, and its growth."""
    steps, rows = max(1, len(samples) // BATCH), []
    for step, batch in enumerate(vitrail_loader(samples, keep).from_step(0, epochs * steps), 1):
        normalise(batch.pixels, SPEC)
        if (step % steps == 0 and step < epochs * steps) or step == epochs * steps - 1:
            rows.append(memory_of([os.getpid(), *(child.pid for child in active_children() if child.pid)]))
    growth = {key: rows[-1][key] / rows[0][key] - 1 for key in rows[0]}
    return {
        "megabytes": [{key: round(value, 1) for key, value in row.items()} for row in rows],
        "growth": {key: round(value, 4) for key, value in growth.items()},
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(
        title="JPEG files to normalised batches of 64",
        caption="ratios: time relative to ours, median and quartiles of the rounds",
    )
    for heading in ("loader", "images/s", "CPU ms/image", "wall ratio", "CPU ratio"):
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    for name, row in results.items():
        spreads = [row[key] for key in ("wall_ratio", "processor_ratio")]
        cells = [f"{s['median']:.2f} ({s['low']:.2f}–{s['high']:.2f})" for s in spreads]
        table.add_row(name, f"{row['images_per_second']:.0f}", f"{row['processor_ms_per_image']:.2f}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="fewer images and rounds")
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    images, rounds = (512, 3) if options.quick else (options.images, options.rounds)
    console = Console()
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "photos"
        about = make_photos(root, images)
        os.environ["VITRAIL_CACHE"] = f"{folder}/cache"
        samples = open_dataset(root, None).splits["all"]
        passes: dict[str, Pass] = {
            "ours": vitrail_pass(samples),
            "ours, kept decoded": vitrail_pass(samples, keep=True),
        }
        passes["pillow"] = pillow_pass(sorted(root.rglob("*.jpg")))
        if installed("timm"):
            passes |= {"timm": timm_pass(root, False), "timm prefetcher": timm_pass(root, True)}
        results = compare_loaders(passes, rounds, console)
        memory = {name: memory_over_epochs(samples, 5, keep) for name, keep in (("files", False), ("kept", True))}
    show(results, console)
    peers = [row["wall_ratio"]["median"] for name, row in results.items() if not name.startswith("ours")]
    busy = [row["processor_ratio"]["median"] for name, row in results.items() if not name.startswith("ours")]
    verdict = {"wall": min(peers), "processor": min(busy), "target": TARGET}
    console.print(f"fastest other loader: {min(peers):.2f} times our wall time, {min(busy):.2f} times our CPU time")
    console.print({name: measured["growth"] for name, measured in memory.items()})
    packages = {"pillow": PIL.__version__, "simplejpeg": installed("simplejpeg")}
    record = {
        "settings": {"rounds": rounds, "workers": WORKERS, "batch": BATCH, "size": SIDE, **packages},
        "images": {**about, "height": SIZE[0], "width": SIZE[1], "quality": QUALITY},
        "machine": machine_facts("cpu"),
        "loaders": results,
        "best_peer": verdict,
        "memory": memory,
    }
    name = "loader-quick-cpu" if options.quick else "loader-cpu"
    console.print(f"written to {write_results(Path(options.out), name, record)}")


if __name__ == "__main__":
    main()
