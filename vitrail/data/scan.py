"""Scan images: decode each file once, on all cores, and cache the result for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL

from vitrail.atomic import atomic_write
from vitrail.data.decode import BadImage, decode
from vitrail.data.files import Entry, Files, read_error_reason
from vitrail.data.formats import CAN_READ_HEIF, HEAD_BYTES, UNSUPPORTED_FORMAT, describe_non_image, detect_format
from vitrail.data.similar import DESCRIPTOR_SIZE, descriptor
from vitrail.data.traits import Trait, read_traits

Progress = Callable[[int, int], None]

_CACHE_VERSION = 4
# Columns of a ScanResult -> their names in the scan cache and in packed folders.
SCAN_COLUMNS = {
    "digests": "digests",
    "shapes": "shapes",
    "traits": "traits",
    "descriptors": "looks",
    "pixel_digests": "pixels",
}
_MAX_CACHED = 2_000_000  # files per cache; beyond that the least recently scanned ones are dropped
_BATCH = 4096  # files submitted at once, so that a million files need no million futures
_HASHED_ROWS = 128  # rows of pixels in a pixel digest
_GREY_TOLERANCE = 3  # levels between red, green and blue that are invisible


@dataclass(frozen=True)
class ScanResult:
    """The result of a scan, one row per entry. Rows with a problem and unknown values are zeros."""

    digests: np.ndarray  # uint8 (n, 16): of the bytes
    shapes: np.ndarray  # int32 (n, 2): height, width
    problems: dict[int, str]  # row -> why the image cannot be used
    traits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))  # (n,): bits of Trait
    descriptors: np.ndarray = field(default_factory=lambda: np.zeros((0, DESCRIPTOR_SIZE), np.int8))  # (n, 64)
    pixel_digests: np.ndarray = field(default_factory=lambda: np.zeros((0, 8), np.uint8))  # (n, 8)
    # Digests before `vitrail pack` resized the images; the same as above for other data.
    original_digests: np.ndarray = field(default_factory=lambda: np.zeros((0, 16), np.uint8))
    original_pixel_digests: np.ndarray = field(default_factory=lambda: np.zeros((0, 8), np.uint8))

    def __post_init__(self) -> None:
        for name in ("traits", "descriptors", "pixel_digests"):
            column = getattr(self, name)
            if not len(column):
                object.__setattr__(self, name, np.zeros((len(self.digests), *column.shape[1:]), column.dtype))
        for name in ("digests", "pixel_digests"):
            if not len(getattr(self, f"original_{name}")):
                object.__setattr__(self, f"original_{name}", getattr(self, name))

    def rows(self, chosen: Sequence[int]) -> ScanResult:
        """Return the scan of these rows; rows may be reordered or repeated."""
        problems = {new: self.problems[old] for new, old in enumerate(chosen) if old in self.problems}
        columns = (*SCAN_COLUMNS, "original_digests", "original_pixel_digests")
        return ScanResult(**{name: getattr(self, name)[list(chosen)] for name in columns}, problems=problems)


def scan(files: Files, entries: Sequence[Entry], max_pixels: int, progress: Progress | None = None) -> ScanResult:
    """Decode every file once, on all cores. Files that are unchanged since an earlier scan are not opened."""
    result = ScanResult(np.zeros((len(entries), 16), np.uint8), np.zeros((len(entries), 2), np.int32), {})
    cache = _Cache(files, entries, max_pixels)
    known = cache.load_into(result)
    remaining = np.flatnonzero(~known)
    done = len(entries) - len(remaining)
    if progress:
        progress(done, len(entries))
    if not len(remaining):
        return result
    try:
        with contextlib.closing(_scan_rows(files, entries, remaining, max_pixels)) as scanned:
            for row, image in scanned:
                result.digests[row], result.shapes[row] = np.frombuffer(image.digest, np.uint8), image.shape
                result.traits[row], result.descriptors[row] = image.traits, image.descriptor
                result.pixel_digests[row] = np.frombuffer(image.pixel_digest, np.uint8)
                known[row] = image.cacheable
                if image.problem:
                    result.problems[row] = image.problem
                done += 1
                if progress and (done % 32 == 0 or done == len(entries)):
                    progress(done, len(entries))
    finally:  # an interrupted scan resumes from here
        cache.save(result, known)
    return result


def find_unreadable(files: Files, entries: Sequence[Entry], progress: Progress | None = None) -> dict[int, str]:
    """Return row -> why the file cannot be read. Nothing is decoded."""

    def read(row: int) -> str:
        try:
            files.read(entries[row].name)
        except OSError as error:
            return read_error_reason(error)
        return ""

    problems: dict[int, str] = {}
    with threads() as pool:
        for start in range(0, len(entries), _BATCH):
            rows = range(start, min(start + _BATCH, len(entries)))
            problems |= {row: reason for row, reason in zip(rows, pool.map(read, rows), strict=True) if reason}
            if progress:
                progress(rows.stop, len(entries))
    return problems


@contextlib.contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Provide a pool with one thread per core. On an error, pending work is cancelled and not waited for."""
    pool = ThreadPoolExecutor(cores(), thread_name_prefix="vitrail")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def cores() -> int:
    """Return the number of cores this process may use; in a container it can be less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Return the cache folder: $VITRAIL_CACHE, else the cache folder of the user."""
    if folder := os.environ.get("VITRAIL_CACHE"):
        return Path(folder)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "vitrail"


