"""Which files are pictures: decode each once, on all cores, and remember the outcome for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import os
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
from vitrail.data.formats import CAN_READ_HEIF, HEAD_BYTES, describe_non_image, detect_format
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
_REMEMBERED = 2_000_000  # files of one place, beyond which those that were not asked for the longest are forgotten
_BATCH = 4096  # files handed to the threads at a time, so that a million of them need no million futures
_HASHED = 128  # rows of pixels that go into a digest
_FAINT = 3  # levels between red, green and blue that nobody sees


@dataclass(frozen=True)
class ScanResult:
    """What decoding found, row by row beside the entries. Rows with a problem, and what is not known, have zeros."""

    digests: np.ndarray  # uint8 (n, 16): of the bytes
    shapes: np.ndarray  # int32 (n, 2): height, width
    problems: dict[int, str]  # row -> why it is no picture
    traits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))  # (n,): bits of Trait
    descriptors: np.ndarray = field(default_factory=lambda: np.zeros((0, DESCRIPTOR_SIZE), np.int8))  # (n, 64)
    pixel_digests: np.ndarray = field(default_factory=lambda: np.zeros((0, 8), np.uint8))  # (n, 8)
    # Digests of the bytes and of the pixels as they were before packing made images smaller; else the same as above
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
        """The same for some of the rows, in another order or again."""
        problems = {new: self.problems[old] for new, old in enumerate(chosen) if old in self.problems}
        columns = (*SCAN_COLUMNS, "original_digests", "original_pixel_digests")
        return ScanResult(**{name: getattr(self, name)[list(chosen)] for name in columns}, problems=problems)


def scan(files: Files, entries: Sequence[Entry], max_pixels: int, progress: Progress | None = None) -> ScanResult:
    """Decode every file once, on all cores. Files that have not changed since an earlier scan are not opened again."""
    result = ScanResult(np.zeros((len(entries), 16), np.uint8), np.zeros((len(entries), 2), np.int32), {})
    cache = _Cache(files, entries, max_pixels)
    known = cache.load_into(result)
    waiting = np.flatnonzero(~known)
    done = len(entries) - len(waiting)
    if progress:
        progress(done, len(entries))
    if not len(waiting):
        return result
    try:
        found = _look_at_all(files, entries, waiting, max_pixels)
        with contextlib.closing(found):
            for row, seen in found:
                result.digests[row], result.shapes[row] = np.frombuffer(seen.digest, np.uint8), seen.shape
                result.traits[row], result.descriptors[row] = seen.traits, seen.descriptor
                result.pixel_digests[row] = np.frombuffer(seen.pixel_digest, np.uint8)
                known[row] = seen.lasting
                if seen.problem:
                    result.problems[row] = seen.problem
                done += 1
                if progress and (done % 32 == 0 or done == len(entries)):
                    progress(done, len(entries))
    finally:  # an interrupted scan goes on where it stopped
        cache.save(result, known)
    return result


def find_unreadable(files: Files, entries: Sequence[Entry], progress: Progress | None = None) -> dict[int, str]:
    """Row -> why its bytes cannot be had; nothing is decoded."""

    def read(row: int) -> str:
        try:
            files.read(entries[row].name)
        except OSError as error:
            return read_error_reason(error)
        return ""

    found: dict[int, str] = {}
    with threads() as pool:
        for start in range(0, len(entries), _BATCH):
            rows = range(start, min(start + _BATCH, len(entries)))
            found |= {row: reason for row, reason in zip(rows, pool.map(read, rows), strict=True) if reason}
            if progress:
                progress(rows.stop, len(entries))
    return found


@contextlib.contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """One for each core. Whoever stops in the middle does not wait for them; what they have not begun is left."""
    pool = ThreadPoolExecutor(cores(), thread_name_prefix="vitrail")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def cores() -> int:
    """How many processor cores this process may use, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Where vitrail keeps what it can compute again: $VITRAIL_CACHE, else the user's cache folder."""
    if own := os.environ.get("VITRAIL_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "vitrail"


class ScannedImage(NamedTuple):
    """What one file turned out to be."""

    digest: bytes = bytes(16)
    shape: tuple[int, int] = (0, 0)
    problem: str = ""
    lasting: bool = True  # until the file changes
    traits: int = 0
    descriptor: np.ndarray | int = 0
    pixel_digest: bytes = bytes(8)


def scan_image(data: bytes, name: str, max_pixels: int) -> ScannedImage:
    """Look at the bytes of one file."""
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
    """The same for the same picture in another format, or with other metadata beside it. Of a tall one some rows are
    looked at, evenly: all of them would take half as long as decoding, and tell no more photos apart."""
    whole = hashlib.blake2b(str(pixels.shape).encode(), digest_size=8)
    whole.update(np.ascontiguousarray(pixels[:: -(-len(pixels) // _HASHED)]).data)
    return whole.digest()


def _look_at_all(
    files: Files, entries: Sequence[Entry], rows: np.ndarray, max_pixels: int
) -> Generator[tuple[int, ScannedImage]]:
    def read_and_see(row: int) -> ScannedImage:
        try:
            data = files.read(entries[row].name)
        except OSError as error:  # may be mended without the file changing, so it is not remembered
            return ScannedImage(problem=read_error_reason(error), lasting=False)
        return scan_image(data, entries[row].name, max_pixels)

    with threads() as pool:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH].tolist()
            yield from zip(batch, pool.map(read_and_see, batch), strict=True)


def _is_grey(pixels: np.ndarray) -> bool:
    """Whether pixels here and there have no colour: grey pictures are often stored as coloured ones."""
    height, width, _ = pixels.shape
    for share in (2, 3, 5, 7):  # one pixel tells of most pictures that they are coloured
        one = pixels[height // share, width // share].tolist()
        if max(one) - min(one) > _FAINT:
            return False
    few = pixels[:: max(1, height // 48), :: max(1, width // 48)].reshape(-1, 3)
    return bool((few.max(axis=1) - few.min(axis=1)).max() <= _FAINT)


class _Cache:
    """The outcome of earlier scans of one place, as plain arrays. A cache that cannot be used is no error."""

    def __init__(self, files: Files, entries: Sequence[Entry], max_pixels: int) -> None:
        place, version = files.identity
        name = hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()
        self.path = cache_folder() / "scans" / f"{name}.npz"
        self.header = f"{_CACHE_VERSION} {PIL.__version__} {CAN_READ_HEIF} {max_pixels} {version}"
        self.names = [entry.name for entry in entries]
        self.sizes = np.array([entry.size for entry in entries], np.int64)
        self.stamps = np.array([entry.stamp for entry in entries], np.int64)

    def load_into(self, result: ScanResult) -> np.ndarray:
        """Fill the rows of files that are as they were; returns which rows those are."""
        old = self._stored()
        if old is None:
            return np.zeros(len(self.names), bool)
        row_of = {name: row for row, name in enumerate(old.names)}
        rows = np.array([row_of.get(name, -1) for name in self.names], np.int64)
        same = rows >= 0
        for key, own in (("sizes", self.sizes), ("stamps", self.stamps)):
            same[same] = old.columns[key][rows[same]] == own[same]
        for name, key in SCAN_COLUMNS.items():
            getattr(result, name)[same] = old.columns[key][rows[same]]
        result.problems.update({int(r): old.problems[rows[r]] for r in np.flatnonzero(same) if rows[r] in old.problems})
        return same

    def save(self, result: ScanResult, known: np.ndarray) -> None:
        """What is known now, and after it what earlier scans of the same place saw beside it."""
        columns = {"sizes": self.sizes, "stamps": self.stamps}
        columns |= {key: getattr(result, name) for name, key in SCAN_COLUMNS.items()}
        parts = [(_Rows(self.names, columns, result.problems), np.flatnonzero(known))]
        old = self._stored()
        if old is not None:
            listed = set(self.names)
            others = np.array([row for row, name in enumerate(old.names) if name not in listed], np.int64)
            parts.append((old, others[: max(0, _REMEMBERED - len(parts[0][1]))]))
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
                names, bad, reasons = _split(stored["names"]), stored["bad"].tolist(), _split(stored["reasons"])
                columns = {key: stored[key] for key in ("sizes", "stamps", *SCAN_COLUMNS.values())}
        except Exception:  # absent, cut short or written by something else: scan again
            return None
        whole = len(bad) == len(reasons) and all(len(column) == len(names) for column in columns.values())
        return _Rows(names, columns, dict(zip(bad, reasons, strict=True))) if whole else None


class _Rows(NamedTuple):
    """Files and what is known of each."""

    names: list[str]
    columns: dict[str, np.ndarray]  # sizes, stamps and SCAN_COLUMNS, each of the length of the names
    problems: dict[int, str]  # row -> why it is no picture


def _join(texts: Iterable[str]) -> np.ndarray:
    """Many texts as one array of bytes; each ends in a NUL, which no file name holds."""
    return np.frombuffer("".join(f"{text}\0" for text in texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split(joined: np.ndarray) -> list[str]:
    return joined.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
