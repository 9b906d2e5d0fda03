"""Parameters whose memory no sharding can follow: those that share it, and those that are not row-major.

A sharded parameter has memory of its own, which is flat and in the order of its rows.  So a view of another parameter,
registered as a parameter or buffer beside it, would train apart from it.  What is not contiguous, as the
weights of convolutions in `torch.channels_last` are not, is made so.  (One parameter at several places is tied, and
stays so; ranges of one flat tensor that have no element in common are parameters as any other.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from profiler.opaque_parameters import is_opaque

MOST_STEPS = 100_000
"""Of the search for an element that two tensors have in common."""
_WITHOUT_SHAPE = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def shared_memory(root: nn.Module) -> list[str]:
    """Return a sentence for each parameter that shares elements with another parameter or with a buffer."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if has_strides(tensor) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    found = []
    for tensors in by_storage.values():
        beside: list[tuple[str, Tensor]] = []
        for second, other in sorted(tensors, key=lambda named: _range_bytes(named[1])):
            start, _ = _range_bytes(other)
            beside = [named for named in beside if _range_bytes(named[1])[1] > start]
            for first, one in beside:
                has_parameter = isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter)
                if has_parameter and _share_elements(one, other):
                    found.append("`{}` and `{}` share memory".format(*sorted([first, second])))
            beside.append((second, other))
    return found


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
    """Return whether two tensors, whose ranges overlap, have an element in common; True where that takes long to say.

    With element offsets o and o', sizes n and strides s, they do if

        o + sum i_k s_k = o' + sum j_k s'_k    for some 0 <= i_k < n_k, 0 <= j_k < n'_k

    or, with (n'_k - 1) - j_k in place of j_k, if a sum of bounded multiples of all strides is a given number.
    """
    if one.element_size() != other.element_size() or (_is_dense(one) and _is_dense(other)):
        return True
    most: dict[int, int] = {}
    """By stride, how often it may be in the sum."""
    wanted = int(other.storage_offset()) - int(one.storage_offset())
    for tensor in (one, other):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            most[stride] = most.get(stride, 0) + size - 1
            wanted += (size - 1) * stride if tensor is other else 0
    steps = 0

    def reaches(strides: Sequence[int], rest: int) -> bool:
        nonlocal steps
        steps += 1
        if steps > MOST_STEPS:
            return True
        if not strides:
            return rest == 0
        stride, *others = strides
        reach = sum(most[each] * each for each in others)
        first, last = max(0, -((reach - rest) // stride)), min(most[stride], rest // stride)
        return any(reaches(others, rest - times * stride) for times in range(first, last + 1))

    return reaches(sorted((stride for stride in most if stride), reverse=True), wanted)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has every element of its range."""
    start, end = _range_bytes(tensor)
    return end - start == tensor.numel() * tensor.element_size()
