"""What is done to a model in a drawn loop: as everyone writes it, or anything."""

from __future__ import annotations

from random import Random
from typing import Any

from drawn_plans import Draw
from thoroughness import STEPS

PREFIXES = ("embed", "blocks", "heads", "norm", "root", "temperature", "unused")
"""What the names of all parameters begin with."""

Action = tuple[str, dict[str, Any]]
"""Name of a method of `drawn_training.Loop`, and its arguments."""


def plain_actions(draw: Draw) -> list[Action]:
    """Return a loop as everyone writes it."""
    how = Random(f"plain {draw.number}")
    actions: list[Action] = [("make_optimizer", {"kind": how.choice(["sgd", "adam"]), "prefixes": ("",), "rate": 0.02})]
    for step in range(STEPS):
        count = how.choice([1, 1, 2])
        for index in range(count):
            weights = how.choice([[1.0, 1.0, 1.0], [1.0, 0.0, 0.5]])
            keywords = {"numbers": [10 * step + index], "weights": weights, "order": "sum", "share": 1 / count}
            actions.append(("train_on", {**keywords, "syncs": index == count - 1}))
        actions += [("compare_gradients", {}), ("step", {"closes": "optimizer"})]
    return [*actions, ("check", {})]


def any_actions(draw: Draw) -> list[Action]:
    """Return a loop of anything."""
    return _AnyLoop(draw).drawn()


class _AnyLoop:
    """Draws three steps, whatever else comes between, before and in them."""

    def __init__(self, draw: Draw) -> None:
        self.how = Random(f"any {draw.number}")
        self.model: Any = draw.build()
        self.actions: list[Action] = []
        self.number = self.steps = self.optimizers = 0
        self.left = list(PREFIXES)
        """Of parameters that no optimizer has yet."""
        self.how.shuffle(self.left)

    def drawn(self) -> list[Action]:
        """Draw everything."""
        while self.steps < 3:
            self._scale()
            self._add_optimizer()
            self._change_model()
            rounds = self.how.choice([1, 1, 1, 2, 3])
            # A last micro-batch of frozen layers would have no backward.
            marks = self._happens(0.6) and not self._has("freeze")
            for index in range(rounds):
                self._run_besides()
                self._train(rounds, syncs=not marks or index == rounds - 1)
            if not self._is_given_up():
                self._step()
                self._go_on()
        return [*self.actions, ("check", {})]

    def _act(self, name: str, **arguments: Any) -> None:
        self.actions.append((name, arguments))

    def _has(self, name: str) -> bool:
        return any(known == name for known, _ in self.actions)

    def _happens(self, probability: float) -> bool:
        return self.how.random() < probability

    def _numbers(self, count: int = 1) -> list[int]:
        """Return so many numbers of batches that were not taken."""
        self.number += count
        return list(range(self.number - count, self.number))

    def _add_optimizer(self) -> None:
        """Give some of the parameters that are left to an optimizer, a new one or the last."""
        how, is_chosen = self.how, self._happens(0.5)
        if not (self.left and (is_chosen or (self.steps > 0 and not self.optimizers))):
            return
        taken = [self.left.pop() for _ in range(how.choice([len(self.left), how.randint(1, len(self.left))]))]
        if any(name.startswith(tuple(taken)) for name, _ in self.model.named_parameters()):
            rate = how.choice([0.01, 0.03])
            if self.optimizers and self._happens(0.5):
                self._act("add_group", prefixes=taken, rate=rate)
            else:
                self.optimizers += 1
                self._act("make_optimizer", kind=how.choice(["sgd", "adam"]), prefixes=taken, rate=rate)

    def _change_model(self) -> None:
        """Switch its mode, leave out a block, freeze or thaw something."""
        how = self.how
        if self._happens(0.2):
            self._act("train", mode=self._happens(0.5))
        if self.model.can_skip and self._happens(0.4):
            self._act("skip", index=how.choice([None, 0, len(self.model.blocks) - 1]))
        if self._happens(0.15):
            prefix = how.choice(["heads.0", "blocks.0", "embed", "temperature"])
            self._act("freeze", prefix=prefix, frozen=self._happens(0.6))

    def _scale(self) -> None:
        """Change values as loops do that clamp weights, renormalise them or swap averages in."""
        if self._happens(0.15):
            by_data = self._happens(0.5)  # which odc refuses, and is then done in the other way
            prefixes = self.how.choice([("",), ("blocks",), ("heads", "embed")])
            self._act("scale", prefixes=prefixes, factor=self.how.choice([0.5, 1.1]), by_data=by_data)

    def _run_besides(self) -> None:
        """Run what is not trained on, and change what is."""
        if self._happens(0.15):
            number, inference = self._numbers()[0], self._happens(0.5)
            method = self._happens(0.3) and self.model.root is None
            self._act("evaluate", number=number, inference=inference, method=method)
        if self._happens(0.1):
            self._act("give_up_forward", number=self._numbers()[0])
        self._scale()

    def _train(self, rounds: int, *, syncs: bool) -> None:
        """Run one of the step's rounds of forwards and backwards."""
        how, forwards = self.how, self.how.choice([1, 1, 1, 2, 3])
        has_others = len(self.model.heads) > 1 and self.model.output != "tensor"
        weights = how.choice([[1.0, 1.0, 1.0], [1.0, 0.0, 0.5], [0.0, 1.0, 1.0] if has_others else [1.0]])
        order, numbers = how.choice(["sum", "each", "reversed", "heads"]), self._numbers(forwards)
        self._act("train_on", numbers=numbers, weights=weights, order=order, syncs=syncs, share=1 / rounds)

    def _is_given_up(self) -> bool:
        """Give up the step, or have its backward fail."""
        if self._happens(0.15):
            self._act("give_up_step")
            return True
        if self._happens(0.07):
            self._act("fail_backward", number=self._numbers()[0])
            return True
        return False

    def _step(self) -> None:
        """Step, perhaps after looks at gradients."""
        how = self.how
        if self._happens(0.6):
            self._act("compare_gradients")
        if self._happens(0.5):
            by_torch, norm_type = self._happens(0.5), how.choice([2.0, 2.0, 1.0, float("inf")])
            self._act("clip", max_norm=how.choice([0.05, 10.0]), norm_type=norm_type, by_torch=by_torch)
        self._act("step", closes=how.choice(["optimizer", "optimizer", "model", "optimizer, zeros", "model, zeros"]))
        self.steps += 1

    def _go_on(self) -> None:
        """Save, go back, go on under another plan, compare."""
        if self._happens(0.3):
            self._act("save")
        if self._happens(0.3) and self._has("save"):
            self._act("restore", whole=self._happens(0.5))
        if self._happens(0.25) and self.optimizers == 1:
            self._act("give_up_step")
            self._act("resume", again=self.steps)
        if self._happens(0.5):
            self._act("check")
