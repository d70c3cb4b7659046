"""Copies among images: the same bytes, or the same picture in other bytes; what they mean across splits and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.decode import BadImage, decode
from vitrail.data.scan import Progress, ScanResult, threads
from vitrail.data.similar import Pairs, connected_components, similar_pairs
from vitrail.data.sources.image_list import ImageList, counted
from vitrail.doctor.findings import Case, Finding
from vitrail.doctor.thumbnails import SAME_IMAGE, SIDE, thumbnail, thumbnail_similarity

CROWDED = 8  # close pairs for each image from which the images are alike by nature, as digits on black are
CLOSE_IN_A_CROWD, SAME_IN_A_CROWD = 0.97, 0.99  # what counts there, of descriptions and of thumbnails
ALIKE_BY_NATURE = 0.05  # share of a split in near-leaks beyond which they are likely one layout and not copies
FEW = 10  # near-leaks that are listed whatever their share: so few are soon looked through
_PARTNERS = 3  # that are compared with an image, from each split
_AT_ONCE, _COMPARED = 1024, 64  # pairs whose images are decoded together, and that are compared in one go
_LEAKED = "An accuracy measured on them rewards memory. Leave the training images out: quarantine.csv lists them."
_BY_NATURE = (
    "So many images look alike that it is likely a common layout, as of screens, forms or scans: look at them. "
    "quarantine.csv does not list them."
)
_STRENGTH = {"train": 0, "val": 1, "test": 2}  # of two splits, the weaker one gives up what both have


class Match(NamedTuple):
    """The same picture in different bytes: the rows that have the one and the other, and how well they agree."""

    left: list[int]
    right: list[int]
    mirrored: bool
    score: float


def group_identical(source: ImageList, digests: np.ndarray, rows: Iterable[int]) -> list[list[int]]:
    """The rows, gathered by content. A file that stands in two splits, as ImageNet's "real" has, is no copy."""
    gathered: dict[bytes, dict[str, int]] = {}
    for row in rows:
        gathered.setdefault(digests[row].tobytes(), {}).setdefault(source.entries[row].name, row)
    return [list(named.values()) for named in gathered.values()]


def find_near_duplicates(
    source: ImageList, found: ScanResult, contents: list[list[int]], max_pixels: int, progress: Progress | None
) -> list[Match]:
    """Contents that show the same picture: those whose descriptions are close, compared as thumbnails."""
    first = [rows[0] for rows in contents]
    pairs = similar_pairs(found.descriptors[first])
    least = SAME_IMAGE
    if len(pairs) > CROWDED * len(contents):
        least, pairs = SAME_IN_A_CROWD, pairs.keep(pairs.cosine >= CLOSE_IN_A_CROWD)
    kinds = np.unique([source.splits[row] for row in first], return_inverse=True)[1]
    pairs = _closest(pairs, kinds)

    def small(place: int) -> np.ndarray:
        try:
            return thumbnail(decode(source.files.read(source.entries[first[place]].name), max_pixels=max_pixels))
        except (OSError, BadImage):  # it could be read a moment ago
            return np.zeros((SIDE, SIDE, 3), np.uint8)

    matches = []
    with threads() as pool:
        for start in range(0, len(pairs), _AT_ONCE):
            part = pairs.keep(np.arange(start, min(start + _AT_ONCE, len(pairs))))
            needed, places = np.unique(np.stack([part.left, part.right]), return_inverse=True)
            thumbnails = np.stack(list(pool.map(small, needed.tolist())))
            left, right = thumbnails[places[0]], thumbnails[places[1]]
            right[part.mirrored] = right[part.mirrored][:, :, ::-1]
            parts = [slice(one, one + _COMPARED) for one in range(0, len(part), _COMPARED)]
            scores = np.concatenate(
                list(pool.map(lambda few, a=left, b=right: thumbnail_similarity(a[few], b[few]), parts))
            )
            for one in np.flatnonzero(scores >= least):
                rows = contents[part.left[one]], contents[part.right[one]]
                matches.append(Match(*rows, bool(part.mirrored[one]), float(scores[one])))
            if progress:
                progress(start + len(part), len(pairs))
    return matches


def _closest(pairs: Pairs, kinds: np.ndarray) -> Pairs:
    """Of each image the pairs with the few closest images of each kind, so that their number stays in proportion."""
    keep = np.zeros(len(pairs), bool)
    for one, other in ((pairs.left, pairs.right), (pairs.right, pairs.left)):
        order = np.lexsort((-pairs.cosine, kinds[other], one))
        key = np.stack([one[order], kinds[other][order]])
        starts = np.flatnonzero(np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)]) if len(order) else order
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        keep[order[rank < _PARTNERS]] = True
    return pairs.keep(np.flatnonzero(keep))


