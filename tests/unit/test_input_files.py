"""Files that Shardwise did not write are read by a single reader only."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardwise
from shardwise.values import (
    DamagedFileError,
    FileMessages,
    InputError,
    describe_error,
    open_input,
    parse_csv_records,
    parse_digits,
    parse_json,
    parse_toml,
    parse_yaml,
    read_bytes,
    read_json,
    read_json_object,
    read_lines,
    read_text,
    require_number,
    require_regular,
)
from shardwise.values.input_texts import MAX_DEPTH, MAX_DIGITS, parse_integer, parse_number

SOURCE = Path(shardwise.__file__).parent
READER = {"values/input_files.py", "values/input_texts.py"}
PACKAGE_DATA, WIRE, SYSTEM = "data of the package", "messages of our own processes", "files of the operating system"
VERIFIED = "after `verify_records`"
# Files that may open or parse something else, and why.
EXCEPTIONS = {
    ("hardware/chip_units.py", "read_text"): PACKAGE_DATA,
    ("hardware/chip_units.py", "tomllib.loads"): PACKAGE_DATA,
    ("measure/serving/package_rows.py", "csv.DictReader"): PACKAGE_DATA,
    ("measure/serving/package_rows.py", "read_text"): PACKAGE_DATA,
    ("measure/serving/serving_rows.py", "csv.DictReader"): PACKAGE_DATA,
    ("measure/serving/serving_rows.py", "open"): PACKAGE_DATA,
    ("serve/engines.py", "read_text"): PACKAGE_DATA,
    ("serve/engines.py", "tomllib.loads"): PACKAGE_DATA,
    ("serve/serving_constants.py", "read_text"): PACKAGE_DATA,
    ("serve/serving_constants.py", "tomllib.loads"): PACKAGE_DATA,
    ("hardware/chips.py", "read_text"): PACKAGE_DATA,
    ("hardware/chips.py", "tomllib.loads"): PACKAGE_DATA,
    ("hardware/published_constants.py", "read_text"): PACKAGE_DATA,
    ("hardware/published_constants.py", "tomllib.loads"): PACKAGE_DATA,
    ("hardware/stacks.py", "read_text"): PACKAGE_DATA,
    ("hardware/stacks.py", "tomllib.loads"): PACKAGE_DATA,
    ("interop/frameworks/maxtext/model_options.py", "csv.DictReader"): PACKAGE_DATA,
    ("interop/frameworks/maxtext/model_options.py", "json.loads"): PACKAGE_DATA,
    ("interop/frameworks/primus.py", "csv.DictReader"): PACKAGE_DATA,
    ("interop/frameworks/primus.py", "json.loads"): PACKAGE_DATA,
    ("interop/frameworks/torchtitan/config_registry.py", "json.loads"): PACKAGE_DATA,
    ("interop/frameworks/torchtitan/models.py", "json.loads"): PACKAGE_DATA,
    ("interop/serving/checkpoints.py", "read_text"): PACKAGE_DATA,
    ("interop/serving/environment.py", "csv.DictReader"): PACKAGE_DATA,
    ("interop/text_formats/option_tables.py", "csv.DictReader"): PACKAGE_DATA,
    ("interop/text_formats/option_tables.py", "read_text"): PACKAGE_DATA,
    ("measure/calibrate/published_runs/nearest_runs.py", "csv.reader"): PACKAGE_DATA,
    ("measure/calibrate/published_runs/nearest_runs.py", "read_text"): PACKAGE_DATA,
    ("measure/calibrate/published_runs/run_table.py", "read_text"): PACKAGE_DATA,
    ("model/huggingface/family_rules.py", "read_text"): PACKAGE_DATA,
    ("model/huggingface/family_rules.py", "tomllib.loads"): PACKAGE_DATA,
    ("model/load.py", "read_text"): PACKAGE_DATA,
    ("model/load.py", "tomllib.loads"): PACKAGE_DATA,
    ("present/explorer/page_files.py", "read_text"): PACKAGE_DATA,
    ("present/explorer/child_process.py", "pickle.load"): WIRE,
    ("measure/kernel_ladders/compile_ladders.py", "json.loads"): WIRE,
    ("run/checkpoints/process_group.py", "json.loads"): WIRE,
    ("run/faults/heartbeat.py", "json.loads"): WIRE,
    ("run/faults/rank_exit.py", "json.loads"): WIRE,
    ("run/faults/rank_status.py", "json.loads"): WIRE,
    ("run/faults/rendezvous.py", "json.loads"): WIRE,
    ("run/rank_threads.py", "pickle.loads"): WIRE,
    ("verify/product_runs.py", "json.loads"): WIRE,
    ("verify/product_runs.py", "read_text"): WIRE,
    ("verify/xla_compile.py", "json.loads"): WIRE,
    ("verify/xla_worker.py", "json.load"): WIRE,
    ("run/machine_resources.py", "read_text"): SYSTEM,
    ("interop/weights/megatron_rank_files.py", "torch.load"): VERIFIED,
    ("run/checkpoints/dcp_reader.py", "torch.load"): VERIFIED,
    ("run/checkpoints/torch_archive.py", "open"): "records of an opened zip file",
    ("measure/calibrate/user_runs.py", "open"): "a file that is written, after `require_regular`",
    ("price/derivation_cache.py", "pickle.loads"): "our own cache, after its checksum",
}  # fmt: skip
METHODS = {"read_text", "read_bytes"}
FUNCTIONS = {
    "json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.full_load", "tomllib.load", "tomllib.loads", "csv.reader",
    "csv.DictReader", "pickle.load", "pickle.loads", "pickle.Unpickler", "np.load", "np.fromfile", "np.loadtxt", "torch.load",
    "ast.literal_eval",
}  # fmt: skip


def _calls(path: Path) -> Iterator[str]:
    """Yield the calls of a file that read or parse."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in FUNCTIONS:
            copies = name == "json.loads" and ast.unparse(node.args[0]).startswith("json.dumps(")
            if not copies:  # a payload as JSON restores it
                yield name
        elif method in METHODS:
            yield method
        elif (method == "open" and name not in ("webbrowser.open", "os.open")) or name == "open":
            arguments = [*node.args[name == "open" :], *(word.value for word in node.keywords if word.arg == "mode")]
            mode = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else "r"
            if "r" in str(mode):
                yield "open"


