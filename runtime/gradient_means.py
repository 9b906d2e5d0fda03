"""Means over ranks of whole gradients, of as many tensors as there are in one collective call for each dtype."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def means_over_ranks(gradients: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the means, each in memory of its own and in its gradient's dtype and shape, on `device`. Collective.

    All ranks pass as many, of the same shapes and dtypes.  They are added up in single precision at least, on the
    device, as NCCL takes nothing of the host's.
    """
    means: dict[int, Tensor] = {}
    alike: dict[torch.dtype, list[int]] = {}
    for place, gradient in enumerate(gradients):
        alike.setdefault(torch.promote_types(gradient.dtype, torch.float32), []).append(place)
    for dtype, places in alike.items():
        members = [gradients[place].detach() for place in places]
        total = torch.cat([one.to(device, dtype).reshape(-1) for one in members])
        dist.all_reduce(torch.view_as_real(total) if dtype.is_complex else total)
        parts = torch.split(total, [one.numel() for one in members])
        for place, one, part in zip(places, members, parts, strict=True):
            means[place] = (part / dist.get_world_size()).to(one.dtype).view(one.shape)
    return [means[place] for place in range(len(gradients))]
