"""Mutations of files and of command lines, drawn from a random generator."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

NUMBERS = (
    "0", "-1", "1e9", "1000000000", "9" * 40, "9" * 400, "9" * 5000, "NaN", "nan", "Infinity", "-Infinity", "inf", "1e308",
    "1e999",    "-0.0", "1e-320", "0x10", "1_000", "٣", "2.5", "true", "null", "4294967296", "18446744073709551616",
)  # fmt: skip
WORDS = (
    "", " ", "\0", "\n", "x", "no", "None", "../..", "/dev/null", "a" * 5000, "é", "\ud7ff", "[]", "{}", "$(id)", "${A:-${A}}",
    "%s",    "=", ",", ":", "'", '"', "\\", "--", "-", "#", "!!python/object:os.system x", "*a", "&a [*a]", "{" * 200, "[" * 200,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, 10**9, 10**40, 10**400, -(10**400), float("nan"), float("inf"), 1e308, 1e-320, "", "x", "1",
    "9" * 400, [], [[]], {}, {"a": 1}, [None], ["x"] * 50, "\0", "bf16", "float16", [1, "a"],
)  # fmt: skip
SPECIAL = ("pipe", "device", "folder", "missing", "empty", "no permission")


def mutate_file(path: Path, draw: random.Random) -> str:
    """Damage a file, and return how."""
    kind = draw.choice(("bit", "bytes", "cut", "number", "number", "word", "json", "json", "json", "line", "special"))
    if kind == "special":
        return _replace_file(path, draw.choice(SPECIAL))
    content = path.read_bytes()
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        content = _mutate_bytes(kind, content, draw)
    path.write_bytes(content)
    return kind


def _replace_file(path: Path, kind: str) -> str:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.touch(0o000 if kind == "no permission" else 0o644)
    return kind


def _mutate_bytes(kind: str, content: bytes, draw: random.Random) -> bytes:
    if not content:
        return draw.choice(WORDS).encode()
    if kind == "json":
        return _mutate_json(content, draw)
    if kind == "number" and (matches := list(re.finditer(rb"-?\d+(\.\d+)?(e[-+]?\d+)?", content[:200_000]))):
        match = draw.choice(matches)
        return content[: match.start()] + draw.choice(NUMBERS).encode() + content[match.end() :]
    if kind == "word" and (matches := list(re.finditer(rb"[A-Za-z_][\w.-]*", content[:200_000]))):
        match = draw.choice(matches)
        return content[: match.start()] + draw.choice(WORDS).encode() + content[match.end() :]
    if kind == "line" and b"\n" in content:
        lines = content.split(b"\n")
        source, target = draw.randrange(len(lines)), draw.randrange(len(lines))
        if draw.random() < 0.5:
            lines.insert(target, lines[source])
        else:
            del lines[source]
        return b"\n".join(lines)
    if kind == "cut":
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    place = draw.randrange(len(changed))
    if kind == "bytes":
        changed[place : place + draw.choice((0, 1, 4))] = draw.randbytes(draw.choice((1, 4, 16)))
    else:
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _mutate_json(content: bytes, draw: random.Random) -> bytes:
    """Change one value of a JSON text, or of one of its lines; any other text gets a flipped bit."""
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    number = draw.randrange(len(lines))
    try:
        tree = json.loads(lines[number])
    except ValueError:
        return _mutate_bytes("bit", content, draw)
    places: list[tuple[Any, Any]] = []
    _collect(tree, places)
    if not places:
        return json.dumps(draw.choice(VALUES)).encode()
    parent, key = draw.choice(places)
    action = draw.random()
    if action < 0.6:
        parent[key] = draw.choice(VALUES)
    elif action < 0.75:
        del parent[key]
    elif action < 0.85:
        parent[key] = [parent[key]] if draw.random() < 0.5 else {"x": parent[key]}
    elif isinstance(parent, dict):
        parent[draw.choice(WORDS[:12])] = parent.pop(key)
    else:
        parent += parent[:50]
    lines[number] = json.dumps(tree).encode()
    return b"\n".join(lines)


def _collect(tree: Any, places: list[tuple[Any, Any]]) -> None:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        places.append((tree, key))
        _collect(value, places)


def mutate_words(words: list[str], draw: random.Random) -> list[str]:
    """Change one or two words of a command line behind the verb."""
    words = list(words)
    for _ in range(draw.choice((1, 1, 2))):
        place = draw.randrange(1, len(words)) if len(words) > 1 else 0
        action = draw.random()
        if place == 0:
            words.append(draw.choice(WORDS))
        elif action < 0.4:
            matches = list(re.finditer(r"\d+(\.\d+)?", words[place]))
            match = draw.choice(matches) if matches else None
            odd = draw.choice(NUMBERS if match else WORDS)
            words[place] = words[place][: match.start()] + odd + words[place][match.end() :] if match else odd
        elif action < 0.6:
            words[place] = draw.choice(WORDS + NUMBERS)
        elif action < 0.75:
            del words[place]
        elif action < 0.85:
            words.insert(place, draw.choice(words[1:]))
        elif words[place]:
            middle = draw.randrange(len(words[place]))
            words[place] = words[place][:middle] + draw.choice("[]{}()=,.:;@*+-/% \t") + words[place][middle:]
    return [word.replace("\0", "") if word != "\0" else "x" for word in words]
