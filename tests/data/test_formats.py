"""Which files are images, by name or by their first bytes, and how each is handled."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.folders import fill, image_bytes, names_of, numbered, zipped
from tests.data.images import encode, photo
from vitrail.data import decode as decode_module
from vitrail.data.dataset import open_dataset
from vitrail.data.decode import BadImage, decode
from vitrail.data.files import FolderFiles, ZipFiles
from vitrail.data.formats import CAN_READ_HEIF, EXTENSIONS, HEAD_BYTES, RAW, UNSUPPORTED_FORMAT, detect_format
from vitrail.data.quarantine import Quarantine
from vitrail.data.sources.class_folders import read_folders
from vitrail.data.sources.read import read_source
from vitrail.data.sources.root import Root
from vitrail.doctor.check import check_dataset
from vitrail.doctor.findings import Findings
from vitrail.errors import UserError

heif = pytest.mark.skipif(not CAN_READ_HEIF, reason="needs pillow-heif")
PICTURE = photo(30, 44)
IMAGE = Image.fromarray(PICTURE)
SEE_THROUGH = IMAGE.copy()
SEE_THROUGH.putalpha(Image.fromarray(np.linspace(0, 255, 30 * 44).reshape(30, 44).astype(np.uint8)))
GREY16 = Image.fromarray(np.linspace(0, 65535, 30 * 44).reshape(30, 44).astype(np.uint16))
CR2 = b"II*\0\x10\0\0\0CR\x02\0" + bytes(200)
DICOM = bytes(128) + b"DICM" + bytes(60)
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
PHOTOSHOP = b"8BPS\0\x01" + bytes(60)
NOISE = bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8))


def turned(image: Image.Image, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    if kind != "HEIF":
        return encode(image, kind, exif=exif)
    copy = image.copy()
    copy.info["exif"] = exif.tobytes()  # written as a rotation of the file, as phones do
    return encode(copy, "HEIF")


def by_pillow(data: bytes) -> np.ndarray:
    """Open with Pillow, rotate by EXIF, composite over white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        return np.round(np.asarray(image.convert("I")) / 257).astype(np.uint8)[:, :, None].repeat(3, 2)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def cases_of(findings: Findings) -> dict[str, list[str]]:
    """Kind of finding -> the names of its images."""
    return {finding.kind: [name for case in finding.cases for name in case.names] for finding in findings.findings}


def golden() -> dict[str, bytes]:
    files = {
        "colour.ppm": encode(IMAGE, "PPM"),
        "plain.ppm": b"P3\n2 1\n# by hand\n255\n255 0 0  1 2 3\n",
        "few levels.ppm": b"P6 2 1 15\n" + bytes([0, 7, 15, 15, 1, 0]),
        "grey.pgm": encode(IMAGE.convert("L"), "PPM"),
        "grey16.pgm": encode(GREY16, "PPM"),
        "bits.pbm": encode(IMAGE.convert("1"), "PPM"),
        "colour.avif": encode(IMAGE, "AVIF"),
        "alpha.avif": encode(SEE_THROUGH, "AVIF"),
        "turned.avif": turned(IMAGE, "AVIF"),
        "moving.avif": encode(IMAGE, "AVIF", save_all=True, append_images=[IMAGE.rotate(180)]),
        "colour.jp2": encode(IMAGE, "JPEG2000"),
        "stream.j2k": encode(IMAGE, "JPEG2000", no_jp2=True),
        "alpha.jp2": encode(SEE_THROUGH, "JPEG2000"),
        "grey16.jp2": encode(GREY16, "JPEG2000"),
        "alpha.qoi": encode(SEE_THROUGH, "QOI"),
        "bits.tif": encode(IMAGE.convert("1"), "TIFF", compression="group4"),
        "print.tif": encode(IMAGE.convert("CMYK"), "TIFF"),
        "pages.tif": encode(IMAGE, "TIFF", save_all=True, append_images=[IMAGE.rotate(180)]),
    }
    if decode_module._heif():
        files |= {"colour.heic": encode(IMAGE, "HEIF"), "alpha.heic": encode(SEE_THROUGH, "HEIF")}
        files |= {"turned.heic": turned(IMAGE, "HEIF"), "grey.heif": encode(IMAGE.convert("L"), "HEIF")}
    return files


