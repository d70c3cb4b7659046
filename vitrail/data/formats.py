"""Supported image formats, and how other formats are recognised. Nothing is decoded here."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

HEAD_BYTES = 132  # enough to detect the format of a file
CAN_READ_HEIF = importlib.util.find_spec("pillow_heif") is not None
SUPPORTED_FORMATS = (
    "JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF, PPM/PGM/PBM, JPEG 2000, QOI and, with the extra 'heif', HEIC"
)

# Pillow's name of a format -> its file extensions. docs/decisions.md has the reasons why others are not in this list.
EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg", ".jfif", ".jpe", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    "AVIF": (".avif", ".avifs"),
    "JPEG2000": (".jp2", ".j2k", ".jpc", ".j2c", ".jpf", ".jpx"),
    "QOI": (".qoi",),
    "HEIF": (".heic", ".heif", ".hif"),
}
UNSUPPORTED_FORMAT = "unsupported format: "  # how the reason begins
FORMAT_OF = {extension: name for name, extensions in EXTENSIONS.items() for extension in extensions}
FORMATS = tuple(name for name in EXTENSIONS if name != "HEIF")  # that need no package besides Pillow

RAW, SVG = "camera RAW", "SVG drawing"
_RAW_EXTENSIONS = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".fff", ".iiq", ".k25", ".kdc", ".mef", ".mos"),
    *(".mrw", ".nef", ".nrw", ".orf", ".pef", ".raf", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)
# Unsupported image formats: file extension -> name for messages.
_UNSUPPORTED_FORMATS = {
    **dict.fromkeys(_RAW_EXTENSIONS, RAW),
    **dict.fromkeys((".svg", ".svgz"), SVG),
    **dict.fromkeys((".psd", ".psb"), "Photoshop file"),
    **dict.fromkeys((".eps", ".epsf"), "PostScript drawing"),
    **dict.fromkeys((".wmf", ".emf"), "Windows metafile"),
    **dict.fromkeys((".ico", ".cur", ".icns"), "icon"),
    **dict.fromkeys((".dcm", ".dicom"), "DICOM image"),
    **dict.fromkeys((".jxr", ".wdp", ".hdp"), "JPEG XR image"),
    **dict.fromkeys((".sgi", ".rgb", ".ras"), "SGI or Sun raster image"),
    **dict.fromkeys((".pct", ".pict"), "PICT image"),
    **dict.fromkeys((".xbm", ".xpm"), "X bitmap"),
    ".jxl": "JPEG XL image",
    ".jls": "JPEG-LS image",
    ".exr": "OpenEXR image",
    ".tga": "Targa image",
    ".pcx": "PCX image",
    ".xcf": "GIMP file",
    ".dds": "DDS texture",
    ".fits": "FITS image",
    ".djvu": "DjVu scan",
}
# Files that are common next to images: ignored and counted.
NON_IMAGE_EXTENSIONS = frozenset((
    ".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".3gp", ".mp3", ".m4a", ".wav", ".flac",
    ".npy", ".npz", ".mat", ".h5", ".hdf5", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".onnx", ".safetensors",
    ".pdf", ".zip", ".gz", ".tar", ".7z", ".rar", ".doc", ".docx", ".xls", ".xlsx", ".odt", ".ods", ".ppt", ".pptx",
    ".db", ".sqlite", ".lmdb", ".mdb", ".parquet", ".arrow", ".tfrecord", ".pyc", ".so", ".dll", ".exe", ".aae",
))  # fmt: skip
_HEIF_BRANDS = rb"heic|heix|heim|heis|hevc|hevx|hevm|hevs|mif1|msf1"
# First bytes -> a supported format, or the name of another one. The first match counts.
_FIRST_BYTES = tuple(
    (re.compile(pattern, re.DOTALL), kind)
    for pattern, kind in (
        (rb"\xff\xd8\xff", "JPEG"),
        (rb"\x89PNG\r\n\x1a\n", "PNG"),
        (rb"RIFF....WEBP", "WEBP"),
        (rb"GIF8[79]a", "GIF"),
        # many texts begin with "BM", so the header size and the reserved bytes must match too
        (rb"BM.{4}\0{4}.{4}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", "BMP"),
        (rb"II\*\0.{4}CR", RAW),
        (rb"II[*+]\0|MM\0[*+]", "TIFF"),
        (rb"P[1-6fF][ \t\r\n]+(#|\d+[ \t\r\n]+\d)", "PPM"),
        (rb"....ftyp(avif|avis)", "AVIF"),
        (rb"....ftyp(mif1|msf1).{4}(.{4})*?avi[fs]", "AVIF"),
        (rb"....ftyp(" + _HEIF_BRANDS + rb")", "HEIF"),
        (rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", "JPEG2000"),
        (rb"qoif.{8}[\x03\x04][\0\x01]", "QOI"),
        (rb"....ftypcrx |FUJIFILMCCD-RAW|IIRO|IIRS|MMOR|IIU\0|II..\0\0HEAPCCDR|FOVb|\0MRM", RAW),
        (rb"\s*(<\?xml.*)?<svg\b", SVG),
        (rb"8BPS\0[\x01\x02]", "Photoshop file"),
        (rb"%!PS-Adobe-\S+ EPSF|\xc5\xd0\xd3\xc6", "PostScript drawing"),
        (rb"\0\0\0\x0cJXL ", "JPEG XL image"),
        (rb"\x76\x2f\x31\x01", "OpenEXR image"),
        (rb"#\?(RADIANCE|RGBE)", "Radiance HDR image"),
        (rb".{128}DICM", "DICOM image"),
        (rb"SIMPLE  = ", "FITS image"),
        (rb"II\xbc\x01", "JPEG XR image"),
        (rb"gimp xcf", "GIMP file"),
        (rb"DDS \x7c\0\0\0", "DDS texture"),
        (rb"AT&TFORM", "DjVu scan"),
    )
)  # fmt: skip


_NON_IMAGES = (  # files that often have the extension of an image
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML or SVG file"),
    (b"<svg", "an SVG drawing"),
    (b"%pdf", "a PDF file"),
    (b"pk\x03\x04", "a zip archive"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
)


def extension_of(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def is_image_name(name: str) -> bool:
    """Whether the file extension is that of a supported image format."""
    return extension_of(name) in FORMAT_OF


def detect_format(head: bytes, name: str = "") -> str:
    """Return the format of a file by its first bytes, else by its name.

    The result is a supported format (a key of EXTENSIONS), the name of another image format, or "".
    """
    detected = next((kind for pattern, kind in _FIRST_BYTES if pattern.match(head)), "")
    by_name = _UNSUPPORTED_FORMATS.get(extension_of(name), "")
    if detected == "TIFF" and by_name == RAW:  # most RAW formats are TIFF files with a thumbnail in place of the image
        return RAW
    if detected == "PPM" and head[1:2] in b"123" and extension_of(name) not in ("", *EXTENSIONS["PPM"]):
        return by_name  # an ASCII PPM must have its extension, because many lists of numbers begin like one
    return detected or by_name


def describe_non_image(data: bytes) -> str:
    """Return what a file that is not an image seems to be, such as "an HTML page", or ""."""
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for magic, kind in _NON_IMAGES:
        if start.startswith(magic):
            return kind
    if data[4:8] == b"ftyp":
        return "a HEIC, AVIF or video file"
    return "text" if start.isascii() and start.decode("ascii").isprintable() and start else ""


def unsupported_format_reason(kind: str) -> str:
    """Return why an image format is not supported; "" for a supported one."""
    if kind == "HEIF" and not CAN_READ_HEIF:
        return f"{UNSUPPORTED_FORMAT}HEIC needs pillow-heif; run pip install 'vitrail[heif]'"
    if kind in EXTENSIONS or not kind:
        return ""
    return f"{UNSUPPORTED_FORMAT}{kind}; convert it to JPEG, PNG or TIFF"


def by_extension(names: Iterable[str], limit: int = 6) -> str:
    """Return the number of files per extension, largest first: ".xyz 39,209, .txt 2"."""
    return format_counts(Counter(extension_of(name) or "no extension" for name in names), limit)


def format_counts(counts: Counter[str], limit: int = 6) -> str:
    """Return counts as text, largest first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(number for _, number in ranked[limit:])
    parts = [f"{extension[:20]} {number:,}" for extension, number in ranked[:limit]]
    return ", ".join([*parts, *([f"others {rest:,}"] if rest else [])])
