"""Images for `vitrail explain` and `vitrail paper`: chosen evenly, read, and run through a network in small batches.

In: a `Classifier` and paths. Out: `InputImages`, their logits, their explanation maps and attention distances.
"""

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
MOST_IMAGES = 128  # the paper measures attention distance on 128 images
TRIES = 8  # images that are tried if one cannot be read


@dataclass(frozen=True, eq=False)
class InputImages:
    """Images as the network gets them, before normalisation."""

    names: list[str]
    pixels: Tensor  # (N, C, H, W) uint8, on the CPU
    failed: list[tuple[str, str]]  # (name, reason)
    of: int  # number of images at the paths

    @property
    def unread(self) -> str:
        """A sentence about images that could not be read; empty if all could."""
        return f"{len(self.failed)} of the images could not be read, first {': '.join(self.failed[0])}." * bool(
            self.failed
        )

    def picture(self, index: int) -> np.ndarray:
        """An image as an array (H, W, C)."""
        return self.pixels[index].permute(1, 2, 0).numpy()


def read_input_images(classifier: Classifier, paths: Sequence[str | Path], most: int) -> InputImages:
    """Read at most `most` of the images at `paths`, spread evenly over their order, so that all classes are present.

    An image that cannot be read is replaced by a neighbour."""
    images, spec = find_images(paths), classifier.preprocess
    chosen = evenly(len(images), most)
    read = dict(zip(chosen, read_pixels(images.subset(chosen), spec), strict=True))
    names, pixels, failed, tried = [], [], [], set()
    for candidates in _candidates(len(images), most):
        for index in (index for index in candidates if index not in tried):
            tried.add(index)
            result = read[index] if index in read else read_pixels(images.subset([index]), spec)[0]
            if isinstance(result, Tensor):
                names.append("/".join(Path(images.name(index)).parts[-2:]))  # with the folder, often the class
                pixels.append(result)
                break
            failed.append((images.name(index), result))  # the reason
    if not pixels:
        reason = f", first {failed[0][0]}: {failed[0][1]}" if failed else f": no images in {', '.join(map(str, paths))}"
        raise UserError(f"no image could be read{reason}")
    return InputImages(names, torch.stack(pixels), failed, len(images))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 to `count` - 1, evenly spread from the first to the last."""
    if count <= most:
        return list(range(count))
    return sorted(set(np.linspace(0, count - 1, most).round().astype(int).tolist()))


def _candidates(count: int, most: int) -> Iterator[Iterable[int]]:
    """For each of the evenly spread indices: itself and some neighbours, in the order to try."""
    ends = [-1, *evenly(count, most), count]
    for before, index, after in zip(ends, ends[1:], ends[2:], strict=False):
        yield islice(chain(range(index, after), range(index - 1, before, -1)), TRIES)


def normalised_batches(classifier: Classifier, pixels: Tensor, size: int = BATCH) -> Iterator[Tensor]:
    """Normalised batches of uint8 pixels, on the device of the network."""
    for part in pixels.split(size):
        yield normalise(part.to(device_of(classifier.net)), classifier.preprocess)


def measure_attention_distance(classifier: Classifier, seen: InputImages, bar: Progress) -> AttentionDistances:
    """The attention distance over all images."""
    task = bar.add_task("attention distance", total=len(seen.pixels))
    batches = normalised_batches(classifier, seen.pixels)
    return attention_distances(require_vit(classifier.net), batches, lambda done: bar.update(task, completed=done))


@torch.no_grad()
def class_logits(classifier: Classifier, pixels: Tensor) -> np.ndarray:
    """The logits of the images, (N, classes). Raises UserError if they are not finite."""
    rows = torch.cat([classifier.net(batch).float().cpu() for batch in normalised_batches(classifier, pixels)])
    if not rows.isfinite().all():
        raise UserError(NONFINITE_OUTPUT)
    return rows.numpy()


def explanation_maps(
    classifier: Classifier,
    batches: Iterable[Tensor],
    classes: np.ndarray,
    against: np.ndarray | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Every kind of map, (N, h, w) each, for batches of normalised pixels: votes where there are any and relevance, for
    `classes` (rather than `against`); rollout, and the last block's attention. `class_map` shows the first.
    `progress` gets the number of images of each batch."""
    net = require_vit(classifier.net)
    kinds = (*(("votes",) if can_vote(net) else ()), "relevance", "rollout", "last attention")
    maps: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    done = 0
    for pixels in batches:
        rows = slice(done, done + len(pixels))
        others = None if against is None else against[rows].tolist()
        if "votes" in maps:
            maps["votes"].append(class_map(net, pixels, classes[rows].tolist(), others))
        maps["relevance"].append(relevance(net, pixels, classes[rows].tolist(), others))
        maps["rollout"].append(rollout(net, pixels))
        maps["last attention"].append(attention_maps(net, pixels, [-1])[:, 0].mean(1))
        done += len(pixels)
        if progress is not None:
            progress(len(pixels))
    return {name: np.concatenate(parts) for name, parts in maps.items()}


def make_writable_folder(folder: Path) -> None:
    """Create a folder and check that it is writable, before slow work whose results go there."""
    temporary = folder / f".{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except FileExistsError:
        raise UserError(f"cannot write to {folder}: it is a file, not a folder") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error_reason(error)}") from error


def weights_name(weights: str | Path) -> str:
    """The name of weights: that of their folder, or of their file without the suffix."""
    path = Path(str(weights).partition("@")[0])
    if path.name == "model.safetensors" and path.parent.name:
        return path.parent.name
    return path.stem if path.suffix in (".safetensors", ".npz") else path.name or "weights"
