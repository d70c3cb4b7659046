"""The house rules that a reader relies on, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vitrail"
# A room may import rooms with a smaller number, and itself. Rooms of one number do not know each other.
LEVEL = {
    "errors": 0,
    "atomic": 0,
    "spreadsheet": 0,
    "strict_json": 0,
    "terminal": 0,
    "distributed": 1,
    "interrupt": 2,
    "config": 2,
    "metrics": 3,
    "models": 4,
    "data": 4,
    "tasks": 5,
    "weights": 5,
    "doctor": 5,
    "inference": 6,
    "training": 7,
    "interpret": 7,
    "report": 8,
    "workflows": 9,
    "commands": 10,
    "cli": 11,
    "__main__": 12,
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module] if node.module != "vitrail" else [f"vitrail.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        found |= {m.split(".")[1] for m in modules if m.startswith("vitrail.")}
    return found & LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = room(path)
    if own == "__init__":
        return  # the public API may name any room
    for other in imported_rooms(path) - {own}:
        assert LEVEL[other] < LEVEL[own], f"{own} imports {other}"


def test_no_command_imports_another():
    for path in (PACKAGE / "commands").glob("*.py"):
        assert "commands" not in imported_rooms(path), path


def test_no_arrows_in_a_circle_among_the_rooms_of_data():
    """A folder counts as one room, a file beside the folders as another."""
    data = PACKAGE / "data"
    arrows: dict[str, set[str]] = {}
    for path in data.rglob("*.py"):
        own = path.relative_to(data).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail.data."):
                arrows.setdefault(own, set()).add(node.module.split(".")[2])
    order: list[str] = []
    left = {room: others - {room} for room, others in arrows.items()}
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        order += free
        left = {room: others for room, others in left.items() if room not in free}
    assert order.index("sources") < order.index("dataset")


def test_every_room_is_in_the_plan():
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert rooms <= LEVEL.keys()


def test_only_plots_import_matplotlib_and_only_decode_opens_images():
    for path in FILES:
        text = path.read_text()
        if path.name not in ("canvas.py", "plots.py", "explain_plots.py"):
            assert "import matplotlib" not in text and "from matplotlib" not in text, path
        if path.name not in ("decode.py", "traits.py", "build.py"):
            assert "Image.open" not in text, path


@pytest.mark.parametrize("module", ["vitrail", "vitrail.cli.main", "vitrail.config", "vitrail.data.dataset"])
def test_start_up_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_config_field_has_a_reader():
    """A key that nothing reads is a promise that nothing keeps."""
    from pydantic import BaseModel

    from vitrail import config

    read = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
    schemas = [s for s in vars(config).values() if isinstance(s, type) and issubclass(s, BaseModel)]
    for schema in schemas:
        for name in schema.model_fields:
            assert name in read, f"nothing reads {schema.__name__}.{name}"


def test_the_page_on_the_layout_names_every_room():
    folder = PACKAGE.parent / "docs"
    page, picture = (folder / "layout.md").read_text(), (folder / "rooms.svg").read_text()
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert (
        rooms == {room for room in LEVEL if f"| `{room}` |" in page} == {r for r in LEVEL if f">{r}</text>" in picture}
    )
