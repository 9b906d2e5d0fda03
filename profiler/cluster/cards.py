"""NVIDIA's cards as their datasheets have them, and what a card of each compute capability computes per clock.

A card of the table is found by its name as `torch.cuda.get_device_properties` prints it, and its memory; of any other
the rates follow from its multiprocessors and clocks (`profiler.cluster.visible_cluster`).

The figures were compared on 2026-11-27 with transcriptions of the documents and with what devices print, as NVIDIA's
own were not at hand: NVIDIA's blog on Ampere and Hopper, quotations of the whitepapers, vendors' pages, throughput.py
of Lightning-AI/pytorch-lightning.  Where printed figures differ: of the T4's memory 300 and 320 GB/s, of the RTX 3090's
products 71 and 71.2 TFLOPS, of the H100 PCIe's memory 2000 and 2039 GB/s, of the B200 first 80 TFLOPS, 8 TB/s, 192 GB.
Of the A30's fp32 rate and the RTX 5090's only the product of multiprocessors and clock was found.
"""

import re
from dataclasses import dataclass

from profiler.byte_sizes import GIB

_LEAST_LEFT, _MOST_LEFT = 0.9, 1.02
"""Part of the nominal memory that a driver leaves: with GDDR6, ECC takes a sixteenth."""
_VENDOR = frozenset({"nvidia", "tesla"})
"""Words of a name that only some drivers print."""
_SLICE = re.compile(r"(?P<card>.+?) MIG (?P<slices>\d+)(c\.\d+)?g\.(?P<gb>\d+)gb.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Card:
    """One card; rates are dense, with accumulation in fp32."""

    name: str
    """As torch prints it; the words of `_VENDOR` do not count."""
    memory_gib: int
    """Nominal."""
    multiprocessors: int
    fp32_flops_per_s: float
    """Without TF32, as in PyTorch's default."""
    bf16_flops_per_s: float | None
    """None: it has no bf16 arithmetic."""
    memory_bytes_per_s: float
    pcie_generation: int
    document: str
    """That has these figures."""
    preset: str = ""
    """Cluster of `configs/clusters` with this device; empty: there is none."""
    kind: str = "datasheet"
    """`assumed` where the document is not NVIDIA's own and public."""
    fp16_flops_per_s: float | None = None
    """None: that of bf16."""


_H20 = "NVIDIA H20, as vendors and the press have it; NVIDIA publishes no datasheet"
_H20_3E = f"{_H20}; no source was found for its memory's rate"
_GH200 = "NVIDIA H100 whitepaper, SXM5, and memory of the GH200 datasheet"
_H800 = "NVIDIA H100 whitepaper, SXM5, which has the same chip"
_V100_SXM3 = "NVIDIA V100 datasheet, SXM2, which has the same chip"
CARDS = (
    Card("Tesla V100-SXM2-16GB", 16, 80, 15.7e12, None, 900e9, 3, "NVIDIA V100 datasheet", fp16_flops_per_s=125e12),
    Card("Tesla V100-SXM2-32GB", 32, 80, 15.7e12, None, 900e9, 3, "NVIDIA V100 datasheet", fp16_flops_per_s=125e12),
    Card("Tesla V100-SXM3-32GB", 32, 80, 15.7e12, None, 900e9, 3, _V100_SXM3, kind="assumed", fp16_flops_per_s=125e12),
    Card("Tesla V100-PCIE-16GB", 16, 80, 14.0e12, None, 900e9, 3, "NVIDIA V100 datasheet", fp16_flops_per_s=112e12),
    Card("Tesla V100-PCIE-32GB", 32, 80, 14.0e12, None, 900e9, 3, "NVIDIA V100 datasheet", fp16_flops_per_s=112e12),
    Card(
        "NVIDIA TITAN RTX",
        24,
        72,
        16.3e12,
        None,
        672e9,
        3,
        "NVIDIA TITAN RTX datasheet",
        "titan-rtx-8",
        fp16_flops_per_s=130.5e12,
    ),
    Card("Tesla T4", 16, 40, 8.1e12, None, 320e9, 3, "NVIDIA T4 datasheet", fp16_flops_per_s=65e12),
    Card("NVIDIA A100-SXM4-40GB", 40, 108, 19.5e12, 312e12, 1555e9, 4, "NVIDIA A100 datasheet, 40GB SXM"),
    Card("NVIDIA A100-SXM4-80GB", 80, 108, 19.5e12, 312e12, 2039e9, 4, "NVIDIA A100 datasheet, 80GB SXM", "a100-80g-8"),
    Card("NVIDIA A100-PCIE-40GB", 40, 108, 19.5e12, 312e12, 1555e9, 4, "NVIDIA A100 datasheet, 40GB PCIe"),
    Card("NVIDIA A100 80GB PCIe", 80, 108, 19.5e12, 312e12, 1935e9, 4, "NVIDIA A100 datasheet, 80GB PCIe"),
    Card("NVIDIA A30", 24, 56, 10.3e12, 165e12, 933e9, 4, "NVIDIA A30 datasheet"),
    Card("NVIDIA A40", 48, 84, 37.4e12, 149.7e12, 696e9, 4, "NVIDIA A40 datasheet"),
    Card("NVIDIA A10", 24, 72, 31.2e12, 125e12, 600e9, 4, "NVIDIA A10 datasheet"),
    Card("NVIDIA A10G", 24, 80, 35.0e12, 70e12, 600e9, 4, "NVIDIA A10G datasheet"),
    Card("NVIDIA RTX A6000", 48, 84, 38.7e12, 154.8e12, 768e9, 4, "NVIDIA RTX A6000 datasheet"),
    Card("NVIDIA RTX A5000", 24, 64, 27.8e12, 111.1e12, 768e9, 4, "NVIDIA RTX A5000 datasheet"),
    Card("NVIDIA GeForce RTX 3090", 24, 82, 35.6e12, 71.2e12, 936e9, 4, "NVIDIA RTX Blackwell whitepaper, table 3"),
    Card("NVIDIA L4", 24, 58, 30.3e12, 121e12, 300e9, 4, "NVIDIA L4 datasheet, half of its rate with sparsity"),
    Card("NVIDIA L40", 48, 142, 90.5e12, 181e12, 864e9, 4, "NVIDIA L40 datasheet"),
    Card("NVIDIA L40S", 48, 142, 91.6e12, 362e12, 864e9, 4, "NVIDIA L40S datasheet"),
    Card("NVIDIA RTX 6000 Ada Generation", 48, 142, 91.1e12, 364.2e12, 960e9, 4, "NVIDIA RTX 6000 Ada datasheet"),
    Card("NVIDIA GeForce RTX 4090", 24, 128, 82.6e12, 165.2e12, 1008e9, 4, "NVIDIA Ada whitepaper", "rtx4090-2"),
    Card("NVIDIA GeForce RTX 5090", 32, 170, 104.8e12, 209.5e12, 1792e9, 5, "NVIDIA RTX Blackwell whitepaper"),
    Card("NVIDIA H100 80GB HBM3", 80, 132, 66.9e12, 989.4e12, 3350e9, 5, "NVIDIA H100 whitepaper, SXM5", "h100-8"),
    Card("NVIDIA H100 80GB HBM2e", 80, 114, 51.2e12, 756e12, 2039e9, 5, "NVIDIA H100 whitepaper, PCIe"),
    Card("NVIDIA H100 PCIe", 80, 114, 51.2e12, 756e12, 2039e9, 5, "NVIDIA H100 whitepaper, PCIe"),
    Card("NVIDIA H100 NVL", 94, 132, 60e12, 835e12, 3900e9, 5, "NVIDIA H100 datasheet, NVL, bf16 sparse / 2"),
    Card("NVIDIA H800", 80, 132, 66.9e12, 989.4e12, 3350e9, 5, _H800, kind="assumed"),
    Card("NVIDIA H20", 96, 78, 44e12, 148e12, 4000e9, 5, _H20, kind="assumed"),
    Card("NVIDIA H20-3e", 141, 78, 44e12, 148e12, 4800e9, 5, _H20_3E, kind="assumed"),
    Card("NVIDIA H200", 141, 132, 66.9e12, 989.4e12, 4800e9, 5, "NVIDIA H200 datasheet, SXM", "h200-1"),
    Card("NVIDIA H200 NVL", 141, 132, 60e12, 835e12, 4800e9, 5, "NVIDIA H200 datasheet, NVL, bf16 sparse / 2"),
    Card("NVIDIA GH200 480GB", 96, 132, 66.9e12, 989.4e12, 4000e9, 5, _GH200),
    Card("NVIDIA B200", 180, 148, 75e12, 2250e12, 7700e9, 5, "NVIDIA Blackwell datasheet, an eighth of HGX B200"),
)


def card_of(name: str, memory_bytes: int | None = None) -> Card | None:
    """Return the card of that name and, if given, memory; None: the table has none."""
    found = next((card for card in CARDS if _words(name) == _words(card.name)), None)
    if found is None or memory_bytes is None:
        return found
    return found if _LEAST_LEFT <= memory_bytes / (found.memory_gib * GIB) <= _MOST_LEFT else None


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s-]+", name.lower())) - _VENDOR


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG slice of a card."""

    card: str
    """Name of the whole card."""
    memory_gb: int


def slice_of(name: str) -> Slice | None:
    """Return which slice a name such as `NVIDIA A100-SXM4-40GB MIG 1g.5gb` means; None: it is a whole card."""
    found = _SLICE.fullmatch(name)
    return None if found is None else Slice(found["card"], int(found["gb"]))


@dataclass(frozen=True, slots=True)
class Generation:
    """What a multiprocessor of one compute capability does, and NVLink and PCI Express of that time."""

    fp32_flops_per_clock: int
    bf16_flops_per_clock: int | None
    """Dense; None: it has no bf16 arithmetic."""
    nvlink_bytes_per_s: float
    """One link, in one direction."""
    pcie_generation: int
    halved_on: str = ""
    """Makes of card that accumulate in fp32 at half the rate."""


_CONSUMER = "geforce|titan"
GENERATIONS = {
    (5, 0): Generation(256, None, 0.0, 3),
    (6, 0): Generation(128, None, 20e9, 3),
    (6, 1): Generation(256, None, 0.0, 3),
    (7, 0): Generation(128, None, 25e9, 3),
    (7, 5): Generation(128, None, 25e9, 3),
    (8, 0): Generation(128, 2048, 25e9, 4),
    (8, 6): Generation(256, 1024, 14e9, 4, _CONSUMER),
    (8, 9): Generation(256, 1024, 0.0, 4, _CONSUMER),
    (9, 0): Generation(256, 4096, 25e9, 5),
    (10, 0): Generation(256, 8192, 50e9, 5),
    (12, 0): Generation(256, 1024, 0.0, 5, _CONSUMER),
}
"""By compute capability.  fp32: CUDA C++ Programming Guide, arithmetic instructions, two operations for each
multiply-add.  bf16: whitepapers of the A100, H100, GA102, Ada and RTX Blackwell; of 10.0, the datasheet's 2250 TFLOPS
over 148 multiprocessors at 1.85 GHz.  NVLink: whitepapers of V100, A100 (600 GB/s of 12 links, both ways), H100 (900
GB/s of 18), GA102 and Blackwell (1800 GB/s of 18)."""


def generation_of(capability: tuple[int, int]) -> tuple[Generation, str]:
    """Return what is known of a compute capability, or of the nearest older one, and which that is."""
    known = max((one for one in GENERATIONS if one <= capability), default=min(GENERATIONS))
    return GENERATIONS[known], f"{known[0]}.{known[1]}"
