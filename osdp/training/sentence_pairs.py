"""Pairs of sentences for BERT: tokens to be guessed, and second sentences that may not be the next ones.

    [CLS] first [SEP] second [SEP] [PAD]...      token type 0 up to the first [SEP], then 1

As in Devlin et al. (2018), section 3.1: half of the second sentences follow the first in their
document, the others are from another document.  Of the tokens that are no special ones 15 % are to be
guessed; 80 % of these are replaced by [MASK], 10 % by a random token, and 10 % stay.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from osdp.training.tasks import HELD_OUT, IGNORED, TRAINING, Sample, Tokens, generator, open_text
from profiler.errors import OsdpError

PAD, CLS, SEP, MASK = range(4)
SPECIAL = 4
"""Number of special tokens; those of a corpus follow."""
MASKED_SHARE = 0.15
IS_NEXT, IS_RANDOM = 0, 1
"""Labels of the second task, as in the released BERT."""
SHORTEST = 16
"""Least tokens of a sample: special ones, and a few words on either side."""

_REPLACED, _RANDOM = 0.8, 0.9
"""Up to the first a token becomes [MASK], from there to the second a random one; above it stays."""


@dataclass(frozen=True)
class MadeUp:
    """Documents on a topic, which is a cycle of words: a document goes round it, from its first word on.

    So a word follows from its place and from the words around it, which give the topic.  A second
    sentence that is not the next one is what a document on another topic has at its place.  One in ten
    of (topic, length of the first sentence) is held out of training.
    """

    topics: int = 8
    """Cycles, with no word in common."""
    words: int = 16
    may_pad: bool = False
    """Whether a pair can be shorter than the room that it gets."""
    has_held_out: bool = True

    @property
    def size(self) -> int:
        """Number of distinct tokens, special ones left out."""
        return self.topics * self.words

    def pair(self, random: np.random.Generator, room: int, is_next: bool, held_out: bool) -> tuple[Tokens, Tokens]:
        """Return two sentences that fill the room, the first between a third and two thirds of it."""
        while True:
            topic, length = int(random.integers(self.topics)), int(random.integers(room // 3, room - room // 3 + 1))
            if self.is_held_out(topic, length) == held_out:
                break
        other = topic if is_next else (topic + int(random.integers(1, self.topics))) % self.topics
        places = np.arange(room) % self.words
        return SPECIAL + topic * self.words + places[:length], SPECIAL + other * self.words + places[length:]

    def identity(self) -> dict[str, Any]:
        return {"topics": self.topics, "words": self.words}

    def is_held_out(self, topic: int, length: int) -> bool:
        """Whether pairs whose first sentence is on a topic and so long are kept for the test."""
        return (length * self.topics + topic) % 10 == 9


class TextFile:
    """A text as the released BERT takes it: a sentence on each line, documents apart by blank lines.

    A token is a byte.  Sentences are drawn out by those that follow, with a space between, and cut at
    the end, so that a pair fills its room where its documents are long enough.  One document in ten is
    held out of training, if that makes two or more with a pair in them.
    """

    size = 256
    may_pad = True

    def __init__(self, path: Path) -> None:
        """Read the file; raises OsdpError if it cannot be read or has no pairs."""
        lines = bytes(open_text(path)).splitlines()
        runs = groupby((line.strip() for line in lines), bool)
        documents = [list(run) for has_text, run in runs if has_text]
        self._bytes = sum(map(len, lines))
        parts = {False: [d for i, d in enumerate(documents) if i % 10 != 9], True: documents[9::10]}
        self.has_held_out = len(parts[True]) > 1 and bool(_starts(parts[True]))
        self._documents = parts if self.has_held_out else {False: documents}
        self._starts = {held_out: _starts(part) for held_out, part in self._documents.items()}
        if len(documents) < 2 or not self._starts[False]:
            got = f"{len(documents)} documents, {len(lines)} lines"
            expected = "two documents or more, with blank lines between them, and a sentence on each line"
            advice = "a blank line between paragraphs, or another --data"
            raise OsdpError(f"{path} has no pairs of sentences", got=got, expected=expected, advice=advice)

    def pair(self, random: np.random.Generator, room: int, is_next: bool, held_out: bool) -> tuple[Tokens, Tokens]:
        """Return two sentences; the first takes half of the room at most."""
        documents, starts = self._documents[held_out], self._starts[held_out]
        number, line = starts[int(random.integers(len(starts)))]
        first, following = _drawn_out(documents[number], line, len(documents[number]) - 1, room // 2)
        if not is_next:
            number = (number + int(random.integers(1, len(documents)))) % len(documents)
            following = int(random.integers(len(documents[number])))
        second, _ = _drawn_out(documents[number], following, len(documents[number]), room - len(first))
        return first, second

    def identity(self) -> dict[str, Any]:
        return {"text_bytes": self._bytes}


def _starts(documents: list[list[bytes]]) -> list[tuple[int, int]]:
    """Return (document, line) of every sentence that another follows."""
    return [(number, line) for number, document in enumerate(documents) for line in range(len(document) - 1)]


def _drawn_out(document: list[bytes], start: int, end: int, room: int) -> tuple[Tokens, int]:
    """Return the tokens of line `start` and of those after it, before `end`, that fit whole; and the next line."""
    text, line = document[start], start + 1
    while line < end and len(text) + 1 + len(document[line]) <= room:
        text, line = text + b" " + document[line], line + 1
    return SPECIAL + np.frombuffer(text[:room], dtype=np.uint8).astype(np.int64), line


Corpus = MadeUp | TextFile
"""Documents, which are sequences of sentences."""


class SentencePairs:
    """The task `sentences`: both of BERT's, on pairs from a corpus."""

    name = "sentences"

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int) -> None:
        """Take pairs of `sequence_length` tokens, special ones counted; raises OsdpError if that is too short."""
        if sequence_length < SHORTEST:
            what, got = "a sample is too short for a pair of sentences", f"{sequence_length} tokens"
            raise OsdpError(what, got=got, expected=f"at least {SHORTEST}", advice="a larger --seq")
        self.corpus, self.sequence_length, self.seed = corpus, sequence_length, seed

    @property
    def vocabulary_size(self) -> int:
        return SPECIAL + self.corpus.size

    def sample(self, index: int) -> Sample:
        """Return tokens (sequence,), and `labels` and `token_type_ids` likewise, `next_sentence_labels` (); a
        corpus whose pairs may be short adds `attention_mask` (sequence,)."""
        return self._make(generator(self.seed, TRAINING, index), held_out=False)

    def held_out(self, index: int) -> Sample:
        """Return such a sample of what is never trained on; the corpus must have some."""
        return self._make(generator(self.seed, HELD_OUT, index), held_out=True)

    def identity(self) -> dict[str, Any]:
        """Return what decides the samples."""
        return {"task": self.name, "seq": self.sequence_length, "seed": self.seed} | self.corpus.identity()

    def _make(self, random: np.random.Generator, held_out: bool) -> Sample:
        is_next = bool(random.integers(2))
        first, second = self.corpus.pair(random, self.sequence_length - 3, is_next, held_out)
        whole = np.concatenate([[CLS], first, [SEP], second, [SEP]])
        tokens = np.full(self.sequence_length, PAD, dtype=np.int64)
        tokens[: len(whole)] = whole
        types = np.zeros_like(tokens)
        types[len(first) + 2 : len(whole)] = 1
        tokens, labels = self._mask(random, tokens)
        follows = np.array(IS_NEXT if is_next else IS_RANDOM)
        keywords = {"labels": labels, "token_type_ids": types, "next_sentence_labels": follows}
        if self.corpus.may_pad:
            keywords["attention_mask"] = (np.arange(self.sequence_length) < len(whole)).astype(np.int64)
        return tokens, keywords

    def _mask(self, random: np.random.Generator, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Return the tokens as the model sees them, and the labels of those that it must guess."""
        places = np.flatnonzero(tokens >= SPECIAL)
        guessed = random.choice(places, max(1, round(MASKED_SHARE * len(places))), replace=False)
        labels = np.full_like(tokens, IGNORED)
        labels[guessed] = tokens[guessed]
        fate = random.random(len(guessed))
        others = random.integers(SPECIAL, self.vocabulary_size, len(guessed))
        seen = tokens.copy()
        seen[guessed] = np.where(fate < _REPLACED, MASK, np.where(fate < _RANDOM, others, tokens[guessed]))
        return seen, labels
