"""Pairs of sentences: their form, what is masked, and what the second sentence is, counted by other means."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from osdp.training.job import _fed_by
from osdp.training.sentence_pairs import CLS, MASK, PAD, SEP, MadeUp, SentencePairs, TextFile
from osdp.training.tasks import IGNORED, Tokens, batch
from osdp.zoo import load_model
from profiler.errors import OsdpError

TEXT = "one\ntwo\nthree\n\n  \nvier\nfünf\n\nsix\n"


def restored(tokens: Tokens, labels: Tokens) -> list[int]:
    """Return the tokens before masking."""
    return [int(token if label == IGNORED else label) for token, label in zip(tokens, labels, strict=True)]


def parts(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Return first and second sentence of [CLS] first [SEP] second [SEP] [PAD]..."""
    assert tokens[0] == CLS
    first_end = tokens.index(SEP)
    second_end = tokens.index(SEP, first_end + 1)
    assert set(tokens[second_end + 1 :]) <= {PAD}
    return tokens[1:first_end], tokens[first_end + 1 : second_end]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def test_a_made_up_pair_by_hand() -> None:
    """3 words a topic: topic 1 is the words 7 8 9 (after 4 special tokens and the 3 of topic 0)."""
    corpus = MadeUp(topics=2, words=3)
    for seed in range(20):
        first, second = corpus.pair(np.random.default_rng(seed), 7, is_next=True, held_out=False)
        assert [*first, *second] in ([4, 5, 6, 4, 5, 6, 4], [7, 8, 9, 7, 8, 9, 7])
        assert 2 <= len(first) <= 5
        first, second = corpus.pair(np.random.default_rng(seed), 7, is_next=False, held_out=False)
        others = [7, 8, 9, 7, 8, 9, 7] if first[0] == 4 else [4, 5, 6, 4, 5, 6, 4]
        assert second.tolist() == others[len(first) :]  # what the other topic has at this place


def test_samples_have_the_form_that_bert_reads() -> None:
    task = SentencePairs(MadeUp(), 32, 0)
    for index in range(200):
        tokens, keywords = task.sample(index)
        assert keywords.keys() == {"labels", "token_type_ids", "next_sentence_labels"}  # no padding, so no mask
        first, second = parts(restored(tokens, keywords["labels"]))
        assert len(first) + len(second) + 3 == 32
        assert keywords["token_type_ids"].tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        same_topic = (first[0] - 4) // 16 == (second[0] - 4) // 16
        assert keywords["next_sentence_labels"] == int(not same_topic)
        masked = np.flatnonzero(keywords["labels"] != IGNORED)
        assert len(masked) == 4  # 15 % of 29 is 4.35
        assert not {0, len(first) + 1, 31} & set(masked)  # no special token is


def test_shares_of_masks_and_of_next_sentences() -> None:
    """80, 10 and 10 % of what is guessed, where a random token is the right one in 1 of 128; half are the next."""
    task, fates, random = SentencePairs(MadeUp(), 32, 7), Counter[str](), 0
    for index in range(3000):
        tokens, keywords = task.sample(index)
        random += int(keywords["next_sentence_labels"])
        for seen, label in zip(tokens, keywords["labels"], strict=True):
            if label != IGNORED:
                fates["mask" if seen == MASK else "same" if seen == label else "other"] += 1
    total = fates.total()
    assert total == 3000 * 4
    assert fates["mask"] / total == pytest.approx(0.8, abs=0.015)
    assert fates["other"] / total == pytest.approx(0.1 * 127 / 128, abs=0.01)
    assert fates["same"] / total == pytest.approx(0.1 + 0.1 / 128, abs=0.01)
    assert random / 3000 == pytest.approx(0.5, abs=0.03)


