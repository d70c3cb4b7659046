"""A cache of image features on disk, by image content.

Features are written in parts while they are computed, each part atomically. So memory use is constant, an interrupted
run keeps what it has computed, and several processes can write at the same time.
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
PART_SIZE = 4096  # images per file


class FeatureCache:
    """The cached features of one network with one preprocessing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def for_network(cls, net: nn.Module, spec: Preprocess, device: torch.device) -> FeatureCache:
        """The cache for a network, in a folder whose name depends on weights, preprocessing and device type."""
        name = hashlib.blake2b(f"{VERSION} {device.type} {spec.model_dump_json()}".encode(), digest_size=16)
        for key, tensor in net.state_dict().items():
            if not key.startswith("head."):  # not used for features
                name.update(key.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return cls(cache_folder() / "features" / name.hexdigest())

    def add(self, digests: np.ndarray, values: np.ndarray) -> None:
        """Store the features (m, D) of the images with these digests (m,)."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{secrets.token_hex(8)}.npz"
            with atomic_write(self.folder / name) as temporary, temporary.open("wb") as file:
                np.savez(file, digests=digests.astype(np.uint64), values=values.astype(np.float32))
        except OSError as error:
            reason = error_reason(error)
            raise UserError(
                f"cannot write features to {self.folder}: {reason}; set VITRAIL_CACHE to a folder with free space"
            ) from None

    def missing(self, digests: np.ndarray) -> np.ndarray:
        """Indices of the images without features, ascending; of images with the same content only the first."""
        known = [part["digests"] for part in self._parts("digests")]
        _, first = np.unique(digests, return_index=True)
        first = np.sort(first)
        return first[~np.isin(digests[first], np.concatenate([np.empty(0, np.uint64), *known]))]

    def rows(self, digests: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over (indices, features) of the images in the cache, one file at a time, each image once."""
        order = np.argsort(digests, kind="stable")
        missing = np.ones(len(digests), bool)
        for part in self._parts("digests", "values"):
            own, place = np.unique(part["digests"], return_index=True)
            at = np.searchsorted(own, digests[order])
            here = (at < len(own)) & (own[np.minimum(at, len(own) - 1)] == digests[order]) & missing[order]
            chosen = order[here]
            if len(chosen):
                missing[chosen] = False
                yield chosen, part["values"][place[at[here]]]

    def take(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The features of the images in the cache, in order, and a mask (n,) of these images."""
        cached, values = np.zeros(len(digests), bool), np.empty((0, 0), np.float32)
        for chosen, features in self.rows(digests):
            if not len(values):
                values = np.empty((len(digests), features.shape[1]), np.float32)
            values[chosen], cached[chosen] = features, True
        return values[cached] if len(values) else values, cached

    def _parts(self, *columns: str) -> Iterator[dict[str, np.ndarray]]:
        """Read all files, in the order of their names. Damaged files are skipped."""
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as stored:
                    part = {column: stored[column] for column in columns}
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue
            yield part
