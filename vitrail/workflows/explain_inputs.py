"""Images for explanations: found, chosen evenly, opened, and run through a network in small batches."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from vitrail.data.sources.images import find_images
from vitrail.data.transforms import normalise
from vitrail.errors import UserError, error_reason
from vitrail.inference.classifier import NONFINITE_OUTPUT, Classifier
from vitrail.inference.device import device_of
from vitrail.inference.runner import read_pixels
from vitrail.interpret.attention import attention_maps, require_vit
from vitrail.interpret.distance import AttentionDistances, attention_distances
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout
from vitrail.interpret.votes import can_vote, class_map

BATCH = 16
MOST_IMAGES = 128  # that the paper measures attention distance on
TRIES = 8  # images that are opened for the place of one


@dataclass(frozen=True, eq=False)
class InputImages:
    """Images as a network sees them."""

    names: list[str]
    pixels: Tensor  # (N, C, H, W) uint8, on the CPU
    failed: list[tuple[str, str]]  # (name, why)
    of: int  # how many there were to choose from

    @property
    def unread(self) -> str:
        """A sentence on those that could not be read, if any."""
        return f"{len(self.failed)} of the images could not be read, first {': '.join(self.failed[0])}." * bool(
            self.failed
        )

    def picture(self, index: int) -> np.ndarray:
        """(H, W, C)"""
        return self.pixels[index].permute(1, 2, 0).numpy()


def read_input_images(classifier: Classifier, paths: Sequence[str | Path], most: int) -> InputImages:
    """At most `most` of the images at `paths`, evenly over their order, so that every class has its part. In place of
    one that cannot be read comes a neighbour."""
    found, spec = find_images(paths), classifier.preprocess
    wanted = evenly(len(found), most)
    read = dict(zip(wanted, read_pixels(found.subset(wanted), spec), strict=True))
    names, pixels, failed, tried = [], [], [], set()
    for places in _slots(len(found), most):
        for place in (place for place in places if place not in tried):
            tried.add(place)
            one = read[place] if place in read else read_pixels(found.subset([place]), spec)[0]
            if isinstance(one, Tensor):
                names.append("/".join(Path(found.name(place)).parts[-2:]))  # to recognise it; a folder may be a class
                pixels.append(one)
                break
            failed.append((found.name(place), one))
    if not pixels:
        reason = (
            f", first {failed[0][0]}: {failed[0][1]}" if failed else f": there are none in {', '.join(map(str, paths))}"
        )
        raise UserError(f"no image could be read{reason}")
    return InputImages(names, torch.stack(pixels), failed, len(found))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, from the first to the last."""
    if count <= most:
        return list(range(count))
    return sorted(set(np.linspace(0, count - 1, most).round().astype(int).tolist()))


def _slots(count: int, most: int) -> Iterator[Iterable[int]]:
    """For each of the even places it and some neighbours, in the order to try."""
    ends = [-1, *evenly(count, most), count]
    for before, place, after in zip(ends, ends[1:], ends[2:], strict=False):
        yield islice(chain(range(place, after), range(place - 1, before, -1)), TRIES)


def normalised_batches(classifier: Classifier, pixels: Tensor, size: int = BATCH) -> Iterator[Tensor]:
    """uint8 pixels as the network takes them, on its device."""
    for part in pixels.split(size):
        yield normalise(part.to(device_of(classifier.net)), classifier.preprocess)


def measure_attention_distance(classifier: Classifier, seen: InputImages, bar: Progress) -> AttentionDistances:
    """Attention distance over all the images."""
    task = bar.add_task("attention distance", total=len(seen.pixels))
    parts = normalised_batches(classifier, seen.pixels)
    return attention_distances(require_vit(classifier.net), parts, lambda done: bar.update(task, completed=done))


@torch.no_grad()
def class_logits(classifier: Classifier, pixels: Tensor) -> np.ndarray:
    """(N, classes)"""
    rows = torch.cat([classifier.net(part).float().cpu() for part in normalised_batches(classifier, pixels)])
    if not rows.isfinite().all():
        raise UserError(NONFINITE_OUTPUT)
    return rows.numpy()


def explanation_maps(
    classifier: Classifier,
    parts: Iterable[Tensor],
    classes: np.ndarray,
    against: np.ndarray | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Every kind of map, (N, h, w) each, for batches of normalised pixels: votes where there are any and relevance, for
    `classes` (rather than `against`); rollout, and the last block's attention. `class_map` shows the first.
    `progress` gets the number of images of each batch."""
    net = require_vit(classifier.net)
    kinds = (*(("votes",) if can_vote(net) else ()), "relevance", "rollout", "last attention")
    found: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    done = 0
    for pixels in parts:
        rows = slice(done, done + len(pixels))
        others = None if against is None else against[rows].tolist()
        if "votes" in found:
            found["votes"].append(class_map(net, pixels, classes[rows].tolist(), others))
        found["relevance"].append(relevance(net, pixels, classes[rows].tolist(), others))
        found["rollout"].append(rollout(net, pixels))
        found["last attention"].append(attention_maps(net, pixels, [-1])[:, 0].mean(1))
        done += len(pixels)
        if progress is not None:
            progress(len(pixels))
    return {name: np.concatenate(maps) for name, maps in found.items()}


def make_writable_folder(folder: Path) -> None:
    """Make a folder and try to write into it, before minutes are spent on what goes there."""
    temporary = folder / f".{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except FileExistsError:
        raise UserError(f"cannot write to {folder}: it is a file, and a folder is needed") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error_reason(error)}") from error


def weights_name(weights: str | Path) -> str:
    """What weights are called: their folder, or their file without the ending."""
    path = Path(str(weights).partition("@")[0])
    if path.name == "model.safetensors" and path.parent.name:
        return path.parent.name
    return path.stem if path.suffix in (".safetensors", ".npz") else path.name or "weights"