def test_only_the_reader_reads_and_parses_foreign_files() -> None:
    calls = {
        (path.relative_to(SOURCE).as_posix(), call)
        for path in SOURCE.rglob("*.py")
        for call in _calls(path)
        if path.relative_to(SOURCE).as_posix() not in READER
    }
    assert sorted(calls - EXCEPTIONS.keys()) == [], "use shardwise.values.input_files and input_texts"
    assert sorted(EXCEPTIONS.keys() - calls) == [], "remove exceptions that no file needs"


# Files that may parse numbers of texts by `int` and `float`, and which numbers.
NUMBER_EXCEPTIONS = {
    "values/units.py": "quantities with a unit, whose digits its pattern bounds or a caller's text of an argument",
    "present/charts/palette.py": "colours of our own",
    "present/charts/draw_marks.py": "colours of our own",
}  # fmt: skip
TEXT_METHODS = {
    "strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "replace",
    "decode", "group", "groups", "findall",
}  # fmt: skip
MATCHERS = {"match", "search", "fullmatch", "finditer", "findall"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _names_of_texts(function: Function) -> set[str]:
    """Return the parameters that are texts, and the names that hold matches of a pattern."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    names = {
        a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) in ("str", "str | None")
    }
    for node in ast.walk(function):
        target, value = None, None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.NamedExpr):
            target, value = node.target, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            target, value = node.target, node.iter
        if isinstance(target, ast.Name) and value is not None and _attributes(value) & MATCHERS:
            names.add(target.id)
    return names


def _attributes(expression: ast.expr) -> set[str]:
    return {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}


def _parses_text(call: ast.Call, names: set[str]) -> bool:
    """Return whether a call is `int` or `float` of a text, or maps one over texts."""
    function, arguments = ast.unparse(call.func), call.args
    if function == "map" and arguments and ast.unparse(arguments[0]) in ("int", "float"):
        arguments = arguments[1:]
    elif function not in ("int", "float"):
        return False
    if not arguments or any(ast.unparse(n.func) in ("len", "sum") for n in ast.walk(call) if isinstance(n, ast.Call)):
        return False
    value = arguments[0].values[0] if isinstance(arguments[0], ast.BoolOp) else arguments[0]
    while isinstance(value, ast.Subscript):
        value = value.value
    methods = {
        n.func.attr for n in ast.walk(arguments[0]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    return bool(methods & (TEXT_METHODS | MATCHERS)) or (isinstance(value, ast.Name) and value.id in names)


def _number_parsers(source: str) -> list[int]:
    """Return the lines on which numbers of texts are parsed by `int` or `float`."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
    return sorted(
        {
            call.lineno
            for function in functions
            for call in ast.walk(function)
            if isinstance(call, ast.Call) and _parses_text(call, _names_of_texts(function))
        }
    )


@pytest.mark.parametrize(
    ("expression", "is_parsed"),
    [
        ("int(text)", True), ("float(text.strip())", True), ("int(re.search(r'x', text)[1])", True),
        ("[int(m[1]) for m in re.finditer(r'x', text)]", True), ("list(map(int, text.split('x')))", True),
        ("int(size)", False), ("int(len(text.split()))", False), ("parse_integer(text)", False),
    ],
)  # fmt: skip
def test_calls_that_parse_a_number_are_detected(expression: str, is_parsed: bool) -> None:
    assert _number_parsers(f"def read(text: str, size: float):\n    return {expression}") == [2] * is_parsed


def test_only_the_reader_parses_numbers_of_texts() -> None:
    """The reader's `parse_integer` and `parse_number` bound the digits: the time of `int` grows with their square."""
    lines = {
        path.relative_to(SOURCE).as_posix(): places
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).as_posix() not in READER
        and (places := _number_parsers(path.read_text(encoding="utf-8")))
    }
    unlisted = {name: places for name, places in lines.items() if name not in NUMBER_EXCEPTIONS}
    assert unlisted == {}, "use parse_integer and parse_number of shardwise.values.input_texts"
    assert sorted(NUMBER_EXCEPTIONS.keys() - lines.keys()) == [], "remove exceptions that no file needs"


