"""Files of the page: modules, styles, and all of them bundled into one script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

from shardwise.present.charts.palette import stylesheet

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}


class Page(NamedTuple):
    """A file: its text and media type."""

    text: str
    kind: str


@cache
def pages() -> dict[str, Page]:
    """Every file by its path; nothing else is served."""
    folder = resources.files("shardwise.present.explorer").joinpath("page")
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        ending = file.name[file.name.rfind(".") :]
        if ending in KINDS:
            found[f"/{file.name}"] = Page(file.read_text(encoding="utf-8"), KINDS[ending])
    found["/colours.css"] = Page(stylesheet(), KINDS[".css"])
    return found | {"/": found["/index.html"]}


IMPORT = re.compile(r'^import \{\s(?P<names>[\w$,\s]+?),?\s\} from "\./(?P<module>[\w-]+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?P<kind>async function|function|class|const) (?P<name>\w+)", re.MULTILINE)


def bundled(modules: Mapping[str, str], entry: str) -> str:
    """The script of an entry among modules by name. Raises `KeyError` for a module that is not there.

    >>> print(bundled({"a": "export const one = 1;\\n", "b": 'import { one } from "./a.js";\\nconsole.log(one);\\n'}, "b"))
    "use strict";
    const $a = (() => {
    const one = 1;
    return { one };
    })();
    const $b = (() => {
    const { one } = $a;
    console.log(one);
    return {  };
    })();
    """
    order: list[str] = []

    def visit(name: str) -> None:
        for found in IMPORT.finditer(modules[name]):
            visit(found["module"])
        if name not in order:
            order.append(name)

    visit(entry)
    return "\n".join(['"use strict";', *(_wrapped(name, modules[name]) for name in order)])


def _wrapped(name: str, text: str) -> str:
    names = [found["name"] for found in EXPORT.finditer(text)]
    body = IMPORT.sub(lambda found: f"const {{ {found['names']} }} = ${found['module']};\n", text)
    body = EXPORT.sub(r"\g<kind> \g<name>", body)
    return f"const ${name} = (() => {{\n{body.rstrip()}\nreturn {{ {', '.join(names)} }};\n}})();"
