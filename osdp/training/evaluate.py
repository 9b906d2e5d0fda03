"""How well a task was learned: answers to what was held out of training."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from osdp.api import OSDP
from osdp.training.process_group import Ranks
from osdp.training.reporters import Accuracy
from osdp.training.sentence_pairs import SentencePairs
from osdp.training.tasks import IGNORED, Addition, Task, stack

TEST_SAMPLES = 256


@torch.no_grad()
def held_out_accuracies(
    model: OSDP, task: Task, ranks: Ranks, batch: int, count: int = TEST_SAMPLES
) -> tuple[Accuracy, ...]:
    """Return how much the model gets right of `count` samples; nothing if the task has no test. A collective call.

    Each rank answers its share, and all run forward equally often.
    """
    share = -(-count // ranks.world_size)
    was_training = model.training
    model.eval()
    gives_both = "both_heads" in inspect.signature(model.module.forward).parameters  # as the zoo's BERT has it
    accuracies: tuple[Accuracy, ...] = ()
    if isinstance(task, Addition):
        accuracies = (_sums(model, task, ranks, batch, share),)
    elif isinstance(task, SentencePairs) and task.corpus.has_held_out and gives_both:
        accuracies = _pairs(model, task, ranks, batch, share)
    model.train(was_training)
    return accuracies


def _sums(model: nn.Module, task: Addition, ranks: Ranks, batch: int, share: int) -> Accuracy:
    """Ask for sums greedily; one is right if all its digits are."""
    sums = torch.from_numpy(task.held_out(share * ranks.world_size))[ranks.rank :: ranks.world_size]
    right = 0
    for asked in torch.split(sums.to(ranks.device), batch):
        answered = _continue(model, asked[:, : 2 * task.digits], task.digits + 1)
        right += int((answered == asked).all(dim=1).sum())
    return Accuracy("sums", *ranks.total([right, share]))


def _continue(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Append the `count` likeliest tokens one by one; (batch, sequence) -> (batch, sequence + count)."""
    for _ in range(count):
        output: Any = model(tokens)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens


def _pairs(model: nn.Module, task: SentencePairs, ranks: Ranks, batch: int, share: int) -> tuple[Accuracy, ...]:
    """Ask for the masked tokens, and whether the second sentence is the next one."""
    found = torch.zeros(3, dtype=torch.int64)
    numbers = range(ranks.rank, share * ranks.world_size, ranks.world_size)
    for start in range(0, share, batch):
        tokens, keywords = ranks.tensors(stack(task.held_out(number) for number in numbers[start : start + batch]))
        labels, is_random = keywords.pop("labels"), keywords.pop("next_sentence_labels")
        token_logits, next_logits = model(tokens, **keywords, both_heads=True)
        masked = labels != IGNORED
        right = (token_logits.argmax(-1) == labels) & masked, next_logits.argmax(-1) == is_random, masked
        found += torch.tensor([int(each.sum()) for each in right])
    tokens_right, next_right, asked, pairs = ranks.total([*found.tolist(), share])
    return Accuracy("masked tokens", tokens_right, asked), Accuracy("next sentences", next_right, pairs)
