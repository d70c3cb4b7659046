"""Names in CSV files: no cell runs as a formula in a spreadsheet, and every name reads back unchanged."""

import csv
import io
import random
from pathlib import Path

import pytest

from tests.data.folders import contents, fill
from vitrail.data.dataset import open_dataset
from vitrail.data.files import Entry
from vitrail.data.quarantine import Quarantine, QuarantineRow, write_quarantine
from vitrail.data.sources.images import find_images
from vitrail.spreadsheet import SafeCsvWriter, escape_cell, unescape_cell

NAMES = ["=a.jpg", "-1.jpg", "+b.jpg", "@c.jpg", "\td.jpg", "\re.jpg", "'=f.jpg", "''-g.jpg", " =h.jpg", "＝i.jpg",
         "x;=j.jpg", "a,b.jpg", 'q"q.jpg', "a\nb.jpg", "'plain.jpg", "文件.jpg",
         "a\u2028b.jpg", "a\x85b.jpg"]  # fmt: skip
STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝")


@pytest.mark.parametrize("name", NAMES)
def test_escaped_cells_are_no_formulas_and_read_back(name: str) -> None:
    cell = escape_cell(name)
    assert not cell.lstrip(" ").startswith(STARTS)
    assert unescape_cell(cell) == name


def test_any_text_reads_back() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices("'=+-@ \t\r\n1a.;,\"＝", k=draw.randint(0, 6)))
        assert unescape_cell(escape_cell(text)) == text


@pytest.mark.parametrize("number", ["-1", "+2.5", "-0.25", "1e-05", "-3e+07", "0.9876"])
def test_numbers_stay_numbers(number: str) -> None:
    assert escape_cell(number) == number


def test_no_formula_where_semicolons_separate_cells() -> None:
    out = io.StringIO()
    SafeCsvWriter(out).writerow(["x;=1+1", "cat", "0.5"])
    assert not any(cell.startswith(STARTS) for cell in next(csv.reader([out.getvalue()], delimiter=";")))
    assert next(csv.reader([out.getvalue()])) == ["x;=1+1", "cat", "0.5"]


def test_quarantine_list_keeps_names(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.csv"
    write_quarantine(path, [QuarantineRow(name, "", "=cmd()") for name in NAMES])
    with path.open(newline="", encoding="utf-8") as file:
        assert not any(cell.startswith(STARTS) for row in csv.reader(file) for cell in row)
    assert list(Quarantine.read(path).digests) == NAMES
    entries = [Entry(name, 1, 1) for name in NAMES]
    assert not set(Quarantine.read(path).digests) ^ {entry.name for entry in entries}


@pytest.mark.parametrize("escaped", [True, False])
def test_table_with_file_names_that_look_like_formulas(tmp_path: Path, escaped: bool) -> None:
    """With escaped cells, as `vitrail predict --csv` writes them, and without."""
    names = [name for name in NAMES if name.strip() == name and (escaped or not name.startswith("'"))]
    fill(tmp_path, names)
    out = io.StringIO(newline="")
    table = SafeCsvWriter(out) if escaped else csv.writer(out)
    table.writerow(["path", "label"])
    for index, name in enumerate(names):
        table.writerow([name, "=yes" if index % 2 else "-1"])
    (tmp_path / "list.csv").write_bytes(out.getvalue().encode())
    data = open_dataset(tmp_path / "list.csv", None)
    assert data.classes == ("-1", "=yes") and not data.excluded
    assert sorted(name for name, _ in contents(data)["all"]) == sorted(names)
    images = find_images([tmp_path / "list.csv"])
    assert sorted(map(images.name, range(len(images)))) == sorted(names)
