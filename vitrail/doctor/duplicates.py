"""Duplicate images: identical bytes, or near duplicates (the same image in other bytes), within and across splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.decode import BadImage, decode
from vitrail.data.scan import Progress, ScanResult, threads
from vitrail.data.similar import Pairs, connected_components, similar_pairs
from vitrail.data.sources.data_source import DataSource, counted
from vitrail.doctor.findings import Case, Finding
from vitrail.doctor.thumbnails import SAME_IMAGE, SIDE, thumbnail, thumbnail_similarity

# With more close pairs per image than this, all images look alike (digits on black, say): stricter limits apply.
MAX_PAIRS_PER_IMAGE = 8
STRICT_COSINE, STRICT_SAME_IMAGE = 0.97, 0.99  # these limits, for descriptors and for thumbnails
MAX_LEAK_FRACTION = 0.05  # of a split; more near-leaks than this are probably a common layout, not copies
MIN_LEAKS = 10  # up to this many near-leaks are listed whatever their fraction: a user can look through them
_CANDIDATES = 3  # images of each split that an image is compared with
_DECODE_BATCH, _COMPARE_BATCH = 1024, 64  # pairs decoded together, and pairs compared together
_LEAK_ADVICE = "The accuracy measured on them is too high. Exclude the copies from training: quarantine.csv lists them."
_LAYOUT_ADVICE = (
    "So many images look alike that they probably share a layout (screens, forms, scans). Look at them. "
    "quarantine.csv does not list them."
)
_PRIORITY = {"train": 0, "val": 1, "test": 2}  # an image in two splits is removed from the one with the lower priority


class Match(NamedTuple):
    """A near duplicate: the rows of one file content, the rows of the other, and their similarity."""

    left: list[int]
    right: list[int]
    mirrored: bool
    score: float


def group_identical(source: DataSource, digests: np.ndarray, rows: Iterable[int]) -> list[list[int]]:
    """Group rows by file content. One file listed in two splits (as by ImageNet ReaL) is not a duplicate."""
    by_digest: dict[bytes, dict[str, int]] = {}
    for row in rows:
        by_digest.setdefault(digests[row].tobytes(), {}).setdefault(source.entries[row].name, row)
    return [list(row_of_name.values()) for row_of_name in by_digest.values()]


def find_near_duplicates(
    source: DataSource, scan: ScanResult, identical: list[list[int]], max_pixels: int, progress: Progress | None
) -> list[Match]:
    """Find near duplicates among groups of identical files: pairs with close descriptors, compared as thumbnails."""
    first = [rows[0] for rows in identical]
    pairs = similar_pairs(scan.descriptors[first])
    threshold = SAME_IMAGE
    if len(pairs) > MAX_PAIRS_PER_IMAGE * len(identical):
        threshold, pairs = STRICT_SAME_IMAGE, pairs.keep(pairs.cosine >= STRICT_COSINE)
    split_ids = np.unique([source.splits[row] for row in first], return_inverse=True)[1]
    pairs = _closest_pairs(pairs, split_ids)

    def read_thumbnail(index: int) -> np.ndarray:
        try:
            return thumbnail(decode(source.files.read(source.entries[first[index]].name), max_pixels=max_pixels))
        except (OSError, BadImage):  # the file changed since the scan
            return np.zeros((SIDE, SIDE, 3), np.uint8)

    matches = []
    with threads() as pool:
        for start in range(0, len(pairs), _DECODE_BATCH):
            batch = pairs.keep(np.arange(start, min(start + _DECODE_BATCH, len(pairs))))
            needed, inverse = np.unique(np.stack([batch.left, batch.right]), return_inverse=True)
            thumbnails = np.stack(list(pool.map(read_thumbnail, needed.tolist())))
            left, right = thumbnails[inverse[0]], thumbnails[inverse[1]]
            right[batch.mirrored] = right[batch.mirrored][:, :, ::-1]
            slices = [slice(begin, begin + _COMPARE_BATCH) for begin in range(0, len(batch), _COMPARE_BATCH)]
            scores = np.concatenate(
                list(pool.map(lambda rows, a=left, b=right: thumbnail_similarity(a[rows], b[rows]), slices))
            )
            for pair in np.flatnonzero(scores >= threshold):
                left_rows, right_rows = identical[batch.left[pair]], identical[batch.right[pair]]
                matches.append(Match(left_rows, right_rows, bool(batch.mirrored[pair]), float(scores[pair])))
            if progress:
                progress(start + len(batch), len(pairs))
    return matches


def _closest_pairs(pairs: Pairs, split_ids: np.ndarray) -> Pairs:
    """For each image, keep the pairs with its closest few images of each split: their number stays linear in images."""
    keep = np.zeros(len(pairs), bool)
    for image, partner in ((pairs.left, pairs.right), (pairs.right, pairs.left)):
        order = np.lexsort((-pairs.cosine, split_ids[partner], image))
        key = np.stack([image[order], split_ids[partner][order]])
        starts = np.flatnonzero(np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)]) if len(order) else order
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        keep[order[rank < _CANDIDATES]] = True
    return pairs.keep(np.flatnonzero(keep))


def exact_findings(source: DataSource, identical: list[list[int]], reasons: dict[int, str]) -> list[Finding]:
    """Findings on files with identical bytes. Adds the rows that training should exclude to `reasons`."""
    leaks, conflicts, redundant = [], [], []
    for rows in identical:
        if len(rows) == 1:
            continue
        ranked = sorted(rows, key=lambda row: -_priority(source, row))
        if len({source.labels[row] for row in rows}) > 1:
            conflicts.append(_case(source, rows, " / ".join(dict.fromkeys(_label(source, row) for row in rows))))
            for row in rows:
                other = next(other for other in rows if source.labels[other] != source.labels[row])
                reasons[row] = f"same bytes as '{_name(source, other)}', which is labelled {_label(source, other)}"
        best = ranked[0]
        if _priority(source, ranked[-1]) != _priority(source, best):
            leaks.append(_case(source, ranked, " and ".join(dict.fromkeys(source.splits[row] for row in ranked))))
            for row in rows:
                if source.splits[row] != source.splits[best]:
                    reasons.setdefault(row, f"same bytes as '{_name(source, best)}' in {source.splits[best]}")
        remaining = [row for row in ranked if row not in reasons]
        if len(remaining) > 1:
            redundant.append(_case(source, remaining, f"{len(remaining)} times"))
            for row in remaining[1:]:
                reasons[row] = f"same bytes as '{_name(source, remaining[0])}'"
    return [
        Finding(
            "leak",
            f"{counted(len(leaks), 'image')} in more than one split (identical files).",
            "The accuracy measured on them is too high. Exclude the copies from training: quarantine.csv lists them.",
            leaks,
        ),
        Finding(
            "conflict",
            f"{counted(len(conflicts), 'image')} stored more than once with different labels (identical files).",
            "At most one of the labels is correct. Correct the labels. Until then, exclude all copies from training: "
            "quarantine.csv lists them.",
            conflicts,
        ),
        Finding(
            "duplicate",
            f"{counted(len(redundant), 'image')} more than once in one split, with the same label (identical files).",
            "Each copy counts again in training and in the scores. quarantine.csv lists all but the first.",
            redundant,
        ),
    ]


def near_findings(source: DataSource, matches: Sequence[Match], reasons: dict[int, str]) -> list[Finding]:
    """Findings on near duplicates. Adds those across splits to `reasons`, unless there are so many that the images
    probably share a layout."""
    leaks = _near_leaks(source, matches, reasons)
    conflicts, same_split = [], []
    for match in sorted(matches, key=lambda match: -match.score):
        labels = {source.labels[row] for row in match.left + match.right}
        if len(labels) > 1:
            pairs = ((left, right) for left in match.left for right in match.right)
            pair = next(pair for pair in pairs if source.labels[pair[0]] != source.labels[pair[1]])
            names = " / ".join(_label(source, row) for row in pair)
            conflicts.append(_case(source, pair, f"{names}; {_similarity(match)}"))
        elif len({source.splits[row] for row in match.left + match.right}) == 1:
            same_split.append(match)
    layout = _probably_layout(source, leaks)
    for row, (match, other) in leaks.items() if not layout else ():
        reasons[row] = f"looks like '{_name(source, other)}' in {source.splits[other]} ({_similarity(match)})"
    groups = _group_cases(source, same_split)
    return [
        Finding(
            "near-leak",
            f"{counted(len(leaks), 'image')} with a near duplicate in another split: re-encoded, resized, mirrored or "
            "taken at the same moment.",
            _LAYOUT_ADVICE if layout else _LEAK_ADVICE,
            [
                _case(source, (row, other), f"{source.splits[row]} and {source.splits[other]}; {_similarity(match)}")
                for row, (match, other) in leaks.items()
            ],
        ),
        Finding(
            "near-conflict",
            f"{counted(len(conflicts), 'pair')} of images that look the same and have different labels.",
            "One of the labels may be wrong. Look at both images.",
            conflicts,
        ),
        Finding(
            "near-duplicate",
            f"{counted(len(groups), 'group')} of near duplicates in the same split with the same label.",
            "They add less than the same number of different images. When vitrail splits the data, it keeps each group "
            "in one split.",
            groups,
        ),
    ]


def _probably_layout(source: DataSource, leaks: Iterable[int]) -> bool:
    """Whether excluding these rows would remove so much of a split that they probably share a layout."""
    leaked, images = Counter(source.splits[row] for row in leaks), Counter(source.splits)
    return any(rows > max(MIN_LEAKS, MAX_LEAK_FRACTION * images[split]) for split, rows in leaked.items())


def _near_leaks(source: DataSource, matches: Sequence[Match], reasons: dict[int, str]) -> dict[int, tuple[Match, int]]:
    """Row of a lower-priority split -> its best match in a higher-priority one, best first. Skips excluded rows."""
    best: dict[int, tuple[Match, int]] = {}
    for match in sorted(matches, key=lambda match: -match.score):
        for rows, partners in ((match.left, match.right), (match.right, match.left)):
            other = max(partners, key=lambda row: _priority(source, row))
            for row in rows:
                if _priority(source, row) < _priority(source, other) and row not in reasons:
                    best.setdefault(row, (match, other))
    return best


def _group_cases(source: DataSource, matches: Sequence[Match]) -> list[Case]:
    """One case for each connected group of matches. `matches` and the result are sorted best first."""
    rows = sorted({row for match in matches for row in (match.left[0], match.right[0])})
    index = {row: number for number, row in enumerate(rows)}
    left = np.array([index[match.left[0]] for match in matches], np.int64)
    right = np.array([index[match.right[0]] for match in matches], np.int64)
    groups = connected_components(len(rows), left, right).tolist()
    members: dict[int, list[int]] = {}
    for row, group in zip(rows, groups, strict=True):
        members.setdefault(group, []).append(row)
    worst = {groups[index[match.left[0]]]: match for match in matches}
    return [
        _case(source, members[group], _similarity(match, at_least=len(members[group]) > 2))
        for group, match in worst.items()
    ]


def _similarity(match: Match, at_least: bool = False) -> str:
    mirrored = ", mirrored" if match.mirrored and not at_least else ""
    return f"{'at least ' if at_least else ''}{min(match.score, 0.999):.1%} alike{mirrored}"


def _priority(source: DataSource, row: int) -> int:
    return _PRIORITY.get(source.splits[row], 0)


def _name(source: DataSource, row: int) -> str:
    return source.entries[row].name


def _label(source: DataSource, row: int) -> str:
    return "|".join(source.labels[row]) or "no label"


def _case(source: DataSource, rows: Iterable[int], detail: str) -> Case:
    return Case(tuple(_name(source, row) for row in rows), detail)
