"""Imported by what workers of a test run and ranks fork from: traces the models that many tests plan."""

from parity import FAMILIES, graph_of
from toys import Blocks, InPlace, Irregular
from toys import graph_of as toy_graph_of

for family in FAMILIES:
    graph_of(family)
for toy in (Blocks(), Blocks(frozen=False), InPlace(), Irregular()):
    toy_graph_of(toy)