GOLDEN = golden()


@pytest.mark.parametrize("name", GOLDEN)
def test_pixels_equal_those_of_pillow(name: str) -> None:
    found, expected = decode(GOLDEN[name]), by_pillow(GOLDEN[name])
    assert found.shape == (44, 30, 3) if name.startswith("turned") else found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    assert detect_format(GOLDEN[name][:HEAD_BYTES]) in EXTENSIONS
    if name.startswith("turned"):
        assert np.abs(found.astype(int) - np.rot90(PICTURE, -1)).mean() < 20


@heif
def test_alpha_of_heic_is_composited_over_the_background() -> None:
    black, white = (decode(GOLDEN["alpha.heic"], background=(value,) * 3).astype(int) for value in (0, 255))
    hidden = np.asarray(SEE_THROUGH)[:, :, 3] < 40
    assert (white - black)[hidden].min() > 150


@pytest.mark.parametrize("kind", ["PPM", "AVIF", "JPEG2000", "QOI", *(["HEIF"] if CAN_READ_HEIF else [])])
def test_the_pixel_limit_applies_to_every_format(kind: str) -> None:
    data = encode(IMAGE, kind)
    assert decode(data, max_pixels=30 * 44).shape == (30, 44, 3)
    with pytest.raises(BadImage, match="44x30 pixels is more than the limit"):
        decode(data, max_pixels=30 * 44 - 1)


def test_a_header_with_a_huge_size_is_refused_before_decoding() -> None:
    for data in (b"P6 60000 60000 255\n", b"qoif" + b"\0\0\xea\x60" * 2 + b"\x03\0"):
        with pytest.raises(BadImage, match="pixels"):
            decode(data)


def test_heic_without_the_extra_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vitrail.data.formats.CAN_READ_HEIF", False)
    monkeypatch.setattr(decode_module, "_heif", lambda: False)
    with pytest.raises(BadImage, match=r"pip install 'vitrail\[heif\]'"):
        decode(HEIC)
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, {"a/x.heic": HEIC, "a/IMG.JPG": HEIC})
    found = {finding.kind: finding for finding in check_dataset(tmp_path).findings}
    assert [case.names for case in found["format"].cases] == [("a/IMG.JPG",), ("a/x.heic",)]
    assert "corrupt" not in found and found["format"].severity == "severe"


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        *((data[:HEAD_BYTES], "x", format_) for data, format_ in (
            (encode(IMAGE, kind), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "QOI")
        )),
        (encode(IMAGE, "JPEG2000")[:HEAD_BYTES], "x.bin", "JPEG2000"),
        (HEIC, "IMG_1", "HEIF"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "x", "AVIF"),
        (CR2, "x", RAW),
        (encode(IMAGE, "TIFF")[:HEAD_BYTES], "x.NEF", RAW),
        (encode(IMAGE, "JPEG")[:HEAD_BYTES], "x.nef", "JPEG"),
        (DICOM, "IM0001", "DICOM image"),
        (PHOTOSHOP, "x", "Photoshop file"),
        (b"<?xml version='1.0'?>\n<svg width='3'>", "x", "SVG drawing"),
        (b"\x00\x00\x02" + bytes(15), "x.tga", "Targa image"),
        # texts and other data that begin like images
        (b"BMW and Audi, a list of cars that is long enough", "cars.txt", ""),
        (b"P5 is the fifth part of this report.", "a.md", ""),
        (b"MM0 II*", "x", ""),
        (b"<?xml version='1.0'?><annotation><folder>", "a.xml", ""),
        (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2mp41", "a.mp4", ""),
        (b"%PDF-1.7", "a.pdf", ""),
        (b"", "a.dat", ""),
    ],
)  # fmt: skip
def test_the_format_is_detected_from_the_first_bytes_or_the_name(head: bytes, name: str, kind: str) -> None:
    assert detect_format(head, name) == kind


