"""Reads YAML files into frozen dataclasses, strictly, and writes them.

Every fault is an OsdpError that names the file, the line and the field.  Types are checked without coercion (text is
never converted to a number), unknown keys are rejected, and `schema` holds the version.  Writing is atomic: a reader
sees the old file or the new one, never a part of one.

`parse` reads libyaml's events instead of using its loader, so that nothing is constructed but dict, list, str, int,
float, bool and None, and so that the line of every value is known.  Rejected: anchors and aliases (they allow
exponential documents), tags, duplicate keys, several documents, numbers that are not finite, nesting deeper than 64,
and more than the largest plans need.  Scalars follow YAML 1.2: `1e9` is a number; `yes`, `12:30` and dates are text.
Keys are text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from profiler.errors import OsdpError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

LARGEST_FILE_BYTES = 64 << 20
LARGEST_YAML_BYTES = 16 << 20
"""A plan of 100,000 operators takes 7 MB."""
MOST_VALUES = 300_000
"""In one document, keys not counted: a plan has one for each operator and block."""
LONGEST_TEXT = 1 << 16
"""Characters of one key or value."""

_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "float_type": "a number",
    "greater_than_equal": "{ge:g} or more",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:,}",
    "list_type": "a list",
    "string_type": "text (in quotes where it looks like something else)",
    "tuple_type": "a list",
}

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
Location = tuple[str, ...]
"""Keys and indices from the top of the document to a value, as text."""

Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DEEPEST = 64
_WRONG_FILE = "a file that OSDP or you wrote for it; this one is larger than any of those"
_MOST_PROBLEMS = 100
"""Of one document that are looked at; the first few are shown."""
_LONGEST_INTEGER = 20  # characters of -2^63; Python refuses to convert very long ones


class StrictYamlError(Exception):
    """A document that is rejected: where (1-based) and why."""

    def __init__(self, problem: str, line: int, column: int = 0) -> None:
        super().__init__(problem)
        self.line = line
        self.column = column


class TooMuchError(StrictYamlError):
    """A document that holds more than any of ours."""

    def __init__(self, problem: str, line: int, *, got: str, expected: str) -> None:
        super().__init__(problem, line)
        self.got = got
        self.expected = expected


@dataclass
class Document:
    """A parsed document, with the line of every value."""

    value: Value
    """The top-level value."""
    lines: dict[Location, int] = field(default_factory=dict)
    """1-based line of every value, or of its key if it has one; `()` is the top."""

    def line(self, location: Location) -> int:
        """Return the line of the value at `location`, or of its nearest parent that exists."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a value in a document."""

    location: Location
    """Where it is."""
    complaint: str
    """What is wrong, as it follows the field's name in the message: `is missing`."""
    got: str = ""
    expected: str = ""
    advice: str = ""


def read_yaml(path: Path, type_: type[T], *, schema: str, check: Callable[[T], Iterable[Problem]] | None = None) -> T:
    """Read the YAML file at `path` into the dataclass `type_`.

    `schema` is the expected value of its `schema` key.  `check` finds faults that types do not express.
    Raises OsdpError.
    """
    text = read_text(path, LARGEST_YAML_BYTES)
    try:
        document = parse(text)
    except StrictYamlError as error:
        if isinstance(error, TooMuchError):
            what = f"{path}, line {error.line}: {error}"
            raise OsdpError(what, got=error.got, expected=error.expected, advice=_WRONG_FILE) from None
        column = f", column {error.column}" if error.column else ""
        what = f"{path}, line {error.line}{column}: {error}"
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
    """Return `data` as `type_`, or None and its problems; `at` is the location of `data`."""
    from pydantic import ValidationError  # here, because it costs 0.15 s

    try:
        return cast(T, _adapter(cast(Any, type_)).validate_json(json.dumps(data), strict=True)), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    return None, [_problem(detail, type_, at) for detail in details[:_MOST_PROBLEMS]]


