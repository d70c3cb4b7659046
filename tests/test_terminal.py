"""Control characters and markup in names and texts from files are escaped on a terminal."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tests.hostile import NASTY, RAW
from vitrail.terminal import SafeConsole, escape, is_printable, make_console, printable, printable_json, printable_text

LEGIT = ["ملف.png", "文件.png", "é.png", "👨‍👩‍👧.png", "می‌خواهم", "naïve café", "שלום", "हिन्दी"]


def shown(what: object, **options: object) -> str:
    out = io.StringIO()
    SafeConsole(file=out, width=200, **options).print(what)
    return out.getvalue()


CONTROL = [*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]


@pytest.mark.parametrize("code", CONTROL)
def test_control_characters_are_escaped(code: int) -> None:
    name = f"a{chr(code)}b"
    assert printable(name).isprintable() and printable(name).startswith("a\\") and printable(name).endswith("b")
    assert printable_json(name) == f"a\\u{code:04x}b"
    assert printable_text(name) == (name if chr(code) in "\n\t" else printable(name))


@pytest.mark.parametrize("name", LEGIT)
def test_names_in_any_script_are_unchanged(name: str) -> None:
    assert printable(name) == name and escape(name) == name and printable_json(name) == name and is_printable(name)
    assert shown(escape(name)) == f"{name}\n"


def test_names_are_not_interpreted_as_markup_or_emoji() -> None:
    for name in ("[red]x", "[/]", "x[/red].png", ":bomb:", "a\x1b[2Jb", "a\r\x08b", "[link=http://x]y"):
        assert shown(f"[bold]{escape(name)}[/]") == printable(name) + "\n"


def test_console_escapes_text_that_the_caller_did_not() -> None:
    for what in (NASTY, Text(NASTY), Table.grid(), f"[red]{NASTY}"):
        if isinstance(what, Table):
            what.add_row(NASTY, Text(NASTY))
        for options in ({}, {"force_terminal": True, "color_system": None, "legacy_windows": False}):
            output = shown(what, **options)
            assert not RAW.search(output) and "\x1b" not in output
    out = io.StringIO()
    with Progress(TextColumn("{task.description}", markup=False), console=SafeConsole(file=out, width=200)) as bar:
        bar.add_task(NASTY, total=1)
    assert not RAW.search(out.getvalue())


def test_styles_still_reach_a_terminal() -> None:
    assert "\x1b[1mx\x1b[0m" in shown(f"[bold]{escape('x')}[/]", force_terminal=True, color_system="standard")


def test_every_console_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.cli.main import app

    consoles = [
        app.console,
        app.error_console,
        *(make_console(stderr=s, ignore_write_errors=k) for s in (0, 1) for k in (0, 1)),
    ]
    assert all(isinstance(console, SafeConsole) for console in consoles) and issubclass(SafeConsole, Console)
