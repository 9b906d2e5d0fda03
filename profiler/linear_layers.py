"""Which layers are named linear and cannot be cut into slices, which compute x W^T + b in one place, and why."""

from __future__ import annotations

from torch import nn


def whole_linears(root: nn.Module, named: str = "Linear") -> dict[str, str]:
    """Return, by path, what kind of layers they are whose class is `named` so and that cannot be split.

    Slices take a layer's place under one path, have the forward of nn.Linear and no hooks of others.
    """
    linear = {path: layer for path, layer in root.named_modules() if type(layer).__name__ == named}
    several = _in_several_places(root) if linear else set[int]()
    kinds = dict[str, str]()
    for path, layer in linear.items():
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            kinds[path] = f"{named} of {type(layer).__module__}"
        elif "forward" in vars(layer):
            kinds[path] = f"{named} with a forward of its own"
        elif id(layer) in several:
            kinds[path] = f"{named} in several places"
        elif any((layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)):
            kinds[path] = f"{named} with hooks"
    return kinds


def _in_several_places(root: nn.Module) -> set[int]:
    """Return the modules that have several paths, by identity."""
    seen, again = {id(root)}, list[nn.Module]()
    for one in root.modules():
        for child in one._modules.values():
            if child is not None and id(child) in seen:
                again.append(child)
            seen.add(id(child))
    return {id(inner) for one in again for inner in one.modules()}
