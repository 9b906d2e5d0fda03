"""Means over ranks of whole gradients, of as many tensors as there are in one collective call for each dtype."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def means_over_ranks(gradients: Sequence[Tensor], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield the place of each gradient and its mean, in memory of its own on `device` and in the gradient's dtype and
    shape, one by one so that none has to wait for the others.  Collective, until it has ended.

    All ranks pass as many, of the same shapes and dtypes.  They are added up in single precision at least, on the
    device, as NCCL takes nothing of the host's.
    """
    alike: dict[torch.dtype, list[int]] = {}
    for place, gradient in enumerate(gradients):
        alike.setdefault(torch.promote_types(gradient.dtype, torch.float32), []).append(place)
    for dtype, places in alike.items():
        members = [gradients[place].detach() for place in places]
        total = torch.cat([one.to(device, dtype).reshape(-1) for one in members])
        dist.all_reduce(torch.view_as_real(total) if dtype.is_complex else total)
        parts = torch.split(total, [one.numel() for one in members])
        for place, one, part in zip(places, members, parts, strict=True):
            yield place, (part / dist.get_world_size()).to(one.dtype).view(one.shape)
