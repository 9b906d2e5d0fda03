"""Operators and blocks of module trees, by hand."""

from __future__ import annotations

import pytest
import torch
from own_backwards import Applied, Whole, layers
from torch import Tensor, nn
from toys import graph_of
from trace_models import Block, ConvNet, EncoderDecoder, LanguageModel

from profiler.trace.find_operators import Group, find_blocks, find_groups, merge_read_outside, of_other_dtypes


class Layer(nn.Module):
    """Two operators."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)


class Other(Layer):
    """The same, of another type."""


class Tree(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Experts(Tree):
    """A layer with a list of large units inside."""

    def __init__(self) -> None:
        super().__init__(router=nn.Linear(4, 2), experts=nn.ModuleList(Layer() for _ in range(2)))


def test_groups_of_a_language_model() -> None:
    groups = find_groups(LanguageModel(layers=1))
    assert groups[0] == Group(("words", "head"), ("words.weight",))
    assert [group.modules for group in groups[1:]] == [
        ("positions",),
        ("blocks.0.norm1",),
        ("blocks.0.attention.qkv",),
        ("blocks.0.attention.out",),
        ("blocks.0.norm2",),
        ("blocks.0.up",),
        ("blocks.0.down",),
        ("norm",),
    ]
    assert groups[3].parameters == ("blocks.0.attention.qkv.weight", "blocks.0.attention.qkv.bias")


def test_ties_join_groups_across_a_third() -> None:
    """The third module shares one parameter with the first and another with the second."""
    a, b, c = (nn.Linear(4, 4) for _ in range(3))
    c.weight, c.bias = a.weight, b.bias
    assert find_groups(Tree(a=a, b=b, free=nn.Linear(4, 4), c=c)) == (
        Group(("a", "b", "c"), ("a.weight", "a.bias", "b.weight", "b.bias")),
        Group(("free",), ("free.weight", "free.bias")),
    )


def test_modules_without_parameters_are_no_groups() -> None:
    tree = Tree(a=nn.ReLU(), b=nn.Linear(4, 4, bias=False), c=nn.BatchNorm1d(4, affine=False))
    assert find_groups(tree) == (Group(("b",), ("b.weight",)),)


def test_parameters_without_dimensions_belong_to_no_group() -> None:
    tree = Tree(layer=nn.Linear(4, 2))
    tree.scale = nn.Parameter(torch.tensor(1.0))
    tree.layer.temperature = nn.Parameter(torch.tensor(1.0))
    assert find_groups(tree) == (Group(("layer",), ("layer.weight", "layer.bias")),)


def test_modules_read_from_outside_join_the_nearest_ancestor_that_ran() -> None:
    tree = Tree(inner=Tree(attention=nn.MultiheadAttention(4, 2), plain=Tree(linear=nn.Linear(4, 4))))
    groups = find_groups(tree)
    names = [group.modules[0] for group in groups]
    assert names == ["inner.attention", "inner.attention.out_proj", "inner.plain.linear"]
    ran = dict.fromkeys(["", "inner", "inner.attention"])
    merged = merge_read_outside(groups, {1: ["inner.attention"], 2: ["inner"]}, ran)
    # The projection joins its owner; the linear layer's owner did not run, so it goes one up.
    assert [group.modules for group in merged] == [("inner.attention",), ("inner",)]
    assert [name.removeprefix("inner.attention.") for name in merged[0].parameters] == [
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    ]
    assert merged[1].parameters == ("inner.plain.linear.weight", "inner.plain.linear.bias")
    # What is neither run nor read stays: it is unused, not part of an ancestor.
    assert merge_read_outside(groups, {1: ["inner.attention"]}, ran)[1].modules == ("inner.plain.linear",)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


class HandsItsOwn(nn.Linear):
    """Hands its own weight to a function."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) -> the same."""
        return _Doubled.apply(super().forward(x), self.weight)  # type: ignore[no-any-return, no-untyped-call]


def test_layers_whose_parameters_a_function_is_handed_join_the_module_that_applies_it() -> None:
    """Its backward asks autograd for their gradients, and runs the layers in an order of its own."""
    parts = Applied("adjoint", layers(6)), Applied("equilibrium", nn.Sequential(layers(6), layers(6))), layers(6)
    found = {one.name: len(one.parameters) for one in graph_of(Whole(*parts)).operators}
    assert found == {"first": 2, "parts.0": 4, "parts.1": 8, "parts.2.0": 2, "parts.2.2": 2, "last": 2}
    own = graph_of(Whole(nn.Sequential(HandsItsOwn(6, 6), HandsItsOwn(6, 6)))).operators
    assert [one.name for one in own] == ["first", "parts.0.0", "parts.0.1", "last"]


