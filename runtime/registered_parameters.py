"""Whether modules still have the parameters that were sharded: others in their places would not be trained, or apart.

model.head = nn.Linear(6, 2)                  optimizers and state dicts would go on with the head from before
model.head.weight = model.embedding.weight    FSDP2 would put back what it gathers for the head
functional_call(model, values, inputs)        FSDP2 would compute with what it gathers
"""

from collections.abc import Mapping

from torch import nn


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
