"""Run every command of the documents and put what it prints under it.

    python docs/refresh.py            # rewrite the documents
    python docs/refresh.py README.md  # this one alone
    python docs/refresh.py --check    # say which outputs are out of date, exit status 1

A block that starts with `$ shardwise ...` is a session: the command, an empty line, and its output. Of several commands, one
under the other, the last one's output is shown; they, and a command that writes with `--out`, run in an empty folder, where each
finds the files of those before. A line `...` at the end of a block means that the output goes on. A block of Python that starts
with `>>>` is a session too, each on its own. A picture with a comment under it, such as `<!-- shardwise schedule ... -->`, is
drawn by that command.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path

from shardwise.present.command_line import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMAND = r"shardwise (?:[^\n]*\\\n)*[^\n]+"
NEXT = "\n$ "  # between the commands of a session
SESSION = re.compile(rf"```\n\$ ({COMMAND}(?:\n\$ {COMMAND})*)\n\n(.*?)\n```", re.DOTALL)
PYTHON = re.compile(r"```python\n(>>> .*?)\n```", re.DOTALL)
DRAWING = {
    "roofline": "--plot",
    "memory": "--plot",
    "precision": "--plot",
    "batch": "--plot",
    "figures": "--out",
    "cheat-sheet": "--a4",
}  # of others --draw
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+\.svg)\)\n<!-- (shardwise [^\n]+) -->")


def timeless(text: str) -> str:
    """Without the CPU time, which no two runs share."""
    return re.sub(r"in [\d.]+ s of CPU time", "in some CPU time", text).strip()


def printed(session: str) -> str:
    """What the last command of a session prints, errors included."""
    commands = session.split(NEXT)
    if len(commands) == 1 and "--out" not in session:
        return said_by(session)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return [said_by(command) for command in commands][-1]


def said_by(command: str) -> str:
    """What a command prints, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(shlex.split(command.replace("\\\n", " "))[1:])
    return out.getvalue().strip()


def renewed(block: re.Match[str]) -> str:
    """A session with its output as it is now; an output that is current stays to the letter."""
    command, old = block.groups()
    new = printed(command)
    if old.endswith("\n..."):
        new = "\n".join(new.splitlines()[: old.count("\n")]).rstrip() + "\n..."
    if timeless(new) == timeless(old):
        return block.group()
    return f"```\n$ {command}\n\n{new}\n```"


def replayed(session: str) -> str:
    """A session of Python with what each statement prints now."""
    names: dict[str, object] = {}
    lines: list[str] = []
    for example in doctest.DocTestParser().get_examples(session + "\n"):
        first, *following = example.source.rstrip("\n").split("\n")
        lines += [f">>> {first}", *(f"... {line}" for line in following)]
        lines += (
            ["..."] if following and following[-1].startswith(" ") else []
        )  # ends an indented block, as at a prompt
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example.source, "<session>", "single"), names)
        lines += out.getvalue().splitlines()
    return "\n".join(lines)


def drawn(command: str) -> str:
    """The picture that a command draws now."""
    flag = DRAWING.get(command.split()[1], "--draw")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "drawn.svg"
        printed(f"{command} {flag} {target}")
        return target.read_text(encoding="utf-8")


def redraw(document: Path, *, write: bool) -> bool:
    """Whether a picture of a document was out of date; `write` draws it again."""
    stale = False
    for name, command in PICTURE.findall(document.read_text(encoding="utf-8")):
        target, new = document.parent / name, drawn(command)
        if not target.is_file() or target.read_text(encoding="utf-8") != new:
            stale = True
            if write:
                target.write_text(new, encoding="utf-8")
    return stale


def refresh(document: Path, *, write: bool) -> bool:
    """Whether a document was out of date; `write` brings it up to date."""
    stale = redraw(document, write=write)
    text = document.read_text(encoding="utf-8")
    new = SESSION.sub(renewed, text)
    new = PYTHON.sub(lambda block: f"```python\n{replayed(block.group(1))}\n```", new)
    if new != text and write:
        document.write_text(new, encoding="utf-8")
    return stale or new != text


if __name__ == "__main__":
    chosen = [Path(word).resolve() for word in sys.argv[1:] if word != "--check"] or DOCUMENTS
    stale = [str(path.relative_to(ROOT)) for path in chosen if refresh(path, write="--check" not in sys.argv)]
    print("\n".join(f"{name} was out of date" for name in stale) or "all outputs are current")
    sys.exit(1 if stale and "--check" in sys.argv else 0)
