"""`LiveBytes` with a category for every storage, derived from the running program:

parameters             of the watched module, local parts
optimizer              states that the optimizer keeps
gradients              of local parameters, and of unsharded ones once autograd has accumulated them
unsharded_parameters   those that modules compute with, where they are not the local ones
communication_buffers  arguments of collectives that are none of these
activations            all the rest, unless `category` says otherwise
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from runtime.observe.live_bytes import HOST, LiveBytes

ACTIVATIONS = "activations"


class LabelledBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts what is allocated while it is entered, by category."""

    def __init__(self) -> None:
        super().__init__()
        self.category = ACTIVATIONS
        self.homes: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        """Category of the shard of an offloaded parameter; empty for others."""
        self._hooked: MutableMapping[Tensor, RemovableHandle] = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("c10d", "fsdp") and out is not NotImplemented:
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, Tensor) and self.category_of(leaf) == ACTIVATIONS:
                    self.label(leaf, "communication_buffers")
        return out

    def watch(self, module: nn.Module, offloaded: Collection[str] = ()) -> None:
        """Label parameters, and from now on unsharded ones and gradients.

        `offloaded` names parameters whose shards, gradients and states are in the host's memory.
        """
        for name, parameter in module.named_parameters():
            self.homes[parameter] = HOST if name in offloaded else ""
            self.hold([parameter], self.homes[parameter] or "parameters")
            if parameter.grad is not None:
                self.hold([parameter.grad], self.homes[parameter] or "gradients")
            self._watch_gradient(parameter)
        self.hold(module.buffers())
        for part in module.modules():
            if part._parameters:
                self._handles.append(part.register_forward_pre_hook(self._label_used))
            if isinstance(part, FSDPModule):
                self._handles.append(part.register_forward_hook(self._label_kept))

    def unwatch(self) -> None:
        """Remove all hooks."""
        for handle in (*self._handles, *self._hooked.values()):
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def label_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Label the gradients of parameters; DDP's buckets call no hook."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.label(parameter.grad, self.homes.get(parameter, "") or "gradients")

    def hold_states(self, optimizer: torch.optim.Optimizer, home: str = "") -> None:
        """Count and label what an optimizer keeps."""
        states = tree_leaves(list(optimizer.state.values()))
        self.hold((state for state in states if isinstance(state, Tensor)), home or "optimizer")

    def by_home(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters whose shards are on the device, and those on the host."""
        here = [parameter for parameter, home in self.homes.items() if not home]
        return here, [parameter for parameter, home in self.homes.items() if home]

    def _label_used(self, module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and self.category_of(parameter) not in ("parameters", HOST):
                self.label(parameter, "unsharded_parameters")
                self._watch_gradient(parameter)

    def _label_kept(self, module: nn.Module, *_: Any) -> None:
        """Label what a unit keeps from forward to backward: a secondary copy."""
        for parameter in module.parameters():
            if self.category_of(parameter) == ACTIVATIONS:
                self.label(parameter, "unsharded_parameters")

    def _watch_gradient(self, parameter: Tensor) -> None:
        # What FSDP1 computes with is a view of what it gathered, to which autograd adds nothing up.
        if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
            hook: Any = parameter.register_post_accumulate_grad_hook
            self._hooked[parameter] = hook(lambda trained: self.label_gradients([trained]))
