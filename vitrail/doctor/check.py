"""The data doctor: everything about a data set that makes training or measuring go wrong."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.dataset import scan_source, usable_rows
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.files import NOT_FOUND
from vitrail.data.formats import NOT_SUPPORTED, SUPPORTED_FORMATS, by_extension
from vitrail.data.quarantine import UNREAD, QuarantineRow
from vitrail.data.scan import Progress, ScanResult
from vitrail.data.sources.image_list import UNSPLIT, ImageList, class_list, counted, quoted
from vitrail.data.sources.read import read_source
from vitrail.data.traits import Trait
from vitrail.doctor.duplicates import exact_findings, find_near_duplicates, group_identical, near_findings
from vitrail.doctor.findings import SEVERITY, Case, Finding, Findings
from vitrail.errors import UserError, user_path

LONG = 8  # a side this many times the other is an extreme shape
SHORT = 16  # pixels of a side
TINY, HUGE = 8, 64  # times smaller than the median side, times larger than the median area
FEW = 5  # images of a class
UNEVEN = 10  # times the images of the smallest class

_TRAITS = (
    (
        "misnamed",
        Trait.MISNAMED,
        "{} of another format than the file name says.",
        "Other programs may refuse them: rename the files.",
    ),
    (
        "rotated",
        Trait.ROTATED,
        "{} stored turned or mirrored, with a tag that says how.",
        "vitrail turns them upright. Other tools may not, so let both sides of a comparison use the same pixels.",
    ),
    (
        "cmyk",
        Trait.CMYK,
        "{} in the colours of print (CMYK).",
        "They are converted without a colour profile, so their colours may be off: better save them as RGB.",
    ),
    (
        "sixteen-bit",
        Trait.SIXTEEN_BIT,
        "{} with 16 bits a channel.",
        "They are scaled to 8 bits: what lies in the last bits is not seen.",
    ),
    (
        "wide",
        Trait.WIDE,
        "{} with 32 bits a pixel, integers or floats.",
        "Integers beyond 0 to 65,535 and floats beyond 0 to 255 are stretched from the smallest to the largest value "
        "of each image, so brightness cannot be compared: better save all with 8 or 16 bits.",
    ),
    ("animated", Trait.ANIMATED, "{} with several frames or pages.", "Only the first one is used."),
    (
        "alpha",
        Trait.ALPHA,
        "{} with transparency.",
        "Transparent pixels show white, or what preprocess.background says.",
    ),
    (
        "palette",
        Trait.PALETTE,
        "{} with a palette of at most 256 colours.",
        "They are converted to full colour: fine, if not all of one class are.",
    ),
)


def check_dataset(
    path: str | Path, *, max_pixels: int = MAX_PIXELS, follow: bool = True, progress: Progress | None = None
) -> Findings:
    """Look at every image at `path`, alone and beside the others. Nothing is changed."""
    notes: list[str] = []
    source = read_source(path, notes, follow=follow)
    found = scan_source(source, max_pixels, progress, verify=True)
    usable = usable_rows(source, found, path)
    contents = group_identical(source, found.digests, usable)
    matches = find_near_duplicates(source, found, contents, max_pixels, progress)
    reasons = {row: f"cannot be used: {why}" for row, why in found.problems.items()}
    balance = _counts(source, usable)
    findings = [
        _refused(source, path),
        *exact_findings(source, contents, reasons),
        *near_findings(source, matches, reasons),
        _torn(source, usable),
        *_unusable(source, found),
        *_uneven(balance, source),
        _shapes(source, found, usable),
        _grey(source, found, usable),
        *_traits(source, found, usable),
    ]
    findings = [finding for finding in findings if finding.cases]
    order = list(SEVERITY)
    return Findings(
        root=os.path.normpath(user_path(path).absolute()),
        source=source,
        usable=len(usable),
        balance=balance,
        findings=sorted(findings, key=lambda finding: order.index(finding.kind)),
        quarantine=_quarantine(source, found, reasons),
        notes=[*notes, *_emptied(source, usable, reasons)],
        rows={entry.name: row for row, entry in enumerate(source.entries)},
    )


def _refused(source: ImageList, path: str | Path) -> Finding:
    """Classes that training does not take, as one that only a test split has."""
    try:
        class_list(source, None, path)
    except UserError as error:
        return Finding(
            "classes", "The classes cannot be trained on.", "Training would refuse them.", [Case((str(error),))]
        )
    return Finding("classes", "", "")


def _quarantine(source: ImageList, found: ScanResult, reasons: dict[int, str]) -> list[QuarantineRow]:
    rows = [
        QuarantineRow(
            source.entries[row].name,
            found.digests[row].tobytes().hex(),
            reasons[row],
        )
        for row in sorted(reasons)
    ]
    return rows + [QuarantineRow(name, UNREAD, f"cannot be used: {why}") for name, why in source.unreadable]


def _emptied(source: ImageList, usable: Sequence[int], reasons: dict[int, str]) -> list[str]:
    """Classes that the quarantine would leave nothing to learn from."""
    training = [row for row in usable if source.splits[row] in ("train", UNSPLIT)]
    before = {name for row in training for name in source.labels[row]}
    after = {name for row in training if row not in reasons for name in source.labels[row]}
    lost = sorted(before - after)
    return (
        [f"With quarantine.csv no training image is left of {quoted(lost)}: mend or move some first."] if lost else []
    )


def _counts(source: ImageList, usable: Sequence[int]) -> dict[str, dict[str, int]]:
    """Class -> split -> images, for every class and split there is."""
    counts = Counter((name, source.splits[row]) for row in usable for name in source.labels[row])
    names = source.classes or sorted({name for labels in source.labels for name in labels})
    splits = [split for split in ("train", "val", "test", UNSPLIT) if split in source.splits]
    return {name: {split: counts[name, split] for split in splits} for name in names}


def _torn(source: ImageList, usable: Sequence[int]) -> Finding:
    sides: dict[str, dict[str, int]] = {}  # group -> split -> its first row there
    for row in usable:
        if source.groups is not None and source.groups[row]:
            sides.setdefault(source.groups[row], {}).setdefault(source.splits[row], row)
    torn = {group: rows for group, rows in sides.items() if len(rows) > 1}
    return Finding(
        "torn-group",
        f"{counted(len(torn), 'group')} of images with a part in more than one split.",
        "What belongs together should be on one side, or an accuracy rewards memory: correct the split column.",
        [
            Case(tuple(source.entries[row].name for row in rows.values()), f"{group}: {', '.join(rows)}")
            for group, rows in sorted(torn.items())
        ],
    )


def _unusable(source: ImageList, found: ScanResult) -> list[Finding]:
    """Broken files, pictures of formats that are not read, and files that are not there."""
    bad = source.unreadable + [(source.entries[row].name, found.problems[row]) for row in sorted(found.problems)]
    cases: dict[str, list[Case]] = {"corrupt": [], "format": [], "missing": []}
    for name, reason in bad:
        missing, foreign = reason.startswith(NOT_FOUND), reason.startswith(NOT_SUPPORTED)
        cases["missing" if missing else "format" if foreign else "corrupt"].append(Case((name,), reason))
    kinds = by_extension(case.names[0] for case in cases["format"])
    return [
        Finding(
            "corrupt",
            f"{counted(len(cases['corrupt']), 'file')} that cannot be used.",
            "Training leaves them out by itself. Copy or download them again, or delete them.",
            cases["corrupt"],
        ),
        Finding(
            "format",
            f"{counted(len(cases['format']), 'picture')} of formats that are not read here: {kinds}.",
            f"Training leaves them out. vitrail reads {SUPPORTED_FORMATS}.",
            cases["format"],
        ),
        Finding(
            "missing",
            f"{counted(len(cases['missing']), 'file')} that is not there."
            if len(cases["missing"]) == 1
            else f"{counted(len(cases['missing']), 'file')} that are not there.",
            "A list or a link names them: copy the files to where it says, or correct it.",
            cases["missing"],
        ),
    ]


def _uneven(balance: dict[str, dict[str, int]], source: ImageList) -> list[Finding]:
    learned = "train" if "train" in source.splits else UNSPLIT
    sizes = {name: counts.get(learned, 0) for name, counts in balance.items()}
    missing = [
        Case((), f"{name}: no images in {', '.join(absent)}")
        for name, counts in balance.items()
        if (absent := [split for split, images in counts.items() if not images])
    ]
    few = [Case((), f"{name}: {counted(images, 'image')}") for name, images in sizes.items() if 0 < images < FEW]
    smallest, largest = (choose(sizes, key=lambda name: sizes[name]) for choose in (min, max))
    uneven = sizes[smallest] and sizes[largest] >= UNEVEN * sizes[smallest]
    words = f"{largest}: {counted(sizes[largest], 'image')}; {smallest}: {counted(sizes[smallest], 'image')}"
    return [
        Finding(
            "missing-class",
            f"{counted(len(missing), 'class')} without usable images in a split.",
            "What has no training images is never answered; what has no others is never measured.",
            missing,
        ),
        Finding(
            "few-images",
            f"{counted(len(few), 'class')} with fewer than {FEW} images to learn from.",
            "Add images, or join such classes: so few teach little, and measuring them tells nothing.",
            few,
        ),
        Finding(
            "imbalance",
            f"The largest class has {sizes[largest] / max(1, sizes[smallest]):.0f} times the images of the smallest.",
            "An accuracy can be high without the small classes: look at the balanced accuracy and at each class.",
            [Case((), words)] if uneven else [],
        ),
    ]


def _shapes(source: ImageList, found: ScanResult, usable: Sequence[int]) -> Finding:
    shapes = found.shapes[usable].astype(np.int64)
    short, long, area = shapes.min(axis=1), shapes.max(axis=1), shapes.prod(axis=1)
    usual_side, usual_area = float(np.median(short)), float(np.median(area))
    cases = []
    for place, row in enumerate(usable):
        height, width = shapes[place]
        if long[place] > LONG * short[place]:
            odd = f"one side is {long[place] / short[place]:.0f} times the other"
        elif short[place] < SHORT:
            odd = f"smaller than {SHORT} pixels"
        elif short[place] * TINY < usual_side:
            odd = f"tiny beside the others, whose short side is mostly about {usual_side:.0f}"
        elif area[place] > HUGE * usual_area:
            odd = f"huge: {area[place] / usual_area:.0f} times the pixels of most others"
        else:
            continue
        cases.append(Case((source.entries[row].name,), f"{width}x{height} pixels, {odd}"))
    return Finding(
        "shape",
        f"{counted(len(cases), 'image')} of an extreme shape or size.",
        "They are squeezed or cropped to the size of the network, which may leave little to see.",
        cases,
    )


def _grey(source: ImageList, found: ScanResult, usable: Sequence[int]) -> Finding:
    """Grey images are odd only where most have colour."""
    grey = [row for row in usable if found.traits[row] & Trait.GREY]
    mixed = len(grey) < len(usable) / 2
    return Finding(
        "grey",
        f"{counted(len(grey), 'grey image')} among coloured ones ({len(grey) / len(usable):.1%}).",
        "A network can learn a class from the absence of colour: make sure that they are spread over the classes.",
        [Case((source.entries[row].name,)) for row in grey] if mixed else [],
    )


def _traits(source: ImageList, found: ScanResult, usable: Sequence[int]) -> list[Finding]:
    findings = []
    for kind, trait, title, advice in _TRAITS:
        rows = [row for row in usable if found.traits[row] & trait]
        cases = [Case((source.entries[row].name,)) for row in rows]
        findings.append(Finding(kind, title.format(counted(len(rows), "image")), advice, cases))
    return findings
