"""The page's modules as one script: what a file that asks for nothing can carry.

A module becomes a function that runs once and gives what it exports, in the order in which modules need one another. It takes the
one style in which the page is written: imports and exports of names, each at the beginning of a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
