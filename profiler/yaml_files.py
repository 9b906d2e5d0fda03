"""Files that people write and we read: strict YAML in, frozen dataclasses out, and back.

Every fault is an OsdpError that names the file, the line and the field.  Types are checked without
coercion (text is never taken for a number), unknown keys are refused, and `schema` tells versions
apart.  Writing is atomic: a reader sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import stat
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from profiler.errors import OsdpError
from profiler.strict_yaml import NUMBER, Document, Location, StrictYamlError, parse

T = TypeVar("T")

LARGEST_FILE_BYTES = 64 << 20

_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text (in quotes where it looks like something else)",
    "tuple_type": "a list",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a value in a document."""

    location: Location
    """Where it is."""
    complaint: str
    """What is wrong, to follow the name of the field: `is missing`."""
    got: str = ""
    expected: str = ""
    advice: str = ""


def read_yaml(path: Path, type_: type[T], *, schema: str, check: Callable[[T], Iterable[Problem]] | None = None) -> T:
    """Read the YAML file at `path` into the dataclass `type_`.

    `schema` is what its `schema` key must say.  `check` may find faults that types do not show.
    Raises OsdpError.
    """
    text = read_text(path)
    try:
        document = parse(text)
    except StrictYamlError as error:
        column = f", column {error.column}" if error.column else ""
        what = f"{path}, line {error.line}{column}: {error.problem}"
        raise OsdpError(what, expected="plain YAML") from None
    data = _mapping_of_schema(path, document, schema)
    if "schema" not in _field_names(type_):
        data = {key: value for key, value in data.items() if key != "schema"}
    value, problems = validate(data, type_)
    if value is not None and check is not None:
        problems = list(check(value))
    if problems or value is None:
        raise _refusal(path, document, problems)
    return value


def validate(data: object, type_: type[T], at: Location = ()) -> tuple[T | None, list[Problem]]:
    """Return `data` as `type_`, or None and what is wrong with it; `at` is where `data` stands."""
    from pydantic import TypeAdapter, ValidationError  # here, because it costs 0.15 s

    try:
        return TypeAdapter(type_).validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
    return None, [_problem(detail, type_, at) for detail in details]


def read_text(path: Path) -> str:
    """Return the UTF-8 text in the file at `path`; raises OsdpError."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise OsdpError(f"{path} does not exist", advice=_neighbour(path)) from None
    except IsADirectoryError:
        raise OsdpError(f"{path} is a directory", expected="a file") from None
    except PermissionError:
        raise OsdpError(f"{path} may not be read", advice="check its permissions") from None
    except (OSError, ValueError) as error:
        raise OsdpError(f"{path} cannot be read", got=str(error)) from None
    if len(data) > LARGEST_FILE_BYTES:
        raise OsdpError(f"{path} is too large", expected=f"at most {LARGEST_FILE_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        got = f"the byte 0x{data[error.start]:02x}"
        raise OsdpError(f"{path}, line {line}: this is not UTF-8 text", got=got) from None


def write_yaml(path: Path, value: Any, header_comment: str = "") -> None:
    """Write the dataclass instance `value` to `path`, so that `read_yaml` gives an equal one."""
    write_text_atomic(path, to_yaml(value, header_comment))


def to_yaml(value: Any, header_comment: str = "") -> str:
    """Return the dataclass instance `value` as YAML, its fields in order, `schema` first."""
    plain = _plain(value)
    if "schema" not in plain:
        plain = {"schema": type(value).SCHEMA, **plain}
    header = "".join(f"# {line}".rstrip() + "\n" for line in header_comment.splitlines())
    body: str = yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100
    )
    return header + body


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary file beside it; raises OsdpError.

    Keeps the mode of a file that is there, and writes through symbolic links.  Something that is
    not a regular file (a pipe, /dev/null) is written in place.
    """
    try:
        data = text.encode()
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        if target.is_dir():
            raise IsADirectoryError("it is a directory")
        _replace(target, data)
    except FileNotFoundError:
        advice = f"make the directory first: mkdir -p {path.parent}"
        raise OsdpError(f"{path} cannot be written", got="no such directory", advice=advice) from None
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise OsdpError(f"{path} cannot be written", got=got, advice="choose another path") from None