@pytest.mark.parametrize("parse", [parse_integer, parse_number])
def test_numbers_of_texts_have_bounded_digits(parse: Callable[[str], float]) -> None:
    assert parse("1" * MAX_DIGITS) == pytest.approx(float("1" * MAX_DIGITS))
    for text in ("1" * 401, "1" * 5_000):
        with pytest.raises(InputError, match=r"a number of [0-9,]+ characters; one of at most [0-9]+ is required"):
            parse(text)
    with pytest.raises(ValueError, match="x"):
        parse("x")


def test_sources_do_not_index_the_lines_of_an_errors_text() -> None:
    """`str(error).splitlines()[0]` fails on an error without text: `describe_error` does not."""
    for path in SOURCE.rglob("*.py"):
        assert "str(error).splitlines()[0]" not in path.read_text(encoding="utf-8"), path
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(OSError(2, "No such file")) == "No such file"
    assert describe_error(KeyError("a\nb")) == "'a\\nb'"


READERS: tuple[Callable[[str | Path], object], ...] = (read_bytes, read_text, read_json, read_json_object)


@pytest.mark.parametrize("reader", READERS)
def test_pipes_devices_and_folders_are_refused_at_once(reader: Callable[[str | Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "it is a named pipe, and a regular file is required"),
        ("/dev/zero", "it is a device, and a regular file is required"),
        (tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), ("a\0b", "embedded null byte"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            reader(path)


def test_libraries_get_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="a regular file is required"):
            require_regular(tmp_path / name)
    (tmp_path / "file").touch()
    require_regular(tmp_path / "file")


def test_a_pipe_is_read_where_allowed_with_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.values.input_files.PIPE_WAIT_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open_input(pipe, allow_pipe=True) as file, pytest.raises(OSError, match=r"sent nothing for 0\.2 s"):
        file.read(10)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"step 1"))
    writer.start()
    with open_input(pipe, allow_pipe=True) as file:
        assert file.read(10) == b"step 1"
        writer.join()
        assert file.read(10) == b""


