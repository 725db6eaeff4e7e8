"""Server of the Model Context Protocol: verbs as tools of an agent, over standard input and output.

A tool is a verb: its parameters are those of the verb's signature, its text is the verb's report, its structured content the
payload of `--json`. Source of the protocol: https://modelcontextprotocol.io, as the `mcp` package implements it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import anyio
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from shardwise.present.registry import payload_of, report_of
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.rendering.report import short_form
from shardwise.present.verbs import GROUPS
from shardwise.values import InputError, ShardwiseError, ignore_progress, raise_problems
from shardwise.version import __version__

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from shardwise.present.verb import Argument, Verb

INSTRUCTIONS = (
    "Shardwise says how to shard the training of a large transformer on a cluster, what a step costs and what bounds it. Begin "
    "with `plan` (a model of the catalogue or a Hugging Face id, and a cluster such as h100:64); write it to a file with `out`, "
    "and pass that file to `explain` and `export`. Sizes are texts such as 4Mi or 15T. Intervals are 90% prediction intervals; "
    "a number without one may be a bound, which the text says."
)


def load_verbs(names: Collection[str]) -> dict[str, Verb]:
    """Return the verbs with these names. They are loaded when the server starts."""
    return {entry.name: entry.load() for group in GROUPS.values() for entry in group if entry.name in names}


def tool_of(name: str, verb: Verb) -> types.Tool:
    """Return the description of a verb as a tool: a JSON schema of its parameters and of the files that it can write."""
    properties = {parameter: _property_schema(argument) for parameter, argument in verb.arguments.items()}
    properties |= {
        export.name: {"type": "string", "description": f"path of a file: {export.help}"} for export in verb.exports
    }
    if verb.has_details:
        properties["verbose"] = {"type": "boolean", "description": "return the whole report, with all its details"}
    for schema in properties.values():
        schema["description"] = _with_parameter_names(verb, schema["description"])
    return types.Tool(
        name=name,
        description=_with_parameter_names(verb, verb.full_description),
        input_schema={
            "type": "object", "properties": properties, "required": [n for n, a in verb.arguments.items() if a.is_required],
            "additionalProperties": False,
        },
    )  # fmt: skip


def _with_parameter_names(verb: Verb, text: str) -> str:
    """Return a text of the help with the names of parameters in place of the flags of the command line."""
    names = {argument.flag: parameter for parameter, argument in verb.arguments.items()}
    names |= {export.flag: export.name for export in verb.exports}
    return re.sub(r"--[a-z][a-z-]*", lambda match: f"`{names[match[0]]}`" if match[0] in names else match[0], text)


def _property_schema(argument: Argument) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": ["string", "number"], "description": argument.help_text}
    if argument.parse is bool:
        schema["type"] = "boolean"
    elif argument.repeat or argument.variadic:
        schema |= {"type": "array", "items": {"type": "string"}}
    elif choices := argument.choice_list:
        schema |= {"type": "string", "enum": list(choices)}
    return schema


def call_tool(name: str, verb: Verb, written: Mapping[str, Any]) -> types.CallToolResult:
    """Run a verb with an agent's arguments; return its report and payload, or with `is_error` what is wrong with them."""
    try:
        result, added = verb.call(*_parse_arguments(name, verb, written), progress=ignore_progress)
        report = report_of(result)
        if isinstance(report, str):  # a text for programs
            text = report
        else:
            report = [*report, *added]
            text = render_text(report if written.get("verbose") or not verb.has_details else short_form(report))
        content: list[Any] = [types.TextContent(type="text", text=text)]
        # Through JSON, so that tuples and numbers are what a client would read from a file.
        payload = json.loads(json.dumps(payload_of(result)))
        return types.CallToolResult(content=content, structured_content=payload)
    except ShardwiseError as error:
        return _error_result(error)


def _error_result(error: ShardwiseError) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text="\n".join(error.problems))],
        structured_content={"problems": list(error.problems), "exit_code": error.exit_code},
        is_error=True,
    )


def _parse_arguments(name: str, verb: Verb, written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of the function, and the targets of its exports. Raises `InputError` with all that is wrong."""
    exports = {export.name for export in verb.exports}
    parameter_names = {*verb.arguments, *exports, "verbose"}
    problems = [
        f"{name}: no parameter {key!r}; it has {', '.join(sorted(parameter_names))}"
        for key in written
        if key not in parameter_names
    ]
    problems += [
        f"{name}: {parameter} is missing; {argument.help_text} is required"
        for parameter, argument in verb.arguments.items()
        if argument.is_required and written.get(parameter) in (None, "", [])
    ]
    values: dict[str, Any] = {}
    for parameter, argument in verb.arguments.items():
        if written.get(parameter) in (None, False, "", []):
            continue
        try:
            values[parameter] = _parse_value(argument, written[parameter])
        except argparse.ArgumentTypeError as error:
            problems.append(f"{parameter}: {error}")
    raise_problems(problems)
    return values, {key: str(written[key]) for key in written if key in exports and written[key]}


def _parse_value(argument: Argument, value: Any) -> Any:
    if argument.parse is bool:
        return bool(value)
    if argument.repeat or argument.variadic:
        return [argument.parse(str(text)) for text in (value if isinstance(value, list) else [value])]
    choices = argument.choice_list
    if choices and str(value) not in choices:
        raise argparse.ArgumentTypeError(f"found {value!r}; one of {', '.join(choices)} is required")
    return argument.parse(str(value))


def make_server(names: Collection[str]) -> Server[Any]:
    """Return the server, with a tool for each of these verbs."""
    verbs = load_verbs(names)
    tools = [tool_of(name, verb) for name, verb in verbs.items()]

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def run_tool(context: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in verbs:
            return _error_result(InputError(f"tool: found {params.name!r}; one of {', '.join(verbs)} is required"))
        # A search takes seconds: in a thread, so that the server answers pings meanwhile.
        return await anyio.to_thread.run_sync(call_tool, params.name, verbs[params.name], params.arguments or {})

    return Server(
        "shardwise", version=__version__, instructions=INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=run_tool
    )


async def _serve_stdio(names: Collection[str]) -> None:
    server = make_server(names)
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


def serve_stdio(names: Collection[str]) -> None:
    """Serve these verbs over standard input and output until the client closes them."""
    anyio.run(_serve_stdio, names)