def test_training_and_test_share_no_beginning() -> None:
    task = SentencePairs(MadeUp(), 32, 0)

    def beginnings(samples: list[tuple[Tokens, dict[str, Tokens]]]) -> set[tuple[int, ...]]:
        return {tuple(parts(restored(tokens, keywords["labels"]))[0]) for tokens, keywords in samples}

    trained = beginnings([task.sample(index) for index in range(3000)])
    asked = beginnings([task.held_out(index) for index in range(300)])
    assert trained & asked == set()
    assert len(trained | asked) == 8 * 12  # topics times lengths from 9 to 20
    assert task.sample(5)[0].tolist() == SentencePairs(MadeUp(), 32, 0).sample(5)[0].tolist()
    assert task.sample(5)[0].tolist() != SentencePairs(MadeUp(), 32, 1).sample(5)[0].tolist()


def decoded(tokens: list[int]) -> str:
    return bytes(token - 4 for token in tokens).decode()


def test_pairs_of_a_text(text: Path) -> None:
    """Documents `one two three`, `vier fünf` and `six`; 24 bytes a pair, of which the first takes 12 at most."""
    corpus = TextFile(text)
    assert not corpus.has_held_out
    following = {"one two": {"three"}, "two": {"three"}, "vier": {"fünf"}}
    others = {
        "one two": {"vier fünf", "fünf", "six"},
        "two": {"vier fünf", "fünf", "six"},
        "vier": {"one two three", "two three", "three", "six"},
    }
    task, found = SentencePairs(corpus, 27, 0), {0: Counter[tuple[str, str]](), 1: Counter[tuple[str, str]]()}
    for index in range(1000):
        tokens, keywords = task.sample(index)
        first, second = parts(restored(tokens, keywords["labels"]))
        found[int(keywords["next_sentence_labels"])][decoded(first), decoded(second)] += 1
        assert keywords["attention_mask"].tolist() == [int(token != PAD) for token in tokens]
        end = len(first) + len(second) + 3
        assert keywords["token_type_ids"][end:].sum() == 0
    assert set(found[0]) == {(first, second) for first, seconds in following.items() for second in seconds}
    assert set(found[1]) == {(first, second) for first, seconds in others.items() for second in seconds}


def test_long_sentences_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a" * 40 + "\n" + "b" * 40 + "\n\n" + "c" * 40 + "\n" + "d" * 40 + "\n")
    tokens, keywords = SentencePairs(TextFile(path), 33, 0).sample(0)
    first, second = (decoded(part) for part in parts(restored(tokens, keywords["labels"])))
    assert (len(first), len(second)) == (15, 15)
    assert len({*first}) == len({*second}) == 1


def test_a_tenth_of_the_documents_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("\n\n".join(f"{n:02}a\n{n:02}b" for n in range(30)))
    task = SentencePairs(TextFile(path), 16, 0)
    assert task.corpus.has_held_out
    samples = {
        held_out: [task.held_out(i) if held_out else task.sample(i) for i in range(400)] for held_out in (False, True)
    }
    numbers = {
        held_out: {decoded(part)[:2] for tokens, words in made for part in parts(restored(tokens, words["labels"]))}
        for held_out, made in samples.items()
    }
    assert numbers[True] == {"09", "19", "29"}
    assert numbers[False] == {f"{n:02}" for n in range(30)} - numbers[True]


@pytest.mark.parametrize("content", ["one\ntwo\n", "one\n\ntwo\n", "\n\n \n"])
def test_a_text_without_pairs_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "text"
    path.write_text(content)
    with pytest.raises(OsdpError, match="has no pairs of sentences"):
        TextFile(path)


def test_what_is_traced_has_the_shapes_of_what_is_fed(text: Path) -> None:
    task, source = SentencePairs(TextFile(text), 32, 0), load_model("bert-tiny")
    (tokens,), keywords = _fed_by(task, source).example_inputs(source.build(), 3)
    fed, fed_keywords = batch(task, range(3))
    assert tokens.shape == fed.shape == (3, 32)
    assert {name: tuple(value.shape) for name, value in keywords.items()} == {
        name: array.shape for name, array in fed_keywords.items()
    }
    assert fed_keywords["next_sentence_labels"].shape == (3,)
    assert {value.dtype for value in keywords.values()} == {torch.int64}