def _replace(target: Path, data: bytes) -> None:
    """Put `data` in the place of `target` in one step."""
    temporary = target.parent / f".osdp-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            if target.exists():
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _mapping_of_schema(path: Path, document: Document, schema: str) -> dict[str, Any]:
    """Return the document's mapping after checking what its `schema` says."""
    value = document.value
    if not isinstance(value, dict):
        kind = {list: "a list", type(None): "nothing"}.get(type(value), repr(value)[:60])
        raise OsdpError(f"{path} must hold a mapping", got=kind, expected=f"`schema: {schema}` and more keys")
    if "schema" not in value:
        raise OsdpError(f"{path} is not an OSDP file", got="no `schema`", expected=f"schema: {schema}")
    got = value["schema"]
    if got == schema:
        return value
    where = f"{path}, line {document.line(('schema',))}"
    if isinstance(got, str) and got.rpartition("/")[0] == schema.rpartition("/")[0]:
        advice = "write the file again with this version of OSDP, or use the version that wrote it"
        what = f"{where}: written by another version of OSDP"
        raise OsdpError(what, got=got, expected=schema, advice=advice)
    raise OsdpError(f"{where}: this is another kind of file", got=str(got)[:60], expected=schema)


def _problem(detail: Any, type_: type[Any], at: Location) -> Problem:
    """Turn one of pydantic's errors into ours."""
    inner = tuple(str(part) for part in detail["loc"])
    location = (*at, *inner)
    if detail["type"] == "missing":
        return Problem(location, "is missing")
    if detail["type"] == "unexpected_keyword_argument":
        known = _names_at(type_, inner[:-1])
        near = get_close_matches(inner[-1], known, n=1)
        advice = f"did you mean `{near[0]}`?" if near else ""
        return Problem(location, "is not known here", expected=f"one of {', '.join(known)}", advice=advice)
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return Problem(location, "is wrong", repr(detail["input"])[:80], _EXPECTED.get(detail["type"], expected))


def _refusal(path: Path, document: Document, problems: list[Problem]) -> OsdpError:
    """Return the error for a document with `problems`: the first in full, the next few by name."""

    def told(problem: Problem) -> str:
        field = ".".join(problem.location) or "the document"
        return f"line {document.line(problem.location)}: `{field}` {problem.complaint}"

    # A key that is missing comes last: a wrong name beside it explains it.
    problems = sorted(problems, key=lambda p: (p.complaint == "is missing", document.line(p.location)))
    first, *others = problems
    what = f"{path}, {told(first)}"
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        what += f"\n  also: {'; '.join(told(other) for other in others[:5])}{more}"
    return OsdpError(what, got=first.got, expected=first.expected, advice=first.advice)


def _names_at(type_: Any, location: Location) -> list[str]:
    """Return the fields of the dataclass that stands at `location` inside `type_`."""
    for key in location:
        if dataclasses.is_dataclass(type_):
            type_ = typing.get_type_hints(type_).get(key)
        else:  # dict[str, X] and tuple[X, ...] both end with X
            parts = [part for part in typing.get_args(type_) if part is not Ellipsis]
            type_ = parts[-1] if parts else None
        if isinstance(type_, types.UnionType):
            type_ = next(part for part in typing.get_args(type_) if part is not types.NoneType)
    return _field_names(type_)


def _field_names(type_: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(type_)] if dataclasses.is_dataclass(type_) else []


def _neighbour(path: Path) -> str:
    """Return a hint at a file beside `path` with nearly its name, or an empty text."""
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return f"there is no directory {path.parent} either"
    return f"did you mean {path.parent / near[0]}?" if near else ""


def _plain(value: Any) -> Any:
    """Return `value` as what YAML can hold; raises for what would not come back equal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"cannot write {value}: numbers must be finite")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"cannot write a {type(value).__name__}")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes what our reader would take for a number, and writes equal objects twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("!number", NUMBER, list("+-.0123456789"))
