"""Features of images on disk, found again by the content of an image: none has to pass the same network twice.

Parts are written while a network works, each whole or not at all, so memory stays flat, a run that was stopped keeps
what it had, and several processes can write beside each other.
"""

from __future__ import annotations

import hashlib
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitrail.atomic import atomic_write
from vitrail.config import Preprocess
from vitrail.data.scan import cache_folder
from vitrail.errors import UserError, error_reason

VERSION = 1
PART = 4096  # images in a part


class FeatureCache:
    """The features that one network gives images prepared in one way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def for_network(cls, net: nn.Module, spec: Preprocess, device: torch.device) -> FeatureCache:
        """In the cache folder, under a name that changes with the weights, the preprocessing and the kind of device."""
        name = hashlib.blake2b(f"{VERSION} {device.type} {spec.model_dump_json()}".encode(), digest_size=16)
        for key, tensor in net.state_dict().items():
            if not key.startswith("head."):  # features do not pass it
                name.update(key.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return cls(cache_folder() / "features" / name.hexdigest())

    def add(self, digests: np.ndarray, values: np.ndarray) -> None:
        """Keep (m, D) features of the images of these digests, (m,)."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{secrets.token_hex(8)}.npz"
            with atomic_write(self.folder / name) as temporary, temporary.open("wb") as file:
                np.savez(file, digests=digests.astype(np.uint64), values=values.astype(np.float32))
        except OSError as error:
            reason = error_reason(error)
            raise UserError(
                f"the features cannot be kept in {self.folder}: {reason}; set VITRAIL_CACHE to a folder with room"
            ) from None

    def missing(self, digests: np.ndarray) -> np.ndarray:
        """Which of these images have no features yet, each content once: indices, ascending."""
        known = [part["digests"] for part in self._parts("digests")]
        _, first = np.unique(digests, return_index=True)
        first = np.sort(first)
        return first[~np.isin(digests[first], np.concatenate([np.empty(0, np.uint64), *known]))]

    def rows(self, digests: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(indices, features) of those of the images that have some, a part at a time and every image once."""
        order = np.argsort(digests, kind="stable")
        waiting = np.ones(len(digests), bool)
        for part in self._parts("digests", "values"):
            own, place = np.unique(part["digests"], return_index=True)
            at = np.searchsorted(own, digests[order])
            here = (at < len(own)) & (own[np.minimum(at, len(own) - 1)] == digests[order]) & waiting[order]
            chosen = order[here]
            if len(chosen):
                waiting[chosen] = False
                yield chosen, part["values"][place[at[here]]]

    def take(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The features of all images that have some, in their order, and which those are, (n,) bool."""
        found, values = np.zeros(len(digests), bool), np.empty((0, 0), np.float32)
        for chosen, features in self.rows(digests):
            if not len(values):
                values = np.empty((len(digests), features.shape[1]), np.float32)
            values[chosen], found[chosen] = features, True
        return values[found] if len(values) else values, found

    def _parts(self, *columns: str) -> Iterator[dict[str, np.ndarray]]:
        """In an order that does not depend on the file system; a part that is damaged counts as not there."""
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as stored:
                    part = {column: stored[column] for column in columns}
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue
            yield part
