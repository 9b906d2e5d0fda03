"""Strict YAML reading, atomic writing, and amounts of memory."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from profiler import yaml_files
from profiler.affine import Affine
from profiler.byte_sizes import format_bytes, parse_bytes
from profiler.errors import OsdpError
from profiler.model_graph import Block, Call, CallMemory, ModelGraph, Operator, Parameter, Work
from profiler.yaml_files import Problem, read_yaml, to_yaml, write_text_atomic, write_yaml

FORBID = {"extra": "forbid"}


@dataclass(frozen=True)
class Wheel:
    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID

    radius: float
    spokes: int = 8


@dataclass(frozen=True)
class Cart:
    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    SCHEMA: ClassVar[str] = "test.cart/2"

    name: str
    wheels: tuple[Wheel, ...]
    spare: Wheel | None
    loads: dict[str, float]
    is_red: bool = False


GOOD = """\
schema: test.cart/2
name: hand cart
wheels:
  - radius: 1e3
  - {radius: 2, spokes: 6}
spare: null
loads:
  sand: .5
is_red: true
"""


def read(tmp_path: Path, text: str | bytes) -> Cart:
    path = tmp_path / "cart.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path, Cart, schema=Cart.SCHEMA)


def refused(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(OsdpError) as caught:
        read(tmp_path, text)
    return str(caught.value)


# --- amounts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB", 8 * 1024**3),
        ("8GiB", 8 * 1024**3),
        ("8G", 8 * 1024**3),
        (" 8 gb ", 8 * 1024**3),
        ("7.5GB", 15 * 1024**3 // 2),
        (".5GiB", 512 * 1024**2),
        ("512MB", 512 * 1024**2),
        ("512M", 512 * 1024**2),
        ("512MiB", 512 * 1024**2),
        ("1TB", 1024**4),
        ("8192", 8192 * 1024**2),
        (8192, 8192 * 1024**2),
    ],
)
def test_parse_bytes_takes_what_vendors_print(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


NO_UNITS = ["GB", "8XB", "8KB", "8,5GB", "8 9GB", "٨GB", "8GB\x00", "1e3GB", "nanGB", "infGB", "nan", "inf", ""]
NO_SIZES = ["-8GB", "+8GB", "0", "0GB", "1.5", "0.0000001MB", "9" * 400 + "GB", -1, 0, True]


@pytest.mark.parametrize("text", [*NO_UNITS, *NO_SIZES])
def test_parse_bytes_refuses_the_rest(text: str | int) -> None:
    with pytest.raises(OsdpError) as caught:
        parse_bytes(text)
    assert "8GB is 8192 MiB" in caught.value.expected
    assert caught.value.got == repr(text)


@given(st.text(max_size=12))
def test_parse_bytes_raises_nothing_else(text: str) -> None:
    with suppress(OsdpError):
        assert parse_bytes(text) >= 1


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0, "0.0 MiB"),
        (512 * 1024**2, "512.0 MiB"),
        (1024**3 - 1, "1.00 GiB"),  # never 1024.0 MiB
        (1024**3, "1.00 GiB"),
        (8057 * 1024**2, "7.87 GiB"),
        (-(2 * 1024**3), "-2.00 GiB"),
    ],
)
def test_format_bytes_prints_binary_units(amount: float, expected: str) -> None:
    assert format_bytes(amount) == expected


# --- reading ---------------------------------------------------------------------------------


def test_read_gives_the_dataclass(tmp_path: Path) -> None:
    expected = Cart("hand cart", (Wheel(1000.0), Wheel(2.0, 6)), None, {"sand": 0.5}, True)
    assert read(tmp_path, GOOD) == expected


def test_read_takes_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()) == read(tmp_path, GOOD)


def test_without_libyaml_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read(tmp_path, GOOD)
    monkeypatch.setattr(yaml_files, "Loader", yaml.SafeLoader)
    assert read(tmp_path, GOOD) == expected
    assert "line 6: anchors" in refused(tmp_path, GOOD.replace("spare: null", "spare: *x"))
    assert "line 2" in refused(tmp_path, GOOD.replace("hand cart", "b\x07ll"))


@pytest.mark.parametrize("text", ["yes", "off", "12:30", "2020-01-31", "0x10", "1_000", "nan", "=", "<<"])
def test_words_that_yaml_1_1_converts_stay_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, GOOD.replace("hand cart", text)).name == text


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("name: hand cart\n", "", ["line 1: `name` is missing"]),
        ("is_red: true", "is_rde: true", ["line 9: `is_rde` is not known here", "did you mean `is_red`?"]),
        ("spokes: 6", "spoke: 6", ["line 5: `wheels.1.spoke` is not known", "one of radius, spokes"]),
        ("spare: null", "spare: {radius: 1, x: 1}", ["line 6: `spare.x` is not known", "one of radius, spokes"]),
        ("spokes: 6", "spokes: six", ["line 5: `wheels.1.spokes` is wrong", "got: 'six'", "a whole number"]),
        ("spokes: 6", 'spokes: "6"', ["line 5: `wheels.1.spokes` is wrong", "got: '6'", "a whole number"]),
        ("spokes: 6", "spokes: 6.5", ["line 5: `wheels.1.spokes` is wrong", "got: 6.5"]),
        ("spokes: 6", "spokes: true", ["line 5: `wheels.1.spokes` is wrong", "got: True"]),
        ("sand: .5", 'sand: "0.5"', ["line 8: `loads.sand` is wrong", "got: '0.5'", "expected: a number"]),
        ("sand: .5", "sand: nan", ["line 8: `loads.sand` is wrong", "got: 'nan'"]),
        ("sand: .5", "sand: .nan", ["line 8: numbers must be finite, got .nan"]),
        ("sand: .5", "sand: -.inf", ["line 8: numbers must be finite, got -.inf"]),
        ("sand: .5", "sand: 1e999", ["line 8: numbers must be finite, got 1e999"]),
        ("spokes: 6", "spokes: 9223372036854775808", ["line 5: whole numbers must be below 2^63"]),
        ("is_red: true", "is_red: yes", ["line 9: `is_red` is wrong", "expected: true or false"]),
        ("hand cart", "12", ["line 2: `name` is wrong", "got: 12", "text (in quotes"]),
        ("spare: null", "spare: 5", ["line 6: `spare` is wrong", "got: 5", "expected: a mapping"]),
        ("spare: null", "name: other", ["line 6: the key 'name' is given twice"]),
        ("sand: .5", "sand: 1\n  sand: 2", ["line 9: the key 'sand' is given twice"]),
        ("spare: null", "spare: &x {radius: 1}", ["line 6: anchors (&) and aliases (*)"]),
        ("spare: null", "spare: *x", ["line 6: anchors (&) and aliases (*)"]),
        ("spare: null", "spare: !!python/name:os.system ''", ["line 6: tags are not allowed"]),
        ("spare: null", "? [a]\n: 1", ["line 6: a key must be text"]),
        ("spare: null", "spare: " + "[" * 100 + "]" * 100, ["line 6: nested deeper than 64"]),
        ("spare: null", "spare: [1", ["line 7, column 6"]),
        ("spare: null", "\tspare: null", ["line 6, column 1"]),
        ("is_red: true\n", "is_red: true\n---\na: 1\n", ["line 10: a second document starts here"]),
        ("hand cart", "b\x07ll", ["line 2", "control characters are not allowed"]),
    ],
)
def test_faults_name_line_and_field(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    assert old in GOOD
    message = refused(tmp_path, GOOD.replace(old, new))
    assert "cart.yaml" in message
    for part in parts:
        assert part in message


def test_all_faults_are_named_in_the_order_of_the_file(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.replace("hand cart", "12").replace("spokes: 6", "spokes: six, color: 1"))
    assert message.index("line 2: `name`") < message.index("also: line 5: `wheels.1.spokes`")
    assert "line 5: `wheels.1.color`" in message


def test_a_check_of_values_gets_the_line_too(tmp_path: Path) -> None:
    path = tmp_path / "cart.yaml"
    path.write_text(GOOD)
    problem = Problem(("loads", "sand"), "is too heavy", "0.5", "less")
    with pytest.raises(OsdpError) as caught:
        read_yaml(path, Cart, schema=Cart.SCHEMA, check=lambda cart: [problem] if cart.loads["sand"] > 0.1 else [])
    assert str(caught.value) == f"{path}, line 8: `loads.sand` is too heavy\n  got: 0.5\n  expected: less"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["must hold a mapping", "got: nothing"]),
        ("- 1\n", ["must hold a mapping", "got: a list"]),
        ("just words\n", ["must hold a mapping", "got: 'just words'"]),
        ("name: x\nversion: 3\n", ["is not an OSDP file", "expected: schema: test.cart/2"]),
        ("name: x\nschema: test.cart/3\n", ["line 2: written by another version", "test.cart/3", "test.cart/2"]),
        ("schema: test.boat/2\n", ["line 1: this is another kind of file", "got: test.boat/2"]),
        ("schema: 2\n", ["line 1: this is another kind of file", "got: 2"]),
    ],
)
def test_foreign_files_are_told_apart(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refused(tmp_path, text)
    for part in parts:
        assert part in message


def test_an_exponential_document_is_refused_unread(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 40)]
    assert "line 1: anchors" in refused(tmp_path, "\n".join(lines))


def test_bytes_that_are_not_utf_8_name_their_line(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.encode().replace(b"hand", b"h\xe4nd"))
    assert "line 2: this is not UTF-8" in message
    assert "0xe4" in message


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_files, "LARGEST_YAML_BYTES", len(GOOD))
    read(tmp_path, GOOD)
    monkeypatch.setattr(yaml_files, "LARGEST_YAML_BYTES", len(GOOD) - 1)
    assert "is too large" in refused(tmp_path, GOOD)


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cart.yaml").write_text(GOOD)
    for path, part in [
        (tmp_path / "cat.yaml", f"did you mean {tmp_path / 'cart.yaml'}?"),
        (tmp_path / "no" / "cart.yaml", "there is no directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "cart.yaml" / "x", "cannot be read"),
        (Path("a\0b"), "cannot be read"),
        (Path("x" * 5000), "cannot be read"),
    ]:
        with pytest.raises(OsdpError) as caught:
            read_yaml(path, Cart, schema=Cart.SCHEMA)
        assert part in str(caught.value)

    def forbidden(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", forbidden)  # a mode would not stop root
    with pytest.raises(OsdpError, match="may not be read"):
        read_yaml(tmp_path / "cart.yaml", Cart, schema=Cart.SCHEMA)


@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(b"schema: test.cart/2\n" + data)
    with pytest.raises(OsdpError):  # no 60 bytes make the three required fields
        read_yaml(path, Cart, schema=Cart.SCHEMA)


# --- writing ---------------------------------------------------------------------------------

TRICKY = ["yes", "1e9", "1.", "~", "null", "True", "0x1", "12:30", "- a", "a: b", "# x", "<<", "=", " x "]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from([*TRICKY, "a\nb\n"])
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
WHEEL = st.builds(Wheel, FLOAT, st.integers(-(2**63) + 1, 2**63 - 1))
WHEELS = st.lists(WHEEL, max_size=3).map(tuple)
CART = st.builds(Cart, TEXT, WHEELS, st.none() | WHEEL, st.dictionaries(TEXT, FLOAT), st.booleans())


@given(CART)
def test_what_is_written_is_read_equal(tmp_path_factory: pytest.TempPathFactory, cart: Cart) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    write_yaml(path, cart, "two\n\nlines: - &x")
    assert read_yaml(path, Cart, schema=Cart.SCHEMA) == cart


def test_keys_are_in_the_order_of_the_fields_and_the_header_on_top() -> None:
    cart = Cart("c", (Wheel(0.1),), None, {"z": 1e20, "a": 1.0})
    lines = to_yaml(cart, "made by hand\n\nkeep").splitlines()
    assert lines[:4] == ["# made by hand", "#", "# keep", "schema: test.cart/2"]
    keys = [line.split(":")[0] for line in lines[3:] if line[0] not in " -"]
    assert keys == ["schema", "name", "wheels", "spare", "loads", "is_red"]
    assert lines.index("  z: 1.0e+20") < lines.index("  a: 1.0")


def test_equal_objects_are_written_without_anchors(tmp_path: Path) -> None:
    wheel = Wheel(1.5)
    write_yaml(tmp_path / "c.yaml", Cart("c", (wheel, wheel), wheel, {}))
    assert "&" not in (tmp_path / "c.yaml").read_text()


def test_a_model_graph_goes_round(tmp_path: Path) -> None:
    work = Work(Affine(1.0, 2.5), Affine(3.0), Affine())
    memory = {field.name: Affine(number / 10) for number, field in enumerate(fields(CallMemory))}
    again = CallMemory(**memory)
    call = Call(
        **memory, operator=0, block=0, forward=work, backward=work, output_bytes=Affine(1e-9, 1e15), recomputed=again
    )
    graph = ModelGraph(
        "gpt2-tiny",
        "fp32",
        64,
        (Operator("a.b", "Linear", (Parameter("a.b.weight", (3, 4)),), ("a.b",), None),),
        (call,),
        (Block("a", "Block", 0, 1, Affine(), 0),),
        ((0, 0),),
        "abc",
    )
    write_yaml(tmp_path / "g.yaml", graph)
    assert read_yaml(tmp_path / "g.yaml", ModelGraph, schema=ModelGraph.SCHEMA) == graph


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path, bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        write_yaml(tmp_path / "c.yaml", Cart("c", (Wheel(bad),), None, {}))
    assert os.listdir(tmp_path) == []


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writing_replaces_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "x"
    before = os.umask(0o027)
    try:
        write_text_atomic(path, "old")
        assert mode(path) == 0o640
        path.chmod(0o604)
        write_text_atomic(path, "nëw")
    finally:
        os.umask(before)
    assert path.read_text("utf-8") == "nëw"
    assert mode(path) == 0o604
    assert os.listdir(tmp_path) == ["x"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OsdpError, match="No space left on device"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_writing_follows_links_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    write_text_atomic(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()
    for path, part in [
        (tmp_path / "no" / "x", "mkdir -p"),
        (tmp_path, "it is a directory"),
        (tmp_path / "real" / "x", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "a\0b", "cannot be written"),
    ]:
        with pytest.raises(OsdpError) as caught:
            write_text_atomic(path, "x")
        assert part in str(caught.value)
