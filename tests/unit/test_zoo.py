"""Models by name, by file, by the user's own factory, and by Hugging Face configuration."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from osdp import resources
from osdp.models.gpt2 import GPT2
from osdp.zoo import load_model, model_card, model_names
from profiler.errors import OsdpError
from profiler.model_source import Inputs
from profiler.trace.trace import trace_model


def refused(spec: str, **keywords: Any) -> str:
    with pytest.raises(OsdpError) as caught:
        load_model(spec, **keywords)
    return str(caught.value)


def inputs(spec: str, batch: int = 3, **keywords: Any) -> tuple[torch.nn.Module, Inputs]:
    source = load_model(spec, **keywords)
    module = source.build()
    return module, source.example_inputs(module, batch)


# --- the zoo ---------------------------------------------------------------------------------


def test_names_and_cards() -> None:
    names = model_names()
    assert names == sorted(names)
    assert {"gpt2", "gpt2-1.5b", "bert-large", "llama-7b", "uneven", "gpt2-tiny"} <= set(names)
    for name in names:
        card = model_card(name)
        assert card.name == name
        assert card.parameters is not None
        assert card.source.split(":")[0] in ("paper", "assumed")
        assert "\n" not in card.description


def test_listing_models_and_clusters_needs_no_torch() -> None:
    code = (
        "import sys\nfrom osdp.zoo import *\n"
        "assert [model_card(n) for n in model_names()] and [load_cluster(n) for n in cluster_names()]\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(resources.__file__).parent.parent)


def test_a_model_of_the_zoo_is_built_and_fed() -> None:
    source = load_model("gpt2-tiny")
    assert (source.name, source.sequence_length) == ("gpt2-tiny", 64)
    module = source.build()
    assert isinstance(module, GPT2)
    (tokens,), kwargs = source.example_inputs(module, 3)
    assert tokens.shape == kwargs["labels"].shape == (3, 64)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 512


def test_the_sequence_length_is_the_users_within_the_positions() -> None:
    source = load_model("gpt2-tiny", sequence_length=128)
    assert source.sequence_length == 128
    assert source.example_inputs(source.build(), 1)[0][0].shape == (1, 128)
    message = refused("gpt2-tiny", sequence_length=129)
    assert "129 tokens" in message
    assert "at most 128" in message
    assert "at least 1" in refused("gpt2-tiny", sequence_length=0)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("gpt2-1.5B", "did you mean gpt2-1.5b"),
        ("lama-7b", "did you mean llama-7b"),
        ("bert_large", "did you mean bert-large"),
        ("xyzzy", "package.module:factory"),
        ("", "there is no such model"),
        ("train.py", "train.py:make_model"),
    ],
)
def test_unknown_names_get_a_hint(spec: str, part: str) -> None:
    message = refused(spec)
    assert part in message
    assert "bert-large, bert-tiny, gpt2, gpt2-1.5b" in message


CARD = """\
schema: osdp.model/1
name: mine
family: gpt2
description: a test
source: "assumed: a test"
sequence_length: 8
config:
  vocabulary_size: 50
  maximum_positions: 16
  hidden_size: 12
  layers: 2
  heads: 3
"""


def test_a_model_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CARD)
    source = load_model(str(path))
    assert source.sequence_length == 8
    module = source.build()
    # 50 * 12 + 16 * 12 + 2 * (12 * 144 + 13 * 12) + 24, by the formula for GPT-2
    assert sum(p.numel() for p in module.parameters()) == 600 + 192 + 2 * (1728 + 156) + 24


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("family: gpt2", "family: gpt", ["line 3: `family` is not known", "did you mean gpt2?"]),
        ("heads: 3", "heads: 5", ["line 7: `config` is wrong", "12 is not a positive multiple of 5"]),
        (
            "heads: 3",
            "haeds: 3",
            ["line 12: `config.haeds` is not known", "did you mean `heads`?", "line 7: `config.heads` is missing"],
        ),
        ("layers: 2", "layers: two", ["line 11: `config.layers` is wrong", "a whole number"]),
        ("length: 8", "length: 17", ["line 6: `sequence_length` is wrong", "from 1 to maximum_positions, 16"]),
        ("length: 8", "length: 0", ["line 6: `sequence_length` is wrong"]),
        ("model/1", "model/9", ["line 1: written by another version of OSDP"]),
    ],
)
def test_faults_of_a_model_file(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CARD.replace(old, new))
    message = refused(str(path))
    for part in parts:
        assert part in message
    assert "does not exist" in refused(str(tmp_path / "other.yaml"))


def test_resources_of_a_checkout_and_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "osdp"
    (tmp_path / "site-packages" / "cuda" / "pathfinder").mkdir(parents=True)  # NVIDIA's
    package.mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    with pytest.raises(OsdpError, match="`cuda` is missing"):
        resources.resource_dir("cuda")
    (package / "cuda").mkdir()
    (package / "cuda" / "pack.cu").touch()
    assert resources.resource_dir("cuda") == package / "cuda"
    (package.parent / "configs" / "models").mkdir(parents=True)
    (package.parent / "configs" / "models" / "a.yaml").touch()
    assert resources.resource_dir("configs") == package.parent / "configs"
    assert resources.resource_names("models") == ["a"]
    assert resources.resource_names("clusters") == []


# --- the user's own --------------------------------------------------------------------------

PRELUDE = """\
import torch
from torch import nn

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)
    def forward(self, x, labels=None):
        return self.head(self.table(x))
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module into the current directory and return its name."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)

    def write_module(text: str) -> str:
        (tmp_path / "user_code.py").write_text(PRELUDE + textwrap.dedent(text))
        return "user_code"

    yield write_module
    sys.modules.pop("user_code", None)
    assert sys.path == before


