"""Checks of a dataset: leaks, duplicates, conflicting labels, broken files, class balance, image shapes and formats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.dataset import scan_source, usable_rows
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.files import NOT_FOUND
from vitrail.data.formats import SUPPORTED_FORMATS, UNSUPPORTED_FORMAT, by_extension
from vitrail.data.quarantine import UNREAD, QuarantineRow
from vitrail.data.scan import Progress, ScanResult
from vitrail.data.sources.data_source import UNSPLIT, DataSource, class_list, counted, quoted
from vitrail.data.sources.read import read_source
from vitrail.data.traits import Trait
from vitrail.doctor.duplicates import exact_findings, find_near_duplicates, group_identical, near_findings
from vitrail.doctor.findings import SEVERITY, Case, Finding, Findings
from vitrail.errors import UserError, user_path

MAX_SIDE_RATIO = 8  # long side over short side
MIN_SIDE = 16  # pixels
TINY_FACTOR = 8  # short side this many times below the median short side
HUGE_FACTOR = 64  # area this many times the median area
MIN_CLASS_IMAGES = 5
MAX_IMBALANCE = 10  # images of the largest class over images of the smallest

_TRAITS = (
    (
        "misnamed",
        Trait.MISNAMED,
        "{} with a file extension that does not match the format.",
        "Other programs may fail to open them. Rename the files.",
    ),
    (
        "rotated",
        Trait.ROTATED,
        "{} with an EXIF orientation tag (rotated or mirrored).",
        "vitrail applies the tag. Other tools may not: when you compare tools, use the same pixels.",
    ),
    (
        "cmyk",
        Trait.CMYK,
        "{} in CMYK colours.",
        "They are converted to RGB without a colour profile, so colours may be wrong. Save them as RGB.",
    ),
    (
        "sixteen-bit",
        Trait.SIXTEEN_BIT,
        "{} with 16 bits per channel.",
        "They are scaled to 8 bits; the low bits are lost.",
    ),
    (
        "wide",
        Trait.WIDE,
        "{} with 32 bits per pixel (integer or float).",
        "Images with integers outside 0 to 65,535 or floats outside 0 to 255 are rescaled to their own minimum and "
        "maximum, so brightness is not comparable between images. Save them with 8 or 16 bits.",
    ),
    ("animated", Trait.ANIMATED, "{} with several frames or pages.", "Only the first frame is used."),
    (
        "alpha",
        Trait.ALPHA,
        "{} with transparency.",
        "Transparent pixels are filled with preprocess.background (white by default).",
    ),
    (
        "palette",
        Trait.PALETTE,
        "{} with a colour palette of at most 256 colours.",
        "They are converted to RGB. Make sure that they are not all in one class.",
    ),
)


def check_dataset(
    path: str | Path, *, max_pixels: int = MAX_PIXELS, follow: bool = True, progress: Progress | None = None
) -> Findings:
    """Check every image at `path` by itself and against the others. Changes nothing on disk."""
    notes: list[str] = []
    source = read_source(path, notes, follow=follow)
    scan = scan_source(source, max_pixels, progress, verify=True)
    usable = usable_rows(source, scan, path)
    identical = group_identical(source, scan.digests, usable)
    matches = find_near_duplicates(source, scan, identical, max_pixels, progress)
    reasons = {row: f"cannot be used: {why}" for row, why in scan.problems.items()}
    balance = _class_counts(source, usable)
    findings = [
        _class_finding(source, path),
        *exact_findings(source, identical, reasons),
        *near_findings(source, matches, reasons),
        _group_finding(source, usable),
        *_unusable_findings(source, scan),
        *_balance_findings(balance, source),
        _shape_finding(source, scan, usable),
        _grey_finding(source, scan, usable),
        *_trait_findings(source, scan, usable),
    ]
    findings = [finding for finding in findings if finding.cases]
    order = list(SEVERITY)
    return Findings(
        root=os.path.normpath(user_path(path).absolute()),
        source=source,
        usable=len(usable),
        balance=balance,
        findings=sorted(findings, key=lambda finding: order.index(finding.kind)),
        quarantine=_quarantine(source, scan, reasons),
        notes=[*notes, *_empty_class_notes(source, usable, reasons)],
        rows={entry.name: row for row, entry in enumerate(source.entries)},
    )


def _class_finding(source: DataSource, path: str | Path) -> Finding:
    """Classes that training rejects, for example one that only the test split has."""
    try:
        class_list(source, None, path)
    except UserError as error:
        return Finding(
            "classes", "Training would reject these classes.", "Fix the classes first.", [Case((str(error),))]
        )
    return Finding("classes", "", "")


def _quarantine(source: DataSource, scan: ScanResult, reasons: dict[int, str]) -> list[QuarantineRow]:
    rows = [
        QuarantineRow(source.entries[row].name, scan.digests[row].tobytes().hex(), reasons[row])
        for row in sorted(reasons)
    ]
    return rows + [QuarantineRow(name, UNREAD, f"cannot be used: {why}") for name, why in source.unreadable]


def _empty_class_notes(source: DataSource, usable: Sequence[int], reasons: dict[int, str]) -> list[str]:
    """A note on the classes that would have no training images with the quarantine applied."""
    training = [row for row in usable if source.splits[row] in ("train", UNSPLIT)]
    before = {name for row in training for name in source.labels[row]}
    after = {name for row in training if row not in reasons for name in source.labels[row]}
    lost = sorted(before - after)
    if not lost:
        return []
    return [f"With quarantine.csv, no training images are left for {quoted(lost)}. Repair or move some files first."]


def _class_counts(source: DataSource, usable: Sequence[int]) -> dict[str, dict[str, int]]:
    """Class -> split -> number of images, zeros included."""
    counts = Counter((name, source.splits[row]) for row in usable for name in source.labels[row])
    names = source.classes or sorted({name for labels in source.labels for name in labels})
    splits = [split for split in ("train", "val", "test", UNSPLIT) if split in source.splits]
    return {name: {split: counts[name, split] for split in splits} for name in names}


def _group_finding(source: DataSource, usable: Sequence[int]) -> Finding:
    first_rows: dict[str, dict[str, int]] = {}  # group -> split -> the group's first row in that split
    for row in usable:
        if source.groups is not None and source.groups[row]:
            first_rows.setdefault(source.groups[row], {}).setdefault(source.splits[row], row)
    divided = {group: rows for group, rows in first_rows.items() if len(rows) > 1}
    return Finding(
        "torn-group",
        f"{counted(len(divided), 'group')} with images in more than one split.",
        "Images of one group must be in one split, or the measured accuracy is too high. Correct the split column.",
        [
            Case(tuple(source.entries[row].name for row in rows.values()), f"{group}: {', '.join(rows)}")
            for group, rows in sorted(divided.items())
        ],
    )


def _unusable_findings(source: DataSource, scan: ScanResult) -> list[Finding]:
    """Broken files, images in unsupported formats, and missing files."""
    bad = source.unreadable + [(source.entries[row].name, scan.problems[row]) for row in sorted(scan.problems)]
    cases: dict[str, list[Case]] = {"corrupt": [], "format": [], "missing": []}
    for name, reason in bad:
        kind = (
            "missing"
            if reason.startswith(NOT_FOUND)
            else "format"
            if reason.startswith(UNSUPPORTED_FORMAT)
            else "corrupt"
        )
        cases[kind].append(Case((name,), reason))
    kinds = by_extension(case.names[0] for case in cases["format"])
    return [
        Finding(
            "corrupt",
            f"{counted(len(cases['corrupt']), 'unusable file')}.",
            "Training skips them. Copy or download them again, or delete them.",
            cases["corrupt"],
        ),
        Finding(
            "format",
            f"{counted(len(cases['format']), 'image')} in unsupported formats: {kinds}.",
            f"Training skips them. vitrail reads {SUPPORTED_FORMATS}.",
            cases["format"],
        ),
        Finding(
            "missing",
            f"{counted(len(cases['missing']), 'missing file')}.",
            "A list or a link points to them. Copy the files there, or correct the list.",
            cases["missing"],
        ),
    ]


def _balance_findings(balance: dict[str, dict[str, int]], source: DataSource) -> list[Finding]:
    training_split = "train" if "train" in source.splits else UNSPLIT
    sizes = {name: counts.get(training_split, 0) for name, counts in balance.items()}
    missing = [
        Case((), f"{name}: no images in {', '.join(absent)}")
        for name, counts in balance.items()
        if (absent := [split for split, images in counts.items() if not images])
    ]
    few = [
        Case((), f"{name}: {counted(images, 'image')}")
        for name, images in sizes.items()
        if 0 < images < MIN_CLASS_IMAGES
    ]
    smallest, largest = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
    imbalanced = sizes[smallest] and sizes[largest] >= MAX_IMBALANCE * sizes[smallest]
    detail = f"{largest}: {counted(sizes[largest], 'image')}; {smallest}: {counted(sizes[smallest], 'image')}"
    return [
        Finding(
            "missing-class",
            f"{counted(len(missing), 'class')} without usable images in a split.",
            "A class without training images is never predicted. A class without test images is never measured.",
            missing,
        ),
        Finding(
            "few-images",
            f"{counted(len(few), 'class')} with fewer than {MIN_CLASS_IMAGES} training images.",
            "Add images or merge such classes. So few images teach little and give no reliable score.",
            few,
        ),
        Finding(
            "imbalance",
            f"The largest class has {sizes[largest] / max(1, sizes[smallest]):.0f} times the images of the smallest.",
            "Accuracy can be high while small classes fail. Read the balanced accuracy and the scores per class.",
            [Case((), detail)] if imbalanced else [],
        ),
    ]


def _shape_finding(source: DataSource, scan: ScanResult, usable: Sequence[int]) -> Finding:
    shapes = scan.shapes[usable].astype(np.int64)
    short, long, area = shapes.min(axis=1), shapes.max(axis=1), shapes.prod(axis=1)
    median_side, median_area = float(np.median(short)), float(np.median(area))
    cases = []
    for index, row in enumerate(usable):
        height, width = shapes[index]
        if long[index] > MAX_SIDE_RATIO * short[index]:
            problem = f"one side is {long[index] / short[index]:.0f} times the other"
        elif short[index] < MIN_SIDE:
            problem = f"smaller than {MIN_SIDE} pixels"
        elif short[index] * TINY_FACTOR < median_side:
            problem = f"tiny: the median short side is {median_side:.0f}"
        elif area[index] > HUGE_FACTOR * median_area:
            problem = f"huge: {area[index] / median_area:.0f} times the median number of pixels"
        else:
            continue
        cases.append(Case((source.entries[row].name,), f"{width}x{height} pixels, {problem}"))
    return Finding(
        "shape",
        f"{counted(len(cases), 'image')} with an extreme shape or size.",
        "They are resized or cropped to the network's input size, which may leave little content.",
        cases,
    )


def _grey_finding(source: DataSource, scan: ScanResult, usable: Sequence[int]) -> Finding:
    """Grey images are reported only where most images have colour."""
    grey = [row for row in usable if scan.traits[row] & Trait.GREY]
    mixed = len(grey) < len(usable) / 2
    return Finding(
        "grey",
        f"{counted(len(grey), 'grey image')} among colour images ({len(grey) / len(usable):.1%}).",
        "A network can learn a class from missing colour. Make sure that grey images are spread over all classes.",
        [Case((source.entries[row].name,)) for row in grey] if mixed else [],
    )


def _trait_findings(source: DataSource, scan: ScanResult, usable: Sequence[int]) -> list[Finding]:
    findings = []
    for kind, trait, title, advice in _TRAITS:
        rows = [row for row in usable if scan.traits[row] & trait]
        cases = [Case((source.entries[row].name,)) for row in rows]
        findings.append(Finding(kind, title.format(counted(len(rows), "image")), advice, cases))
    return findings
