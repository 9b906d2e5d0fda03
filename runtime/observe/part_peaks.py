"""The most that lives while each part of a model runs forward and backward, in the order of the step.

Parts are modules, told apart by their hooks: one begins when its forward does, and again when the gradient of its
output comes, and ends when the next begins.  Hooks are called before those that were there, so that what is gathered
for a part counts as its own.  Tensors' hooks leave autograd's graph as it is, unlike those of a module's backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from runtime.observe.live_bytes import LiveBytes


@dataclass(slots=True)
class PartPeak:
    """The most that lives while one part runs."""

    phase: str
    """`forward`, `backward` (a forward that is run again included) or `optimizer`."""
    name: str
    """Path of the module; empty before the first forward, of the loss, and in the optimizer."""
    total_bytes: int


class PartPeaks(LiveBytes):  # type: ignore[no-untyped-call]
    """Live bytes that remembers the most of each part, since the list was last cleared."""

    def __init__(self, category: str = "") -> None:
        super().__init__(category)
        self.parts: list[PartPeak] = []

    def changed(self) -> None:
        if self.parts and self.total_bytes > self.parts[-1].total_bytes:
            self.parts[-1].total_bytes = self.total_bytes

    def enter(self, phase: str, name: str = "") -> None:
        """Begin a part."""
        self.phase = phase
        self.parts.append(PartPeak(phase, name, self.total_bytes))

    def follow(self, module: nn.Module, names: Iterable[str]) -> None:
        """Begin parts as the modules of these paths run; `unwatch` ends that.  A path without a module is left out."""
        modules = dict(module.named_modules(remove_duplicate=False))
        for name in dict.fromkeys(names):
            if name and (part := modules.get(name)) is not None:
                before = part.register_forward_pre_hook(partial(self._runs, name), prepend=True)
                self._handles += [before, part.register_forward_hook(partial(self._ran, name), prepend=True)]
        whole = module.register_forward_pre_hook(lambda *_: self.enter("forward"), prepend=True)
        self._handles += [whole, module.register_forward_hook(partial(self._ran, ""), prepend=True)]

    def follow_optimizer(self, optimizer: Optimizer) -> None:
        """Begin a part with each step of an optimizer."""
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.enter("optimizer")))

    def _runs(self, name: str, *_: Any) -> None:
        self.enter(self.phase, name)

    def _ran(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            # No leaf: a parameter that a module returns is not to have hooks, and others have their turn at any time.
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                hook: Any = tensor.register_hook
                hook(lambda _gradient: self.enter("backward", name))