class ScannedImage(NamedTuple):
    """The scan of one file."""

    digest: bytes = bytes(16)
    shape: tuple[int, int] = (0, 0)
    problem: str = ""
    cacheable: bool = True  # valid until the file changes
    traits: int = 0
    descriptor: np.ndarray | int = 0
    pixel_digest: bytes = bytes(8)


def scan_image(data: bytes, name: str, max_pixels: int) -> ScannedImage:
    """Decode one file and describe it."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    try:
        pixels = decode(data, max_pixels=max_pixels)
    except BadImage as error:
        kind = "" if detect_format(data[:HEAD_BYTES]) else describe_non_image(data)
        return ScannedImage(digest, problem=f"{error}; it is {kind}" if kind else str(error))
    traits = read_traits(data, name)
    if _is_grey(pixels):
        traits |= Trait.GREY
    return ScannedImage(
        digest, pixels.shape[:2], traits=int(traits), descriptor=descriptor(pixels), pixel_digest=digest_pixels(pixels)
    )


def digest_pixels(pixels: np.ndarray) -> bytes:
    """Return a digest that is equal for the same pixels in another format or with other metadata.

    For a tall image it uses evenly spaced rows: all rows would take half the time of decoding, and distinguish no more
    photos.
    """
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels[:: -(-len(pixels) // _HASHED_ROWS)]).data)
    return digest.digest()


def _scan_rows(
    files: Files, entries: Sequence[Entry], rows: np.ndarray, max_pixels: int
) -> Generator[tuple[int, ScannedImage]]:
    def read_and_scan(row: int) -> ScannedImage:
        try:
            data = files.read(entries[row].name)
        except OSError as error:  # may succeed later with the file unchanged, so it is not cached
            return ScannedImage(problem=read_error_reason(error), cacheable=False)
        return scan_image(data, entries[row].name, max_pixels)

    with threads() as pool:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH].tolist()
            yield from zip(batch, pool.map(read_and_scan, batch), strict=True)


def _is_grey(pixels: np.ndarray) -> bool:
    """Whether sampled pixels have no colour: grey images are often stored in colour."""
    height, width, _ = pixels.shape
    for divisor in (2, 3, 5, 7):  # for most colour images one pixel is enough
        pixel = pixels[height // divisor, width // divisor].tolist()
        if max(pixel) - min(pixel) > _GREY_TOLERANCE:
            return False
    sample = pixels[:: max(1, height // 48), :: max(1, width // 48)].reshape(-1, 3)
    return bool((sample.max(axis=1) - sample.min(axis=1)).max() <= _GREY_TOLERANCE)


class _Cache:
    """The results of earlier scans of one folder or archive, as plain arrays. An unusable cache is ignored."""

    def __init__(self, files: Files, entries: Sequence[Entry], max_pixels: int) -> None:
        location, version = files.identity
        name = hashlib.blake2b(os.fsencode(location), digest_size=16).hexdigest()
        self.path = cache_folder() / "scans" / f"{name}.npz"
        self.header = f"{_CACHE_VERSION} {PIL.__version__} {CAN_READ_HEIF} {max_pixels} {version}"
        self.names = [entry.name for entry in entries]
        self.sizes = np.array([entry.size for entry in entries], np.int64)
        self.stamps = np.array([entry.stamp for entry in entries], np.int64)

    def load_into(self, result: ScanResult) -> np.ndarray:
        """Fill in the rows of unchanged files; return which rows those are, bool (n,)."""
        old = self._stored()
        if old is None:
            return np.zeros(len(self.names), bool)
        row_of = {name: row for row, name in enumerate(old.names)}
        rows = np.array([row_of.get(name, -1) for name in self.names], np.int64)
        same = rows >= 0
        for key, current in (("sizes", self.sizes), ("stamps", self.stamps)):
            same[same] = old.columns[key][rows[same]] == current[same]
        for name, key in SCAN_COLUMNS.items():
            getattr(result, name)[same] = old.columns[key][rows[same]]
        result.problems.update({int(r): old.problems[rows[r]] for r in np.flatnonzero(same) if rows[r] in old.problems})
        return same

    def save(self, result: ScanResult, known: np.ndarray) -> None:
        """Store the known rows, followed by the rows of earlier scans for other files of the same folder."""
        columns = {"sizes": self.sizes, "stamps": self.stamps}
        columns |= {key: getattr(result, name) for name, key in SCAN_COLUMNS.items()}
        parts = [(_Rows(self.names, columns, result.problems), np.flatnonzero(known))]
        old = self._stored()
        if old is not None:
            listed = set(self.names)
            others = np.array([row for row, name in enumerate(old.names) if name not in listed], np.int64)
            parts.append((old, others[: max(0, _MAX_CACHED - len(parts[0][1]))]))
        names = [part.names[row] for part, rows in parts for row in rows.tolist()]
        reasons = [part.problems.get(row, "") for part, rows in parts for row in rows.tolist()]
        bad = np.array([row for row, reason in enumerate(reasons) if reason], np.int64)
        stored: dict[str, Any] = {"names": _join(names), "bad": bad, "reasons": _join(filter(None, reasons))}
        stored |= {key: np.concatenate([part.columns[key][rows] for part, rows in parts]) for key in columns}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as temporary, temporary.open("wb") as file:
                np.savez(file, header=np.array(self.header), **stored)

    def _stored(self) -> _Rows | None:
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                if str(stored["header"]) != self.header:
                    return None
                names, bad = _split(stored["names"]), stored["bad"].tolist()
                # "not read: " is how earlier versions of vitrail began these reasons
                reasons = [re.sub("^not read: ", UNSUPPORTED_FORMAT, reason) for reason in _split(stored["reasons"])]
                columns = {key: stored[key] for key in ("sizes", "stamps", *SCAN_COLUMNS.values())}
        except Exception:  # missing, cut short or written by another program: scan again
            return None
        complete = len(bad) == len(reasons) and all(len(column) == len(names) for column in columns.values())
        return _Rows(names, columns, dict(zip(bad, reasons, strict=True))) if complete else None


class _Rows(NamedTuple):
    """The cached rows of files."""

    names: list[str]
    columns: dict[str, np.ndarray]  # sizes, stamps and SCAN_COLUMNS, each of the length of the names
    problems: dict[int, str]  # row -> why the image cannot be used


def _join(texts: Iterable[str]) -> np.ndarray:
    """Return many strings as one array of bytes. Each ends in a NUL, which file names cannot contain."""
    return np.frombuffer("".join(f"{text}\0" for text in texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split(joined: np.ndarray) -> list[str]:
    return joined.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