ODD = {
    "a/photo": encode(IMAGE, "JPEG"),
    "a/cache.dat": encode(IMAGE, "PNG"),
    "b/sign.ppm": encode(IMAGE, "PPM"),
    "a/raw.CR2": CR2,
    "b/raw.nef": encode(IMAGE, "TIFF"),
    "b/drawing.svg": b"<svg></svg>",
    "b/IM0001": DICOM,
    "a/notes.txt": b"words",
    "a/clip.mp4": NOISE,
    "b/README": b"words",
    "a/Thumbs.db": NOISE,
    "b/.DS_Store": b"x",
    "__MACOSX/b/._sign.ppm": b"x",
}
UNSUPPORTED = ["a/raw.CR2", "b/IM0001", "b/drawing.svg", "b/raw.nef"]


@pytest.mark.parametrize("archive", [False, True])
def test_every_file_that_may_be_an_image_is_used_or_reported(tmp_path: Path, archive: bool) -> None:
    root = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    fill(root, ODD)
    place = zipped(root, tmp_path / "data.zip") if archive else root
    data = open_dataset(place, None)
    assert names_of(data, "all") == {*numbered({"a": 3, "b": 3}), "a/photo", "a/cache.dat", "b/sign.ppm"}
    assert [name for name, _ in data.excluded] == UNSUPPORTED
    assert all(reason.startswith(UNSUPPORTED_FORMAT) for _, reason in data.excluded)
    text = " ".join(data.notes)
    assert "3 non-image files: .mp4 1, .txt 1, no extension 1" in text
    assert "3 hidden items" in text
    assert ".cr2 1, .nef 1, .svg 1, no extension 1" in text
    found = check_dataset(place)
    cases = cases_of(found)
    assert cases["format"] == UNSUPPORTED and found.severe and "corrupt" not in cases
    assert {row.name for row in found.quarantine} >= set(UNSUPPORTED)


