"""Parameters whose memory no sharding can follow: those that share it, and those that are not row-major.

A sharded parameter has memory of its own, which is flat and in the order of its rows.  So a view of another parameter,
registered as a parameter or buffer beside it, would train apart from it: it is refused.  What is not contiguous, as the
weights of convolutions in `torch.channels_last` are not, is made so.  (One parameter at several places is tied, and
stays so; ranges of one flat tensor that have no element in common are parameters as any other.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from profiler.errors import OsdpError
from profiler.opaque_parameters import is_opaque

_WITHOUT_SHAPE = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def check_memory(model: str, root: nn.Module) -> None:
    """Raise OsdpError if a parameter shares elements with another parameter or with a buffer."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if has_strides(tensor) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for tensors in by_storage.values():
        beside: list[tuple[str, Tensor]] = []
        for second, other in sorted(tensors, key=lambda named: _range_bytes(named[1])):
            start, _ = _range_bytes(other)
            beside = [named for named in beside if _range_bytes(named[1])[1] > start]
            for first, one in beside:
                has_parameter = isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter)
                if has_parameter and _share_elements(one, other):
                    raise _refusal(model, {first: one, second: other})
            beside.append((second, other))


def _refusal(model: str, tensors: Mapping[str, Tensor]) -> OsdpError:
    names = " and ".join(f"`{name}`" for name in sorted(tensors))
    shapes = " and ".join(str(tuple(tensors[name].shape)) for name in sorted(tensors))
    return OsdpError(
        f"{names} of {model} share memory, which sharding would part",
        got=f"two tensors with elements in common, of shapes {shapes}",
        expected="memory of its own for each parameter, or one parameter at both places",
        advice="tie them as one parameter (self.decoder.weight = self.encoder.weight), compute with a view "
        "in the forward (F.linear(x, self.encoder.weight.t())), or clone() it",
    )


def has_strides(tensor: Tensor) -> bool:
    """Return whether strides tell which elements of its storage a tensor has."""
    of_others = is_opaque(tensor) or is_traceable_wrapper_subclass(tensor)
    return not of_others and not isinstance(tensor, _WITHOUT_SHAPE) and tensor.layout is torch.strided


def _range_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins and ends."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors with one storage have an element in common."""
    (start, end), (other_start, other_end) = _range_bytes(one), _range_bytes(other)
    return start < other_end and other_start < end and _share_elements(one, other)


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, whose ranges overlap, have an element in common."""
    if one.element_size() != other.element_size() or (one.is_contiguous() and other.is_contiguous()):
        return True
    return bool(np.intersect1d(_elements(one), _elements(other)).size)


def _elements(tensor: Tensor) -> np.typing.NDArray[np.int64]:
    """Return which elements of the storage a tensor has."""
    steps = (np.arange(size) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reduce(np.add.outer, steps, np.zeros((), np.int64)).ravel()
