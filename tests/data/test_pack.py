"""Packing: every byte and label is kept, an interrupted packing resumes, and damage is reported."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.folders import contents, fill, image_bytes, numbered
from vitrail.commands.pack import pack
from vitrail.data.dataset import content_digests, open_dataset
from vitrail.data.decode import decode
from vitrail.data.pack import Packer
from vitrail.doctor.check import check_dataset
from vitrail.errors import UserError


def photo(seed: int, size: tuple[int, int], **options: object) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", **options)
    return file.getvalue()


def split_folder(root: Path) -> Path:
    return fill(root, numbered({"train/a": 9, "train/b": 7, "test/a": 4, "test/b": 3}))


def test_bytes_labels_and_order_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = split_folder(tmp_path / "folder")
    pack(folder, tmp_path / "packed", shard_mb=1)
    before, after = open_dataset(folder), open_dataset(tmp_path / "packed")
    assert after.classes == before.classes and after.given_split
    for name, samples in before.splits.items():
        packed = after.splits[name]
        assert packed.labels.tolist() == samples.labels.tolist()
        assert packed.digests.tolist() == samples.digests.tolist()
        assert [packed.read(i) for i in range(len(packed))] == [samples.read(i) for i in range(len(samples))]
        assert packed.name(0).endswith(samples.name(0))


def test_other_libraries_read_the_shards(tmp_path: Path) -> None:
    folder = split_folder(tmp_path / "folder")
    pack(folder, tmp_path / "packed")
    table = pq.read_table(tmp_path / "packed/train-00000-of-00001.parquet")
    names = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    for row in table.to_pylist():
        assert (folder / row["image"]["path"]).read_bytes() == row["image"]["bytes"]
        assert row["image"]["path"].split("/")[1] == names[row["label"]]


def test_unsplit_multilabel_data_with_groups_and_weights_is_kept(tmp_path: Path) -> None:
    images = [f"{i}.png" for i in range(20)]
    fill(tmp_path, images)
    lines = [f"{name},{'x|y' if i % 3 else 'z'},{i // 4},{i / 10}\n" for i, name in enumerate(images)]
    (tmp_path / "list.csv").write_text("path,labels,group,weight\n" + "".join(lines))
    pack(tmp_path / "list.csv", tmp_path / "packed")
    before, after = open_dataset(tmp_path / "list.csv"), open_dataset(tmp_path / "packed")
    for name, samples in before.splits.items():
        packed = after.splits[name]
        assert packed.digests.tolist() == samples.digests.tolist()  # the same groups on the same side
        rows = np.arange(len(samples))
        assert (packed.labels_of(rows) == samples.labels_of(rows)).all()
        assert (packed.weights == samples.weights).all()


def test_resized_images_equal_pillow_and_small_images_are_unchanged(tmp_path: Path) -> None:
    big, turned, small = photo(1, (90, 160)), photo(2, (100, 60), exif=_turned()), photo(3, (20, 30))
    fill(tmp_path / "in", {"a/big.jpg": big, "a/turned.jpg": turned, "b/small.jpg": small, "b/x.png": image_bytes(4)})
    pack(tmp_path / "in", tmp_path / "out", resize=40)
    data = open_dataset(tmp_path / "out")
    stored = {s.name(i).split("/")[-1]: s.read(i) for s in data.splits.values() for i in range(len(s))}
    assert stored["small.jpg"] == small and stored["x.png"] == image_bytes(4)
    assert decode(stored["big.jpg"]).shape == (40, 71, 3)
    assert decode(stored["turned.jpg"]).shape == (40, 67, 3)  # upright now: 60 x 100 became 40 x 67
    file = io.BytesIO()
    smaller = Image.open(io.BytesIO(big)).convert("RGB").resize((71, 40), Image.Resampling.BICUBIC)
    smaller.save(file, "JPEG", quality=95)
    assert stored["big.jpg"] == file.getvalue()
    assert {40 * 71, 40 * 67} <= {int(area) for samples in data.splits.values() for area in samples.areas}


def test_resized_images_keep_their_transparency(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    fill(tmp_path / "in", {"a/clear.png": file.getvalue(), "a/0.png": image_bytes(1), "b/1.png": image_bytes(2)})
    pack(tmp_path / "in", tmp_path / "out", resize=20)
    data = open_dataset(tmp_path / "out", None).splits["all"]
    stored = next(data.read(i) for i in range(len(data)) if data.name(i).endswith("clear.png"))
    expected = Image.fromarray(pixels).resize((27, 20), Image.Resampling.BICUBIC)
    assert np.array_equal(decode(stored, channels=4), np.asarray(expected))


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def test_unusable_images_are_skipped_and_listed(tmp_path: Path) -> None:
    fill(tmp_path / "in", numbered({"a": 4, "b": 4}))
    (tmp_path / "in/a/0.png").write_bytes(b"nothing")
    result = pack(tmp_path / "in", tmp_path / "out")
    assert result.images == 7 and [name for name, _ in result.skipped] == ["a/0.png"]
    assert json.loads((tmp_path / "out/manifest.json").read_text())["skipped"][0][0] == "a/0.png"


def test_an_interrupted_packing_resumes_and_cannot_be_opened_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {f"{'ab'[i % 2]}/{i}.jpg": photo(i, (300, 400), quality=100) for i in range(24)}
    folder = fill(tmp_path / "in", images)
    pack(folder, tmp_path / "whole", shard_mb=1)
    written: list[str] = []
    real = Packer._write_shard

    def fails_at_the_third(self, shard, pool):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.file)
        return real(self, shard, pool)

    monkeypatch.setattr(Packer, "_write_shard", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        pack(folder, tmp_path / "out", shard_mb=1)
    with pytest.raises(UserError, match=r"/out' is only partly packed.*`vitrail pack`"):
        open_dataset(tmp_path / "out")
    with pytest.raises(UserError, match="unfinished packing of other data"):
        pack(folder, tmp_path / "out", shard_mb=2)
    kept = [(tmp_path / "out" / file).stat().st_mtime_ns for file in written]
    monkeypatch.setattr(Packer, "_write_shard", real)
    pack(folder, tmp_path / "out", shard_mb=1)
    assert [(tmp_path / "out" / file).stat().st_mtime_ns for file in written] == kept
    whole, out = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "out"))
    assert whole == out and len(whole) > 4
    for name in whole:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_shard_damaged_before_resuming_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = split_folder(tmp_path / "in")
    pack(folder, tmp_path / "whole")
    monkeypatch.setattr(Packer, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for damage in ("cut", "gone", "side"):
        with pytest.raises(KeyboardInterrupt):
            pack(folder, tmp_path / damage)
    monkeypatch.undo()
    name = "train-00000-of-00001.parquet"
    (tmp_path / "cut" / name).write_bytes((tmp_path / "cut" / name).read_bytes()[:100])
    (tmp_path / "gone" / name).unlink()
    (tmp_path / "side" / f".{name}.npz").write_bytes(b"x")
    for damage in ("cut", "gone", "side"):
        pack(folder, tmp_path / damage)
        assert (tmp_path / damage / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert open_dataset(tmp_path / damage).splits["train"].read(0)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Packer, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        pack(folder, tmp_path / "marker")
    (tmp_path / "marker/packing.json").write_text("garbage")
    with pytest.raises(UserError, match="unfinished packing of other data"):
        pack(folder, tmp_path / "marker")


def test_resized_images_stay_in_their_split_and_are_recognised(tmp_path: Path) -> None:
    fill(tmp_path / "in", {f"{'ab'[i % 2]}/{i}.jpg": photo(i, (40, 50)) for i in range(20)})
    pack(tmp_path / "in", tmp_path / "out", resize=20)
    before, after = open_dataset(tmp_path / "in"), open_dataset(tmp_path / "out")
    for name, samples in before.splits.items():
        packed = after.splits[name]
        assert sorted(packed.original_digests.tolist()) == sorted(samples.digests.tolist())
        assert not set(packed.digests.tolist()) & set(samples.digests.tolist())
    assert sorted(content_digests(before.splits["train"])) == sorted(content_digests(after.splits["train"]))


def test_check_reads_every_byte_of_packed_images(tmp_path: Path) -> None:
    pack(split_folder(tmp_path / "in"), tmp_path / "out")
    assert not [finding for finding in check_dataset(tmp_path / "out").findings if finding.kind == "corrupt"]
    shard = tmp_path / "out/train-00000-of-00001.parquet"
    raw = bytearray(shard.read_bytes())
    image = open_dataset(tmp_path / "out").splits["train"].read(2)
    raw[raw.index(image) + 9] ^= 1
    shard.write_bytes(raw)
    corrupt = next(finding for finding in check_dataset(tmp_path / "out").findings if finding.kind == "corrupt")
    assert [case.names[0].split()[-1] for case in corrupt.cases] == ["train/a/2.png"]


def test_damage_is_reported(tmp_path: Path) -> None:
    pack(split_folder(tmp_path / "in"), tmp_path / "out")
    shard = tmp_path / "out/train-00000-of-00001.parquet"
    data = open_dataset(tmp_path / "out")
    samples = data.splits["train"]
    raw = bytearray(shard.read_bytes())
    image = samples.read(3)
    raw[raw.index(image) + len(image) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(OSError, match="bytes have changed"):
        open_dataset(tmp_path / "out").splits["train"].read(3)
    shard.write_bytes(raw[:-10])
    with pytest.raises(UserError, match=r"train-00000-of-00001\.parquet' has [\d,]+ bytes instead of [\d,]+"):
        open_dataset(tmp_path / "out")
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00000-of-00001\.parquet' is missing"):
        open_dataset(tmp_path / "out")
    (tmp_path / "out/manifest.json").rename(tmp_path / "away.json")
    with pytest.raises(UserError, match=r"manifest\.json .*/out' is damaged or missing"):
        open_dataset(tmp_path / "out")
    (tmp_path / "away.json").rename(tmp_path / "out/manifest.json")
    (tmp_path / "out/index.npz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"manifest\.json or index\.npz in .*/out' is damaged"):
        open_dataset(tmp_path / "out")


def test_packed_shards_pack_again(tmp_path: Path) -> None:
    folder = split_folder(tmp_path / "in")
    pack(folder, tmp_path / "once")
    pack(tmp_path / "once", tmp_path / "twice")
    assert contents(open_dataset(tmp_path / "once")) == contents(open_dataset(tmp_path / "twice"))


def test_wrong_arguments_are_errors(tmp_path: Path) -> None:
    folder = split_folder(tmp_path / "in")
    for options, fact in (
        ({"out": folder / "packed"}, "is inside the data"),
        ({"out": tmp_path, "data": folder}, "is not empty"),
        ({"resize": 0}, "--resize must be between 1 "),
        ({"quality": 101}, "--quality must be between 1 and 100, not 101"),
        ({"data": tmp_path / "inn"}, f"does not exist; did you mean '{folder}'"),
    ):
        arguments = {"data": folder, "out": tmp_path / "out", **options}
        with pytest.raises(UserError) as error:
            pack(**arguments)  # type: ignore[arg-type]
        assert fact in str(error.value)
    shutil.rmtree(folder)