class AsksForItsDevice(Whole):
    """Is traced on fake tensors, as it has to know a device."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) -> a loss."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


def test_so_they_do_in_a_model_that_is_traced_on_fake_tensors() -> None:
    found = [one.name for one in graph_of(AsksForItsDevice(Applied("reverse", layers(3)), layers(6))).operators]
    assert found == ["first", "parts.0", "parts.1.0", "parts.1.2", "last"]


def test_modules_that_run_and_are_read_elsewhere_join_what_is_around_both() -> None:
    tree = Tree(body=Tree(embed=nn.Embedding(4, 2), layer=Tree(up=nn.Linear(2, 2))), head=nn.Linear(2, 4))
    groups, ran = find_groups(tree), dict.fromkeys(["", "body", "body.embed", "body.layer", "body.layer.up", "head"])

    def joined(*readers: str) -> list[tuple[str, ...]]:
        return [group.modules for group in merge_read_outside(groups, {0: readers}, ran)]

    apart = [("body.layer.up",), ("head",)]
    assert joined("body.layer") == joined("body.layer", "body.layer.up") == joined("body") == [*apart, ("body",)]
    assert joined("head") == joined("body", "") == [*apart, ("",)]
    tree.head.weight = tree.body.embed.weight  # tied modules are wrapped together, so what is around both is
    (group, *_), readers = find_groups(tree), {0: ["body"]}
    assert group.modules == ("body.embed", "head")
    assert merge_read_outside((group,), readers, ran) == (Group(("",), ("body.embed.weight", "head.bias")),)


def test_operators_that_merge_keep_the_dtype_of_most_of_what_they_train() -> None:
    tree = Tree(held=nn.Linear(4, 4, bias=False, dtype=torch.complex64))
    tree.bias, tree.frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(9, 9), requires_grad=False)
    dtypes = {name: one.dtype for name, one in tree.named_parameters()}
    merged = merge_read_outside(find_groups(tree), {1: [""]}, dict.fromkeys([""]))
    assert [group.modules for group in merged] == [("",)]
    assert of_other_dtypes(tree, merged, dtypes) == {"bias"}
    groups = find_groups(tree, dtypes, {"bias"})
    assert groups == (Group(("",), ("frozen",)), Group(("held",), ("held.weight",)))
    assert of_other_dtypes(tree, merge_read_outside(groups, {1: [""]}, dict.fromkeys([""])), dtypes) == set()


def list_of(*items: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(items)


@pytest.mark.parametrize(
    ("tree", "blocks"),
    [
        (LanguageModel(layers=2), ["blocks.0", "blocks.1"]),
        # Alike in nothing but place: a list is enough.
        (Tree(layers=list_of(Layer(), Layer(5), Other())), ["layers.0", "layers.1", "layers.2"]),
        (EncoderDecoder(), [f"net.{side}.layers.{i}" for side in ("encoder", "decoder") for i in (0, 1)]),
        # Sequentials of Sequentials: the units inside the stages.
        (ConvNet(), ["stage1.0", "stage1.1", "stage2.0", "stage2.1"]),
        # Written out by hand: siblings that look alike, whatever the third is.
        (Tree(layer1=Layer(), layer2=Layer(), layer3=Layer(5)), ["layer1", "layer2"]),
        (Tree(first=Layer(), second=Other()), []),
        # A chain of single operators has no blocks.
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
        # nanoGPT's form: a dict that holds single operators and a list.
        (
            Tree(body=nn.ModuleDict({"words": nn.Embedding(4, 4), "h": list_of(Layer(), Layer())})),
            ["body.h.0", "body.h.1"],
        ),
        # The only one of its kind in a Sequential, with a list inside: the list's items.
        (
            nn.Sequential(nn.Embedding(4, 4), Tree(layers=list_of(Layer(), Layer())), nn.Linear(4, 4)),
            ["1.layers.0", "1.layers.1"],
        ),
        # Several layers with a list inside each: the layers, which are outermost.
        (Tree(layers=list_of(Experts(), Experts())), ["layers.0", "layers.1"]),
        # Lists in lists cannot run by themselves.
        (
            Tree(layers=list_of(list_of(Layer(), Other()), list_of(Layer(), Other()))),
            ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
        ),
        (Tree(layers=list_of(list_of(nn.Linear(4, 4), nn.Linear(4, 4)))), []),
        # A Sequential of single operators is a unit.
        (
            Tree(layers=list_of(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))),
            ["layers.0", "layers.1"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else type(value).__name__,
)
def test_blocks(tree: nn.Module, blocks: list[str]) -> None:
    assert list(find_blocks(tree)) == blocks


def test_a_module_in_two_places_is_one_block() -> None:
    shared = Block(8, 2, 16)
    assert find_blocks(Tree(layers=list_of(shared, shared, Block(8, 2, 16)))) == ("layers.0", "layers.2")


def test_structure_needs_no_data() -> None:
    with torch.device("meta"):
        model = LanguageModel(layers=2)
    assert find_groups(model) == find_groups(LanguageModel(layers=2))
    assert find_blocks(model) == ("blocks.0", "blocks.1")
