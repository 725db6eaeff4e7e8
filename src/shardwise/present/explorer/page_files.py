"""Files of the page: modules, styles, and all of them bundled into one script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from shardwise.present.charts.palette import stylesheet

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}


class Page(NamedTuple):
    """A file of the page: its text and media type."""

    text: str
    kind: str


@cache
def pages() -> dict[str, Page]:
    """Return every file by its path; nothing else is served."""
    folder = resources.files("shardwise.present.explorer").joinpath("page")
    files = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        ending = file.name[file.name.rfind(".") :]
        if ending in KINDS:
            files[f"/{file.name}"] = Page(file.read_text(encoding="utf-8"), KINDS[ending])
    files["/colours.css"] = Page(stylesheet(), KINDS[".css"])
    return files | {"/": files["/index.html"]}


def page_body() -> str:
    """Return the body of the page, whose elements the modules fill."""
    return pages()["/"].text.partition("<body>\n")[2].partition("  </body>")[0]


IMPORT = re.compile(r'^import \{\s(?P<names>[\w$,\s]+?),?\s\} from "\./(?P<module>[\w-]+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?P<kind>async function|function|class|const) (?P<name>\w+)", re.MULTILINE)


def inline_page(
    title: str, body: str, main: str, payload: Mapping[str, Any], *, payload_id: str, scripts: str = ""
) -> str:
    """Return a page as one HTML file: styles, a body, a payload as JSON, and the script of a main module.

    It runs no other script but those of `scripts`, sources of a content security policy, and fetches nothing.
    """
    files = pages()
    modules = {path[1:-3]: file.text for path, file in files.items() if path.endswith(".js")}
    script = bundle_modules(modules, main)
    style = files["/colours.css"].text + files["/style.css"].text
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    allowed = f"'sha256-{digest}' {scripts}".strip()
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    # "<" is written as an escape, so that no text of the payload ends the element that it is in.
    data = json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} · shardwise</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}"
        f'<script id="{payload_id}" type="application/json">\n{data}\n</script>\n'
        f"<script>\n{script}\n</script>\n</body>\n</html>\n"
    )


def bundle_modules(modules: Mapping[str, str], main: str) -> str:
    """Return the script of a main module and the modules that it imports. Raises `KeyError` for an unknown module.

    >>> print(bundle_modules({"a": "export const tp = 1;\\n", "b": 'import { tp } from "./a.js";\\nconsole.log(tp);\\n'}, "b"))
    "use strict";
    const $a = (() => {
    const tp = 1;
    return { tp };
    })();
    const $b = (() => {
    const { tp } = $a;
    console.log(tp);
    return {  };
    })();
    """
    order: list[str] = []

    def visit(name: str) -> None:
        for statement in IMPORT.finditer(modules[name]):
            visit(statement["module"])
        if name not in order:
            order.append(name)

    visit(main)
    return "\n".join(['"use strict";', *(_wrap_module(name, modules[name]) for name in order)])


def _wrap_module(name: str, text: str) -> str:
    names = [statement["name"] for statement in EXPORT.finditer(text)]
    body = IMPORT.sub(lambda statement: f"const {{ {statement['names']} }} = ${statement['module']};\n", text)
    body = EXPORT.sub(r"\g<kind> \g<name>", body)
    return f"const ${name} = (() => {{\n{body.rstrip()}\nreturn {{ {', '.join(names)} }};\n}})();"
