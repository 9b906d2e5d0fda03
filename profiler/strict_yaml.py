"""YAML without its traps: one document, plain data, and the line of every value.

Read from libyaml's events instead of its loader, so that nothing is constructed but dict, list,
str, int, float, bool and None.  Refused: anchors and aliases (they allow exponential documents),
tags, duplicate keys, several documents, numbers that are not finite, and nesting deeper than 64.
Scalars follow YAML 1.2: `1e9` is a number, `yes`, `12:30` and dates are text.  Keys are text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
Location = tuple[str, ...]
"""Keys and indices from the top of the document to a value, as text."""

Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

INTEGER = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DEEPEST = 64
_LONGEST_INTEGER = 20  # characters of -2^63; Python refuses to convert very long ones


class StrictYamlError(Exception):
    """A document that is refused: where (1-based) and why."""

    def __init__(self, problem: str, line: int, column: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.column = column


@dataclass
class Document:
    """What a text says, and where it says it."""

    value: Value
    """The top-level value."""
    lines: dict[Location, int] = field(default_factory=dict)
    """1-based line of every value, or of its key if it has one; `()` is the top."""

    def line(self, location: Location) -> int:
        """Return the line of the value at `location`, or of its nearest parent that exists."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


def parse(text: str) -> Document:
    """Return the one document in `text`; raises StrictYamlError."""
    document = Document(None)
    try:
        events = yaml.parse(text, Loader=Loader)
        starts = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                starts += 1
                if starts > 1:
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
    """Build the value that starts with `event`, taking what belongs to it from `events`."""
    _refuse(event, at)
    lines.setdefault(at, _line(event))
    if isinstance(event, yaml.MappingStartEvent):
        mapping: dict[str, Value] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            name = _key(key, mapping, at)
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
    """Raise for an event that plain data does not need."""
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise StrictYamlError("anchors (&) and aliases (*) are not allowed", _line(event))
    if tag := getattr(event, "tag", None):
        raise StrictYamlError(f"tags are not allowed, got {tag!r}", _line(event))
    if len(at) > _DEEPEST:
        raise StrictYamlError(f"nested deeper than {_DEEPEST} levels", _line(event))


def _key(event: yaml.Event, mapping: dict[str, Value], at: Location) -> str:
    """Return the text of a key; raises for one that is no text or was given before."""
    _refuse(event, at)
    if not isinstance(event, yaml.ScalarEvent):
        raise StrictYamlError("a key must be text", _line(event))
    name = str(event.value)
    if name in mapping:
        raise StrictYamlError(f"the key {name!r} is given twice", _line(event))
    return name


def _scalar(event: yaml.ScalarEvent) -> Value:
    """Return what a scalar means; quoted and block scalars are text."""
    text = str(event.value)
    if not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if NOT_FINITE.fullmatch(text):
        raise StrictYamlError(f"numbers must be finite, got {text}", _line(event))
    if not NUMBER.fullmatch(text):
        return text
    number = float(text)
    if not math.isfinite(number):
        raise StrictYamlError(f"numbers must be finite, got {text[:40]}", _line(event))
    if not INTEGER.fullmatch(text):
        return number
    if len(text) > _LONGEST_INTEGER or abs(int(text)) >= 1 << 63:
        raise StrictYamlError(f"whole numbers must be below 2^63, got {text[:40]}", _line(event))
    return int(text)


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark else 1
