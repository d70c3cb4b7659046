"""The house rules that a reader relies on, read from the source."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vitrail"
# From the top down: a room may import rooms of lower lines, and itself. Those of one line do not know each other.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("workflows",),
    ("report",),
    ("training", "interpret"),
    ("inference",),
    ("tasks", "weights", "doctor"),
    ("models", "data"),
    ("metrics", "config"),
    # Files that serve all
    ("interrupt",),
    ("distributed",),
    ("errors", "atomic", "spreadsheet", "strict_json", "terminal"),
)
LEVEL = {room: -number for number, rooms in enumerate(ROOMS) for room in rooms}
# What is larger than the rest, and may grow no more. Whatever shrinks below the limit leaves the list.
LONG_FILES = {  # over 300 lines; none over 450
    "data/decode.py",
    "models/vit.py",
    "data/files.py",
    "data/pack.py",
    "inference/classifier.py",
    "weights/bundle.py",
    "weights/formats/google.py",
    "weights/formats/huggingface.py",
    "weights/formats/timm.py",
    "workflows/run_folder.py",
}
LONG_FUNCTIONS: dict[str, int] = {}  # over 80 lines
MANY_ARGUMENTS = {  # over 9; in `cli` each is an option of a command, and not counted
    "commands/convert.py convert": 10,
    "commands/evaluate.py evaluate": 11,
    "commands/explain.py explain": 12,
    "commands/fewshot.py fewshot": 10,
    "commands/vtab.py vtab": 10,
    "workflows/train_run.py train": 14,
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without its docstring, which lists the parameters of what is public."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


def imported_rooms(path: Path) -> set[str]:
    """Rooms a file imports, at the top or inside a function."""
    found = set()
    for node in nodes(path):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module] if node.module != "vitrail" else [f"vitrail.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        found |= {m.split(".")[1] for m in modules if m.startswith("vitrail.")}
    return found & LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=name_of)
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
        for node in nodes(path):
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


def test_the_plan_names_every_room_and_no_other():
    assert LEVEL.keys() == {room(path) for path in FILES} - {"__init__"}


def test_files_functions_and_arguments_are_few_or_known_to_be_many():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert max(lines.values()) <= 450
    long, many = {}, {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{name_of(path)} {node.name}"
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                long[name] = max(long.get(name, 0), lines_of(node))
                if room(path) != "cli":
                    many[name] = max(many.get(name, 0), len([a for a in arguments if a.arg not in ("self", "cls")]))
    for found, limit, known in (
        (lines, 300, dict.fromkeys(LONG_FILES, 450)),
        (long, 80, LONG_FUNCTIONS),
        (many, 9, MANY_ARGUMENTS),
    ):
        grown = {name: count for name, count in found.items() if count > known.get(name, limit)}
        assert not grown, f"over {limit}: make them smaller"
        shrunk = sorted(name for name in known if found.get(name, 0) <= limit)
        assert not shrunk, f"at most {limit} now, or gone: take them off the list"


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
        for node in nodes(path):
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
