"""Seeded mutations of files: corruption, careless edits and attacks."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

# Characters that must not reach a terminal from a file. Newlines and tabs are text.
RAW = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
NASTY = "x\x1b[2J\x1b]0;y\x07\r\x08[/red][bold]\u202egnp\x9b31m\n:bomb: =1+1"
VALUES: list[Any] = [None, True, -1, 0, 1e308, 10**30, 0.5, "", NASTY, "1", [], [[]], ["a", 1], {}, {"a": {"b": None}}]
DEEP = 100_000


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes truncated, with flipped bits, inserted bytes or shuffled lines, or unrelated bytes."""
    whole = bytearray(data)
    match draw.randrange(8):
        case 0:
            return data[: draw.randrange(len(data) + 1)]
        case 1:
            for _ in range(draw.randint(1, 8)):
                whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        case 2:
            at = draw.randrange(len(whole))
            whole[at:at] = draw.choice([b"\0", b"\xff\xfe", b"\x1b[2J", NASTY.encode(), b'"', b"9" * 5000, b"[" * 2000])
        case 3:
            lines = data.splitlines(keepends=True)
            draw.shuffle(lines)
            return b"".join(lines[: draw.randint(1, len(lines))])
        case 4:
            return draw.randbytes(draw.randint(0, 400))
        case 5:
            return draw.choice([b"", b"\n", b"[" * DEEP, b'{"a":' * DEEP, b"a = " + b"[" * DEEP])
        case 6:  # replace a number
            text = data.decode("utf-8", "replace")
            numbers = list(re.finditer(r"-?\d+(\.\d+)?", text))
            if numbers:
                match = draw.choice(numbers)
                new = draw.choice(["-1", "0", "1e400", "nan", "9" * 30, "true", '""', "[]", "[100000, 100000]"])
                return (text[: match.start()] + new + text[match.end() :]).encode()
        case _:  # replace a word with control characters or markup
            words = list(re.finditer(rb"[A-Za-z_]{3,}", data))
            if words:
                match = draw.choice(words)
                new = draw.choice([rb"\u001b[2J", b"[/red]", NASTY.encode(), rb"\u0000", b"a" * 5000])
                return data[: match.start()] + new + data[match.end() :]
    return bytes(whole)


def mutated_values(values: Any, draw: random.Random) -> Any:
    """Return a document with one or two values replaced, added or removed."""
    document = copy.deepcopy(values)
    for _ in range(draw.randint(1, 2)):
        holder, key = draw.choice(list(_items(document)))
        match draw.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(["unknown", NASTY, ""])] = draw.choice(VALUES)
            case _:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
        if not document:
            break
    return document


def _items(values: Any) -> Any:
    """Yield every (container, key) of a nested document."""
    for key, inner in list(values.items()) if isinstance(values, dict) else list(enumerate(values)):
        yield values, key
        if isinstance(inner, dict | list):
            yield from _items(inner)


def mutated_json(data: bytes, draw: random.Random) -> bytes:
    """Return a JSON document with mutated values or, less often, mutated bytes."""
    if draw.random() < 0.3:
        return mutated_bytes(data, draw)
    return json.dumps(mutated_values(json.loads(data), draw)).encode()


def mutated_rows(data: bytes, draw: random.Random) -> bytes:
    """Return JSON lines with a mutated line or, less often, mutated bytes."""
    if draw.random() < 0.3:
        return mutated_bytes(data, draw)
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(draw.choice([mutated_values(json.loads(lines[at]), draw), *VALUES])).encode()
    return b"\n".join(lines) + b"\n"


Mutation = Callable[[bytes, random.Random], bytes]