def test_missing_and_broken_files_are_distinguished(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"p": 6}))
    fill(tmp_path, {"p/cut.png": image_bytes(7)[:40]})
    (tmp_path / "p/link.png").symlink_to("nowhere.png")
    names = [*numbered({"p": 6}), "p/cut.png", "p/gone.png", "p/link.png"]
    lines = [f"{name},{'ab'[i % 2]}" for i, name in enumerate(names)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
    found = check_dataset(tmp_path / "list.csv")
    cases = cases_of(found)
    assert cases["missing"] == ["p/gone.png", "p/link.png"] and cases["corrupt"] == ["p/cut.png"]
    text = " ".join(open_dataset(tmp_path / "list.csv").notes)
    assert "Missing: 2 files" in text and "Skipped 1 unusable file" in text


def test_a_broken_link_to_a_class_folder_is_named(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    (tmp_path / "c").symlink_to("/mnt/not there")
    ((name, reason),) = open_dataset(tmp_path).excluded
    assert name == "c" and "/mnt/not there" in reason


def test_mostly_unsupported_files_are_an_error(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, {f"a/s{i}.xyz": NOISE + bytes([i]) for i in range(7)})
    with pytest.raises(UserError) as error:
        open_dataset(tmp_path)
    assert ".xyz 7" in str(error.value) and "6 images" in str(error.value) and "JPEG 2000" in str(error.value)
    for path in tmp_path.glob("a/*.xyz"):
        path.rename(path.with_suffix(".cr2"))
    with pytest.raises(UserError, match=r"\.cr2 7"):
        check_dataset(tmp_path)
    for path in tmp_path.glob("*/*.png"):
        path.unlink()
    with pytest.raises(UserError, match=r"\.cr2 7"):
        open_dataset(tmp_path)


def test_files_named_after_an_image_are_no_error(tmp_path: Path) -> None:
    names = numbered({"a": 3, "b": 3})
    fill(tmp_path, names)
    fill(tmp_path, {name.replace(".png", ending): NOISE for name in names for ending in (".npy", ".mat", ".png.bin")})
    fill(tmp_path, {f"a/{i}.txt": b"words" for i in range(50)})
    data = open_dataset(tmp_path, None)
    assert names_of(data, "all") == set(names)
    assert any(".txt 50" in note and ".npy 6" in note for note in data.notes)


def test_mostly_broken_images_are_an_error(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, {f"a/cut{i}.jp2": encode(IMAGE, "JPEG2000")[: 200 + i] for i in range(7)})
    with pytest.raises(UserError) as error:
        open_dataset(tmp_path)
    assert ".jp2 7" in str(error.value) and "only 6" in str(error.value)
    assert len(next(finding for finding in check_dataset(tmp_path).findings if finding.kind == "corrupt").cases) == 7


def test_class_folders_deeper_in_the_tree_are_suggested(tmp_path: Path) -> None:
    signs = [f"signs/Training/{k:05d}/{i}.ppm" for k in range(5) for i in range(12)]
    fill(tmp_path, {name: image_bytes(i, kind="PPM") for i, name in enumerate(signs)})
    fill(tmp_path, {f"{name}.png": image_bytes(900 + i) for i, name in enumerate(("web/1", "web/2", "doc/3"))})
    with pytest.raises(UserError) as error:
        open_dataset(tmp_path)
    assert f"{tmp_path}/signs/Training" in str(error.value)
    assert len(open_dataset(tmp_path / "signs/Training").classes) == 5
    fill(tmp_path, {f"doc/{i}.png": image_bytes(950 + i) for i in range(30)})  # two thirds, which may be meant
    assert any(f"{tmp_path}/signs/Training" in note for note in open_dataset(tmp_path).notes)


def test_more_images_outside_than_in_class_folders_are_an_error(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    fill(tmp_path, {f"{i}.png": image_bytes(100 + i) for i in range(5)})
    with pytest.raises(UserError, match="5 images outside class folders"):
        open_dataset(tmp_path)


def test_pages_and_32_bit_images_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    height = Image.fromarray(np.linspace(-10, 3000, 400, dtype=np.float32).reshape(20, 20))
    fill(tmp_path, {"a/pages.tif": GOLDEN["pages.tif"], "b/height.tif": encode(height, "TIFF")})
    text = " ".join(open_dataset(tmp_path).notes)
    assert "1 image with several frames or pages" in text and "1 image with 32 bits per pixel" in text
    kinds = cases_of(check_dataset(tmp_path))
    assert kinds["animated"] == ["a/pages.tif"] and kinds["wide"] == ["b/height.tif"]


def test_listing_opens_only_files_without_an_image_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, {"a/x.dat": image_bytes(9), "a/words.txt": b"words"})
    opened: list[str] = []
    head = FolderFiles.list.__globals__["_head"]
    monkeypatch.setitem(FolderFiles.list.__globals__, "_head", lambda path: opened.append(path) or head(path))
    assert len(FolderFiles(str(tmp_path)).list().images) == 7
    assert sorted(Path(path).name for path in opened) == ["words.txt", "x.dat"]


# links


def test_links_to_outside_are_followed_and_noted_or_skipped(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", ["x/1.png", "x/2.png", "3.png"])
    root = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    (root / "c").symlink_to(store / "x")
    (root / "a/out.png").symlink_to(store / "3.png")
    (root / "b/in.png").symlink_to(root / "a/0.png")
    inside = {*numbered({"a": 3, "b": 3})}
    data = open_dataset(root, None)
    assert names_of(data, "all") == inside | {"a/out.png", "b/in.png", "c/1.png", "c/2.png"}
    assert any("Followed 2 links" in note and "'a/out.png', 'c'" in note for note in data.notes)
    data = open_dataset(root, None, follow_links=False)
    assert names_of(data, "all") == inside
    assert any("3 links" in note and "--no-follow" in note for note in data.notes)
    through = tmp_path / "through"
    through.symlink_to(root)  # a link given as the data path is always followed
    assert names_of(open_dataset(through, None, follow_links=False), "all") == inside


def test_links_to_parent_folders_neither_loop_nor_list_twice(tmp_path: Path) -> None:
    root = fill(tmp_path / "outer/data", numbered({"a": 3, "b": 3}))
    fill(tmp_path / "outer/other", ["9.png"])
    (root / "a/up").symlink_to(root)
    (root / "a/further").symlink_to(tmp_path / "outer")
    (root / "b/slash").symlink_to("/")
    (root / "b/again").symlink_to(root / "a")
    data = open_dataset(root, None)
    assert names_of(data, "all") == {*numbered({"a": 3, "b": 3})}
    assert "Ignored 4 links to folders already read." in data.notes


def test_a_table_without_following_links(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"p": 6}))
    (tmp_path / "q").symlink_to("p")
    names = [*numbered({"p": 5}), "q/5.png"]
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{n},{'ab'[i % 2]}\n" for i, n in enumerate(names)))
    assert len(names_of(open_dataset(tmp_path / "list.csv", None), "all")) == 6
    data = open_dataset(tmp_path / "list.csv", None, follow_links=False)
    assert names_of(data, "all") == {*numbered({"p": 5})}
    assert [name for name, _ in data.excluded] == ["q/5.png"]


def test_a_zip_reads_the_first_bytes_of_each_member_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fill(tmp_path / "photos", numbered({"a": 3, "b": 3}))
    fill(root, {"a/x.dat": image_bytes(9), "a/words.txt": b"words"})
    files, notes = ZipFiles(str(zipped(root, tmp_path / "photos.zip", "photos/"))), []
    archive = files._archive()
    opened: list[str] = []
    open_member = archive.open
    monkeypatch.setattr(archive, "open", lambda member, *rest: opened.append(member.filename) or open_member(member))
    assert len(read_folders(Root(files, "photos.zip"), notes).entries) == 7
    assert sorted(opened) == ["photos/a/words.txt", "photos/a/x.dat"]


def test_any_number_of_other_files_is_ignored(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        for n in range(3):
            (tmp_path / label / f"{n}.png").write_bytes(image_bytes(n))
            for ending in ("mp4", "npy", "mov", "zip"):
                (tmp_path / label / f"x{n}.{ending}").write_bytes(b"\0\1\2\3" * 9)
    notes: list[str] = []
    found = read_source(tmp_path, notes)
    assert len(found.entries) == 6 and not found.unreadable and any("24 non-image files" in note for note in notes)


@pytest.mark.parametrize("text", [b"P1 34 1\nP2 40 0\n", b"P2 # ids\n", b"P3 1 2\n"])
def test_a_text_that_begins_like_an_ascii_ppm_is_text(text):
    assert detect_format(text, "labels.txt") == "" and detect_format(text, "x.pgm") == "PPM"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "f.png")
    with pytest.raises(OSError, match="not a regular file"):
        FolderFiles(str(tmp_path)).read("f.png")
    with pytest.raises(UserError, match="not a regular file"):
        Quarantine.read(tmp_path / "f.png")


def test_output_folders_of_vitrail_are_not_data(tmp_path):
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    names = ["config.toml", "metrics.jsonl", "model.safetensors", "curves.svg", "samples/1.png"]
    fill(tmp_path / "runs/photos", {name: image_bytes(1) for name in names})
    fill(tmp_path / "explained", {name: image_bytes(1) for name in ("explain.html", "explain.json", "figures/1.png")})
    notes: list[str] = []
    found = read_source(tmp_path, notes)
    assert {label for (label,) in found.labels} == {"a", "b"} and not found.unreadable
    assert any("2 folders written by vitrail" in note and "runs/photos" in note for note in notes)
