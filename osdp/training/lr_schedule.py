"""The learning rate of a run at every step.

    warm-up     rate (t + 1) / w                                         t < w
    constant    rate                                                     t >= w
    cosine      rate (f + (1 - f) (1 + cos(pi (t - w) / (T - w))) / 2)   t >= w, f = 0.1

with t the steps done, w those of the warm-up and T all.  The rate depends on nothing else, so a run
that is resumed needs no scheduler's state.
"""

import math

from osdp.training.config import TrainConfig

COSINE_FLOOR = 0.1
"""Fraction of the learning rate at which the cosine ends."""


def learning_rate(config: TrainConfig, done: int) -> float:
    """Return the learning rate of the step after `done` steps."""
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (done - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