@cache
def _adapter(type_: Any) -> TypeAdapter[Any]:
    """Return what validates a type; making it costs more than using it."""
    from pydantic import TypeAdapter

    return TypeAdapter(type_)


def read_text(path: Path, largest_bytes: int = LARGEST_FILE_BYTES) -> str:
    """Return the UTF-8 text in the file at `path`; raises OsdpError."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(largest_bytes + 1)
    except FileNotFoundError:
        raise OsdpError(f"{path} does not exist", advice=_neighbour(path)) from None
    except IsADirectoryError:
        raise OsdpError(f"{path} is a directory", expected="a file") from None
    except PermissionError:
        raise OsdpError(f"{path} may not be read", advice="check its permissions") from None
    except (OSError, ValueError) as error:
        raise OsdpError(f"{path} cannot be read", got=str(error)) from None
    if len(data) > largest_bytes:
        got, expected = f"more than {largest_bytes >> 20} MiB", f"at most {largest_bytes >> 20} MiB"
        raise OsdpError(f"{path} is too large", got=got, expected=expected, advice=_WRONG_FILE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        got = f"the byte 0x{data[error.start]:02x}"
        raise OsdpError(f"{path}, line {line}: this is not UTF-8 text", got=got) from None


def write_yaml(path: Path, value: Any, header_comment: str = "") -> None:
    """Write the dataclass instance `value` to `path`; `read_yaml` returns an equal one."""
    write_text_atomic(path, to_yaml(value, header_comment))


def to_yaml(value: Any, header_comment: str = "") -> str:
    """Return the dataclass instance `value` as YAML, its fields in order, `schema` first."""
    plain = _plain(value)
    if "schema" not in plain:
        plain = {"schema": type(value).SCHEMA, **plain}
    header = "".join(f"# {line}".rstrip() + "\n" for line in header_comment.splitlines())
    body: str = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return header + body


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` as `write_bytes_atomic` does."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file beside it; raises OsdpError.

    Keeps the mode of an existing file and follows symbolic links.  What is not a regular file (a pipe, /dev/null)
    is written in place.
    """
    try:
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
    """Replace the content of `target` by `data` atomically."""
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
    """Return the document's mapping after checking its `schema`."""
    value = document.value
    if not isinstance(value, dict):
        found = {list: "a list", type(None): "nothing"}.get(type(value), repr(value)[:60])
        raise OsdpError(f"{path} must hold a mapping", got=found, expected=f"`schema: {schema}` and more keys")
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
    """Convert one of pydantic's errors."""
    inner = tuple(str(part) for part in detail["loc"])
    location = (*at, *inner)
    if detail["type"] == "missing":
        return Problem(location, "is missing")
    if detail["type"] == "unexpected_keyword_argument":
        known = _names_at(type_, inner[:-1])
        near = get_close_matches(inner[-1], known, n=1)
        advice = f"did you mean `{near[0]}`?" if near else ""
        return Problem(location, "is not known here", expected=f"one of {', '.join(known)}", advice=advice)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    words = _EXPECTED.get(detail["type"])
    expected = message if words is None else words.format(**detail.get("ctx", {}))
    return Problem(location, "is wrong", repr(detail["input"])[:80], expected)


def _refusal(path: Path, document: Document, problems: list[Problem]) -> OsdpError:
    """Return the error for a document with `problems`: the first in full, a few more by name."""

    def describe(problem: Problem) -> str:
        field = ".".join(problem.location) or "the document"
        return f"line {document.line(problem.location)}: `{field}` {problem.complaint}"

    # Missing keys come last: often a misspelt key explains them.
    problems = sorted(problems, key=lambda p: (p.complaint == "is missing", document.line(p.location)))
    first, *others = problems
    what = f"{path}, {describe(first)}"
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        more = " and many more" if len(problems) >= _MOST_PROBLEMS else more
        what += f"\n  also: {'; '.join(describe(other) for other in others[:5])}{more}"
    return OsdpError(what, got=first.got, expected=first.expected, advice=first.advice)