def test_a_factory_and_its_function(write: Callable[[str], str]) -> None:
    name = write("""
        def make():
            module = Text()
            return module, lambda batch: torch.zeros(batch, 5, dtype=torch.long)
    """)
    source = load_model(f"{name}:make")
    assert source.sequence_length == 5
    module, ((tokens,), kwargs) = inputs(f"{name}:make")
    assert tokens.shape == (3, 5)
    assert kwargs == {}
    assert module(tokens).shape == (3, 5, 11)


@pytest.mark.parametrize(
    ("returned", "args", "kwargs"),
    [
        ("torch.zeros(b, 2)", 1, []),
        ("(torch.zeros(b, 2), torch.ones(b))", 2, []),
        ("[torch.zeros(b, 2)]", 1, []),
        ("{'x': torch.zeros(b, 2)}", 0, ["x"]),
        ("((torch.zeros(b, 2),), {'y': torch.ones(b)})", 1, ["y"]),
    ],
)
def test_the_forms_of_example_inputs(write: Callable[[str], str], returned: str, args: int, kwargs: list[str]) -> None:
    name = write(f"""
        def make():
            return nn.Linear(2, 2), lambda b: {returned}
    """)
    _, (got_args, got_kwargs) = inputs(f"{name}:make")
    assert (len(got_args), list(got_kwargs)) == (args, kwargs)
    assert load_model(f"{name}:make").sequence_length == 1


def test_a_method_of_the_module_gets_the_length(write: Callable[[str], str]) -> None:
    name = write("""
        class Own(Text):
            def example_inputs(self, batch, sequence_length=None):
                return torch.zeros(batch, sequence_length or 7, dtype=torch.long)
        class nested:
            make = Own
    """)
    assert load_model(f"{name}:nested.make").sequence_length == 7
    _, ((tokens,), _) = inputs(f"{name}:Own", sequence_length=9)
    assert tokens.shape == (3, 9)


def test_tokens_are_guessed_from_an_embedding(write: Callable[[str], str]) -> None:
    name = write("")
    with pytest.warns(UserWarning, match="128 tokens per sample"):
        source = load_model(f"{name}:Text")
    assert source.sequence_length == 128
    module, ((tokens,), kwargs) = inputs(f"{name}:Text", sequence_length=6)
    assert tokens.shape == kwargs["labels"].shape == (3, 6)
    assert int(tokens.max()) < 11
    assert module(tokens, **kwargs).shape == (3, 6, 11)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [("nn.Linear(5, 2), nn.Embedding(3, 3)", (3, 5)), ("nn.ReLU(), nn.Conv2d(4, 2, 3)", (3, 4, 224, 224))],
)
def test_numbers_are_guessed_from_other_layers(
    write: Callable[[str], str], layers: str, shape: tuple[int, ...]
) -> None:
    name = write(f"""
        def make():
            return nn.Sequential({layers}).bfloat16()
    """)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, ((x,), kwargs) = inputs(f"{name}:make")
    assert (x.shape, x.dtype, kwargs) == (shape, torch.bfloat16, {})
    with pytest.warns(UserWarning, match="has no effect"):
        assert load_model(f"{name}:make", sequence_length=32).sequence_length == 1


def test_a_factory_that_wants_a_real_device_or_real_values(write: Callable[[str], str]) -> None:
    name = write("""
        def on_cpu():
            module = nn.Linear(2, 2)
            if module.weight.device.type != "cpu":
                raise RuntimeError("not on the CPU")
            return module
        def by_value():
            return nn.Linear(2, int(torch.randn(3)[2].long()))
        def with_values():
            module = nn.Linear(2, 2)
            module.weight = nn.Parameter(torch.max(module.weight, torch.Tensor([0.1])))  # which is no meta tensor
            return module
    """)
    for factory in ("on_cpu", "with_values"):
        source = load_model(f"{name}:{factory}")
        assert source.sequence_length == 1
        assert [one.numel for one in trace_model(source).operators] == [6]
    message = refused(f"{name}:by_value")
    assert "OSDP builds models without data" in message
    assert "user_code.py:18" in message