def test_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345\n6")
    assert read_bytes(path, max_bytes=7) == b"12345\n6"
    with pytest.raises(InputError, match="more than 6 bytes"):
        read_bytes(path, max_bytes=6)
    assert list(read_lines(path, 6)) == [b"12345\n", b"6"]
    with pytest.raises(OSError, match="a line of more than 5 bytes"):
        list(read_lines(path, 5))


def test_errors_have_the_callers_prefix_requirement_and_type(tmp_path: Path) -> None:
    messages = FileMessages("model: ", "a config.json is required", DamagedFileError)
    path = tmp_path / "config.json"
    for content, message in ((b"\xff", "is not text: byte 0xff at 0 is not UTF-8"), (b"{", "is not JSON: Expecting")):
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=rf"^model: {path} {message}.*; a config.json is required$"):
            read_json(path, messages)
    path.write_text("[1]")
    with pytest.raises(DamagedFileError, match="holds a list; an object is required"):
        read_json_object(path, messages)


NESTED = {
    parse_json: ("[" * 10**6, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '{"a":' * 900 + "1" + "}" * 900),
    parse_toml: ("a = " + "[" * 10**5, "a = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" + ".".join("a" * 100) + "]"),
    parse_yaml: ("[" * 10**5, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "".join(f"{' ' * n}a:\n" for n in range(90))),
}  # fmt: skip


@pytest.mark.parametrize("parse", NESTED, ids=lambda parse: parse.__name__)
def test_depth_is_bounded(parse: Callable[[str, str], object]) -> None:
    for text in NESTED[parse]:
        with pytest.raises(InputError, match=r"^file( is not (JSON|TOML|YAML))?: "):
            parse(text, "file")


@pytest.mark.parametrize("digits", [MAX_DIGITS + 1, 400, 5_000])
@pytest.mark.parametrize(("parse", "text"), [(parse_json, '{"a": %s}'), (parse_toml, "a = %s"), (parse_yaml, "a: %s")])
def test_digits_are_bounded(parse: Callable[[str, str], object], text: str, digits: int) -> None:
    assert parse(text % ("9" * MAX_DIGITS), "file") == {"a": int("9" * MAX_DIGITS)}
    with pytest.raises(InputError, match="digits"):
        parse(text % ("9" * digits), "file")


def test_json_values_are_bounded_and_optionally_finite_with_unique_keys() -> None:
    assert parse_json('{"a": "%s"}' % ("9" * 400), "file") == {"a": "9" * 400}
    with pytest.raises(InputError, match=r"5,000,001 values; at most 4,000,000"):
        parse_json("[" + "[]," * 2_500_000 + "1]", "file")
    for literal in ("NaN", "Infinity", "-Infinity", "1e999"):
        assert str(parse_json(literal, "file")) in ("nan", "inf", "-inf")
        with pytest.raises(InputError, match="a finite number is required"):
            parse_json(literal, "file", finite=True)
    with pytest.raises(InputError, match="'a' is given twice"):
        parse_json('{"a": 1, "a": 2}', "file", unique_keys=True)


def test_yaml_that_expands_to_billions_of_values_is_refused() -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    with pytest.raises(InputError, match="more than 100,000 values"):
        parse_yaml("\n".join(lines), "file")


def test_a_cell_of_a_table_is_bounded() -> None:
    with pytest.raises(InputError, match=r"^runs.csv, line 2: not CSV: field larger"):
        list(parse_csv_records("a\n" + "x" * 200_000, "runs.csv")[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0, True, "1", None, 10**400])
def test_a_number_must_be_finite_and_above_its_bound(value: object) -> None:
    with pytest.raises(InputError, match=r"^model: eps is .*; a finite number above 0 is required$"):
        require_number(value, "eps", FileMessages("model: "))
    assert parse_digits(str(value)) in (None, 0, 1)


def test_valid_numbers_are_read() -> None:
    assert (require_number(1e-5, "eps"), require_number(3, "rows", is_integer=True)) == (1e-5, 3)
    with pytest.raises(InputError, match="a whole number above 0"):
        require_number(3.5, "rows", is_integer=True)