def _names_at(type_: Any, location: Location) -> list[str]:
    """Return the fields of the dataclass at `location` inside `type_`."""
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
    """Return a hint at a file in the same directory with a similar name, or an empty text."""
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return f"there is no directory {path.parent} either"
    return f"did you mean {path.parent / near[0]}?" if near else ""


def _plain(value: Any) -> Any:
    """Return `value` as plain YAML values; raises for values that would not be read back equal."""
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
    """Quotes text that `parse` would read as a number, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("!number", _NUMBER, list("+-.0123456789"))


# --- parsing -------------------------------------------------------------------------------------


def parse(text: str) -> Document:
    """Return the one document in `text`; raises StrictYamlError."""
    document = Document(None)
    try:
        events = yaml.parse(text, Loader=Loader)
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if document.lines:
                    raise StrictYamlError("a second document starts here", _line(event))
                document.value = _value(next(events), events, (), document.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise StrictYamlError(error.problem or "this is not YAML", line, column) from None
    except yaml.reader.ReaderError as error:
        line = text.encode().count(b"\n", 0, error.position) + 1
        raise StrictYamlError(str(error.reason), line, 1) from None
    return document


def _value(event: yaml.Event, events: Iterator[yaml.Event], at: Location, lines: dict[Location, int]) -> Value:
    """Build the value that starts with `event`, consuming its further events."""
    _refuse(event, at)
    lines.setdefault(at, _line(event))
    if len(lines) > MOST_VALUES:
        got, expected = f"more than {MOST_VALUES:,}", f"at most {MOST_VALUES:,}; a plan has one for each operator"
        raise TooMuchError("too many values", _line(event), got=got, expected=expected)
    if isinstance(event, yaml.MappingStartEvent):
        mapping: dict[str, Value] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            _refuse(key, at)
            if not isinstance(key, yaml.ScalarEvent):
                raise StrictYamlError("a key must be text", _line(key))
            name = _text(key)
            if name in mapping:
                raise StrictYamlError(f"the key {name!r} is given twice", _line(key))
            lines[*at, name] = _line(key)  # the value may start below its key
            mapping[name] = _value(next(events), events, (*at, name), lines)
        return mapping
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Value] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_value(item, events, (*at, str(len(items))), lines))
        return items
    assert isinstance(event, yaml.ScalarEvent), "libyaml starts a value with nothing else"
    return _scalar(event)


def _refuse(event: yaml.Event, at: Location) -> None:
    """Raise for aliases, anchors, tags and too deep nesting."""
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise StrictYamlError("anchors (&) and aliases (*) are not allowed", _line(event))
    if tag := getattr(event, "tag", None):
        raise StrictYamlError(f"tags are not allowed, got {tag!r}", _line(event))
    if len(at) > _DEEPEST:
        raise StrictYamlError(f"nested deeper than {_DEEPEST} levels", _line(event))


def _scalar(event: yaml.ScalarEvent) -> Value:
    """Return the value of a scalar; quoted and block scalars are text."""
    text = _text(event)
    if not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise StrictYamlError(f"numbers must be finite, got {text}", _line(event))
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    if not math.isfinite(number):
        raise StrictYamlError(f"numbers must be finite, got {text[:40]}", _line(event))
    if not _INTEGER.fullmatch(text):
        return number
    if len(text) > _LONGEST_INTEGER or abs(int(text)) >= 1 << 63:
        raise StrictYamlError(f"whole numbers must be below 2^63, got {text[:40]}", _line(event))
    return int(text)


def _text(event: yaml.ScalarEvent) -> str:
    text = str(event.value)
    if len(text) > LONGEST_TEXT:
        got, expected = f"{len(text):,} characters", f"at most {LONGEST_TEXT:,}"
        raise TooMuchError("a key or a value is too long", _line(event), got=got, expected=expected)
    return text


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark else 1