def test_building_without_data_takes_no_memory(write: Callable[[str], str]) -> None:
    name = write("""
        def make():
            return nn.Linear(1 << 20, 1 << 20)  # 4 TiB
    """)
    source = load_model(f"{name}:make")
    for without_data in (FakeTensorMode(), torch.device("meta")):
        with without_data:
            module = source.build()
            assert source.example_inputs(module, 2)[0][0].shape == (2, 1 << 20)


@pytest.mark.parametrize(
    ("spec", "text", "parts"),
    [
        ("no_such_module_x:make", "", ["there is no module no_such_module_x", "run from the directory"]),
        ("user_code:", "", ["does not name a factory"]),
        (":make", "", ["does not name a factory"]),
        ("dir/user_code:make", "", ["package.module:function or path/to/file.py:function"]),
        ("no_such_file_x.py:make", "", ["there is no file no_such_file_x.py"]),
        ("/etc/../setup.py:make", "", ["there is no file"]),
        ("user_code.py:maek", "def make(): ...", ["user_code.py has no `maek`", "one of Text, make"]),
        ("user_code:maek", "def make(): ...", ["user_code.py has no `maek`", "one of Text, make"]),
        ("user_code:make", "make = 3", ["is not a factory", "got: a int"]),
        ("user_code:make", "make = nn.Linear(2, 2)", ["is not a factory", "got: a Linear", "wrap it"]),
        ("user_code:make", "def make(width): ...", ["needs arguments", "missing a required argument: 'width'"]),
        ("user_code:make", "def make(): return 3", ["does not make a model", "got: a int"]),
        ("user_code:make", "def make(): return None", ["does not make a model", "got: nothing"]),
        ("user_code:make", "def make(): return Text(), 3", ["a tuple of a Text, a int"]),
        ("user_code:make", "def make():\n    raise KeyError('x')", ["KeyError: 'x'", "user_code.py:13"]),
        ("user_code:make", "def make(): return nn.Linear('a', 2)", ["raised an exception", "user_code.py:12"]),
        ("user_code:make", "import sys; sys.exit(4)", ["importing user_code", "SystemExit: 4", "user_code.py:12"]),
        ("user_code:make", "import no_such_y", ["importing user_code", "No module named 'no_such_y'"]),
        ("user_code:make", "def make(:", ["SyntaxError", "user_code.py:12"]),
        ("user_code:make", "def make(): return nn.LayerNorm(3)", ["cannot be guessed", "a LayerNorm"]),
        ("user_code:make", "def make(): return nn.ReLU()", ["cannot be guessed", "nothing"]),
        ("user_code:make", "def make(): return Text(), lambda: 1", ["cannot be called", "example_inputs(batch)"]),
        ("user_code:make", "def make(): return Text(), lambda b: 1", ["returned no arguments", "got: a int"]),
        ("user_code:make", "def make(): return Text(), lambda b: ()", ["returned no arguments"]),
        ("user_code:make", "def make(): return Text(), lambda b: b / 0", ["ZeroDivisionError", "user_code.py:12"]),
    ],
)
def test_what_goes_wrong_is_told(write: Callable[[str], str], spec: str, text: str, parts: list[str]) -> None:
    write("\n" + text)
    message = refused(spec)
    for part in parts:
        assert part in message


def test_a_file_is_named_as_a_shell_completes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "of_files" / "my_model.py"
    file.parent.mkdir()
    file.write_text("from torch import nn\n\ndef make():\n    return nn.Linear(3, 5)\n")
    monkeypatch.chdir(tmp_path)
    for spec in ("of_files/my_model.py:make", "./of_files/my_model.py:make", f"{file}:make"):
        assert [one.numel for one in trace_model(load_model(spec)).operators] == [20], spec
    monkeypatch.chdir(file.parent)
    assert load_model("my_model.py:make").name == "my_model.py:make"
    (tmp_path / "textwrap.py").write_text("def make(): ...")
    monkeypatch.chdir(tmp_path)
    assert "another module has the name textwrap" in refused("textwrap.py:make")
    for name, words in (
        ("v1.2/net.py", "names of folders and of the file without dots"),
        ("json/net.py", "another package has the name json"),
        ("of_a_package/__init__.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(file.read_text())
        if words:
            assert words in refused(f"{name}:make")
        else:
            assert load_model(f"{name}:make").name == f"{name}:make"
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert f"run from {file.parent}, with my_model.py:..." in refused("../of_files/my_model.py:make")


def test_a_forward_with_more_arguments_is_not_guessed(write: Callable[[str], str]) -> None:
    name = write("""
        class Two(Text):
            def forward(self, x, mask, labels=None): ...
    """)
    assert "forward needs mask too" in refused(f"{name}:Two")


def test_our_own_packages_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import profiler

    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiler.py").write_text("def make(): ...")
    assert "has no `make`" in refused("profiler:make")
    assert sys.modules["profiler"] is profiler


def test_the_current_directory_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("def make(): ...")  # as a module of Python is called
    assert "rgb_to_hsv" in refused("colorsys:make")