def exact_findings(source: ImageList, contents: list[list[int]], reasons: dict[int, str]) -> list[Finding]:
    """Of contents that several rows have. `reasons` gets the rows that training should leave out, and why."""
    leaks, conflicts, redundant = [], [], []
    for rows in contents:
        if len(rows) == 1:
            continue
        ranked = sorted(rows, key=lambda row: -_strength(source, row))
        if len({source.labels[row] for row in rows}) > 1:
            conflicts.append(_case(source, rows, " / ".join(dict.fromkeys(_label(source, row) for row in rows))))
            for row in rows:
                other = next(other for other in rows if source.labels[other] != source.labels[row])
                reasons[row] = f"same bytes as '{_name(source, other)}', which is labelled {_label(source, other)}"
        best = ranked[0]
        if _strength(source, ranked[-1]) != _strength(source, best):
            leaks.append(_case(source, ranked, " and ".join(dict.fromkeys(source.splits[row] for row in ranked))))
            for row in rows:
                if source.splits[row] != source.splits[best]:
                    reasons.setdefault(row, f"same bytes as '{_name(source, best)}' in {source.splits[best]}")
        left = [row for row in ranked if row not in reasons]
        if len(left) > 1:
            redundant.append(_case(source, left, f"{len(left)} times"))
            for row in left[1:]:
                reasons[row] = f"same bytes as '{_name(source, left[0])}'"
    return [
        Finding(
            "leak",
            f"{counted(len(leaks), 'image')} in more than one split, byte for byte.",
            "An accuracy measured on them rewards memory. Leave the training copies out: quarantine.csv lists them.",
            leaks,
        ),
        Finding(
            "conflict",
            f"{counted(len(conflicts), 'image')} with different labels on copies that are the same byte for byte.",
            "At most one of the labels is right. Correct them; until then quarantine.csv lists all copies.",
            conflicts,
        ),
        Finding(
            "duplicate",
            f"{counted(len(redundant), 'image')} more than once in one split with the same label, byte for byte.",
            "Each copy counts again in training and in measuring. quarantine.csv lists all but the first.",
            redundant,
        ),
    ]


def near_findings(source: ImageList, matches: Sequence[Match], reasons: dict[int, str]) -> list[Finding]:
    """Of pictures in different bytes. Only copies on two sides of a split are added to `reasons`, and not even those
    when they are so many that the images must be alike by nature."""
    leaks = _leaks(source, matches, reasons)
    conflicts, within = [], []
    for match in sorted(matches, key=lambda match: -match.score):
        labels = {source.labels[row] for row in match.left + match.right}
        if len(labels) > 1:
            pairs = ((one, other) for one in match.left for other in match.right)
            pair = next(pair for pair in pairs if source.labels[pair[0]] != source.labels[pair[1]])
            names = " / ".join(_label(source, row) for row in pair)
            conflicts.append(_case(source, pair, f"{names}; {_likeness(match)}"))
        elif len({source.splits[row] for row in match.left + match.right}) == 1:
            within.append(match)
    by_nature = _alike_by_nature(source, leaks)
    for row, (match, other) in leaks.items() if not by_nature else ():
        reasons[row] = f"looks like '{_name(source, other)}' in {source.splits[other]} ({_likeness(match)})"
    return [
        Finding(
            "near-leak",
            f"{counted(len(leaks), 'image')} that another split has too, in other bytes: re-encoded, resized, mirrored "
            "or taken in the same moment.",
            _BY_NATURE if by_nature else _LEAKED,
            [
                _case(source, (row, other), f"{source.splits[row]} and {source.splits[other]}; {_likeness(match)}")
                for row, (match, other) in leaks.items()
            ],
        ),
        Finding(
            "near-conflict",
            f"{counted(len(conflicts), 'pair')} of images that look the same and have different labels.",
            "One of the labels may be wrong: look at both.",
            conflicts,
        ),
        Finding(
            "near-duplicate",
            f"{counted(len(groups := _grouped(source, within)), 'group')} of images that look the same, in one split "
            "and with one label.",
            "They teach less than their number says. When vitrail splits the data itself, it keeps them on one side.",
            groups,
        ),
    ]


def _alike_by_nature(source: ImageList, leaks: Iterable[int]) -> bool:
    """Whether leaving these rows out would cost a split too much: what shares a layout would all be thrown away."""
    taken, images = Counter(source.splits[row] for row in leaks), Counter(source.splits)
    return any(rows > max(FEW, ALIKE_BY_NATURE * images[split]) for split, rows in taken.items())


def _leaks(source: ImageList, matches: Sequence[Match], reasons: dict[int, str]) -> dict[int, tuple[Match, int]]:
    """Row of a weaker split -> the best match that a stronger one has, best first; unless it is left out anyway."""
    best: dict[int, tuple[Match, int]] = {}
    for match in sorted(matches, key=lambda match: -match.score):
        for ours, theirs in ((match.left, match.right), (match.right, match.left)):
            other = max(theirs, key=lambda row: _strength(source, row))
            for row in ours:
                if _strength(source, row) < _strength(source, other) and row not in reasons:
                    best.setdefault(row, (match, other))
    return best


def _grouped(source: ImageList, matches: Sequence[Match]) -> list[Case]:
    """Matches that share an image, as one case each; they come and go best first."""
    rows = sorted({row for match in matches for row in (match.left[0], match.right[0])})
    place = {row: number for number, row in enumerate(rows)}
    sides = ([place[getattr(match, side)[0]] for match in matches] for side in ("left", "right"))
    groups = connected_components(len(rows), *(np.array(side, np.int64) for side in sides)).tolist()
    members: dict[int, list[int]] = {}
    for row, group in zip(rows, groups, strict=True):
        members.setdefault(group, []).append(row)
    least = {groups[place[match.left[0]]]: match for match in matches}
    return [_case(source, members[group], _likeness(match, len(members[group]) > 2)) for group, match in least.items()]


def _likeness(match: Match, several: bool = False) -> str:
    mirrored = ", mirrored" if match.mirrored and not several else ""
    return f"{'at least ' if several else ''}{min(match.score, 0.999):.1%} alike{mirrored}"


def _strength(source: ImageList, row: int) -> int:
    return _STRENGTH.get(source.splits[row], 0)


def _name(source: ImageList, row: int) -> str:
    return source.entries[row].name


def _label(source: ImageList, row: int) -> str:
    return "|".join(source.labels[row]) or "nothing"


def _case(source: ImageList, rows: Iterable[int], detail: str) -> Case:
    return Case(tuple(_name(source, row) for row in rows), detail)
