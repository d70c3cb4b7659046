"""Architecture rules, checked in the source: imports between packages, file sizes, number of arguments."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vitrail"
# Packages from the top down. Each may import itself and packages on lower lines, but none on the same line.
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
    # Shared modules
    ("interrupt",),
    ("distributed",),
    ("errors", "atomic", "spreadsheet", "strict_json", "terminal"),
)
LEVEL = {room: -number for number, rooms in enumerate(ROOMS) for room in rooms}
# Exceptions from the limits. They may not grow, and are removed from the list once they are below the limit.
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
MANY_ARGUMENTS = {  # over 9, except in `cli`, where each argument is an option
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
    """Return the number of lines without the docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


def imported_rooms(path: Path) -> set[str]:
    """Return the packages that a file imports, at the top or inside a function."""
    imported = set()
    for node in nodes(path):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module] if node.module != "vitrail" else [f"vitrail.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        imported |= {m.split(".")[1] for m in modules if m.startswith("vitrail.")}
    return imported & LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down_only(path):
    package = room(path)
    if package == "__init__":
        return  # the public API imports from any package
    for other in imported_rooms(path) - {package}:
        assert LEVEL[other] < LEVEL[package], f"{package} imports {other}"


def test_no_command_imports_another():
    for path in (PACKAGE / "commands").glob("*.py"):
        assert "commands" not in imported_rooms(path), path


def test_no_import_cycles_in_data():
    """Folders and single modules of vitrail/data import each other in one direction only."""
    data = PACKAGE / "data"
    imports: dict[str, set[str]] = {}
    for path in data.rglob("*.py"):
        package = path.relative_to(data).parts[0].removesuffix(".py")
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail.data."):
                imports.setdefault(package, set()).add(node.module.split(".")[2])
    order: list[str] = []
    left = {room: others - {room} for room, others in imports.items()}
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        order += free
        left = {room: others for room, others in left.items() if room not in free}
    assert order.index("sources") < order.index("dataset")


def test_rooms_lists_every_package():
    assert LEVEL.keys() == {room(path) for path in FILES} - {"__init__"}


def test_size_limits_of_files_functions_and_arguments():
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
    for counts, limit, exceptions in (
        (lines, 300, dict.fromkeys(LONG_FILES, 450)),
        (long, 80, LONG_FUNCTIONS),
        (many, 9, MANY_ARGUMENTS),
    ):
        too_large = {name: count for name, count in counts.items() if count > exceptions.get(name, limit)}
        assert not too_large, f"over {limit}: make them smaller"
        obsolete = sorted(name for name in exceptions if counts.get(name, 0) <= limit)
        assert not obsolete, f"at most {limit} now, or deleted: remove them from the list"


def test_only_plots_import_matplotlib_and_only_decode_opens_images():
    for path in FILES:
        text = path.read_text()
        if path.name not in ("canvas.py", "plots.py", "training_plots.py", "explain_plots.py"):
            assert "import matplotlib" not in text and "from matplotlib" not in text, path
        if path.name not in ("decode.py", "traits.py", "build.py"):
            assert "Image.open" not in text, path


@pytest.mark.parametrize("module", ["vitrail", "vitrail.cli.main", "vitrail.config", "vitrail.data.dataset"])
def test_import_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_config_field_is_used():
    """A setting that no code reads would silently have no effect."""
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


def test_layout_page_and_figure_list_every_package():
    folder = PACKAGE.parent / "docs"
    page, picture = (folder / "layout.md").read_text(), (folder / "rooms.svg").read_text()
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert (
        rooms == {room for room in LEVEL if f"| `{room}` |" in page} == {r for r in LEVEL if f">{r}</text>" in picture}
    )
