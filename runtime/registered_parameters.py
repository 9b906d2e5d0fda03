"""Whether modules still have the parameters that were sharded: others in their places would not be trained, or apart.

model.head = nn.Linear(6, 2)                  optimizers and state dicts would go on with the head from before
model.head.weight = model.embedding.weight    FSDP2 would put back what it gathers for the head
functional_call(model, values, inputs)        FSDP2 would compute with what it gathers

A forward of the model, a step and a state dict look at all of it; a layer that is called by itself, at its unit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from profiler.errors import OsdpError


class RegisteredParameters:
    """What a model's modules had when it was sharded."""

    def __init__(self, model: nn.Module, resting: Mapping[str, nn.Parameter]) -> None:
        """Take the parameters that rest, by all their names."""
        self._model, self._resting = model, resting
        self._owners = {module: [*module._parameters] for module in model.modules() if module._parameters}
        tables = [(module._parameters, module._modules) for module in model.modules()]
        self._known = [(table, *item) for both in tables for table in both for item in table.items()]

    def others(self) -> dict[str, nn.Parameter | None]:
        """Return what modules have now in place of parameters that rest, by their names; None where they have nothing.

        Modules that were removed are not among them, with all that is in them.
        """
        if all(table.get(name) is value for table, name, value in self._known):
            return {}
        now = dict(self._model.named_parameters(remove_duplicate=False))
        names = [
            f"{path}.{leaf}" if path else leaf
            for path, module in self._model.named_modules(remove_duplicate=False)
            for leaf in self._owners.get(module, ())
        ]
        lost = {name: None for name in names if name in self._resting and name not in now}
        return lost | {name: one for name, one in now.items() if one is not self._resting.get(name, one)}


Place = tuple[nn.Module, str, Callable[[nn.Parameter | None], bool]]
"""A module, the name that it has for a parameter, and whether what it has there rests or was gathered."""


def refuse_others(modules: Iterable[nn.Module], places: Sequence[Place]) -> None:
    """Have a unit's modules raise OsdpError where they are called with others in the places of its parameters."""
    tables = [(module._parameters, name, is_known) for module, name, is_known in places]

    def check(*unused: Any) -> None:
        if names := [name for table, name, is_known in tables if not is_known(table.get(name))]:
            raise OsdpError(
                "a layer that is sharded by itself is called with other parameters than its own",
                got=", ".join(names[:3]),
                expected="the parameters that it had after OSDP(...)",
                advice="for torch.func.functional_call in a forward, also under vmap, pin the layers of its block to "
                "one strategy, as in blocks.*=shard, or all to *=replicate; replace and tie layers before OSDP(...)",
            )

    for module in modules:
        module.register_forward_pre_hook(check, prepend=True)
