"""A small text made by a grammar, so that language models have something to train on.

It is no natural language and stands for none: it is here because it can be shipped, is the
same everywhere, and its best possible perplexity is known, which tells how much of what can
be learned a model has learned. A story is about one person, named in its first line and
called he or she, his or her in the others, so that a model must remember over lines.
"""

import functools
import math
import random

_HEROES = {
    "he": ("adam", "boaz", "caleb", "david", "enoch", "felix", "gideon", "hiram"),
    "she": ("abigail", "bilhah", "chloe", "deborah", "esther", "hannah", "judith", "lydia"),
}
_HIS = {"he": "his", "she": "her"}
_VERBS = ("finds", "hides", "keeps", "leads", "loses", "paints", "sees", "sells", "washes")
_ADJECTIVES = ("black", "hungry", "little", "old", "quiet", "red", "strong", "tired", "white")
_ANIMALS = ("camel", "cow", "dog", "goat", "horse", "lamb", "ox", "ram", "sheep")
_TOOLS = ("basket", "knife", "lamp", "rope", "staff", "stick")
_PLACES = ("field", "gate", "hill", "house", "market", "river", "road", "well")
_OTHERS = ("<s>", "</s>", "the", "that", "with", "near", "he", "she", "his", "her")

# Chances of what may or may not stand in a line.
_NEW_STORY, _ADJECTIVE, _RELATIVE, _TOOL, _PLACE = 0.2, 0.5, 0.2, 0.4, 0.4

_SEEDS = {"train": 1, "valid": 2, "test": 3}
_N_LINES = {"train": 4000, "valid": 400, "test": 400}
SPLITS = tuple(_SEEDS)


def vocabulary() -> list[str]:
    """Lists the words, the marks of start and end first.

    >>> len(vocabulary())
    67
    """
    kinds = *_HEROES.values(), _VERBS, _ADJECTIVES, _ANIMALS, _TOOLS, _PLACES
    return [*_OTHERS, *(word for kind in kinds for word in kind)]


def text(split: str) -> str:
    """Gives the lines of a split: train, valid or test.

    >>> print(text('train')[:75])
    gideon sees the quiet horse near the field
    he leads the camel near the well
    """
    return "\n".join(_written(split)[0]) + "\n"


def best_perplexity(split: str) -> float:
    """Gives the perplexity of the grammar itself on a split, line ends counted.

    No model that has not seen the split can be expected to do better.

    >>> round(best_perplexity('valid'), 2)
    3.68
    """
    lines, nats = _written(split)
    return math.exp(nats / sum(len(line.split()) + 1 for line in lines))


@functools.cache
def _written(split: str) -> tuple[list[str], float]:
    """The lines, and minus the log of their probability."""
    writer = _Writer(_SEEDS[split])
    return [writer.line() for _ in range(_N_LINES[split])], writer.nats


class _Writer:
    """Writes line after line; every choice shows in the words, so its chance can be counted."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._pronoun = ""
        self.nats = 0.0

    def line(self) -> str:
        words = [*self._subject(), self._one_of(_VERBS), *self._animal()]
        if self._happens(_TOOL):
            words += ["with", _HIS[self._pronoun], self._one_of(_TOOLS)]
        if self._happens(_PLACE):
            words += ["near", "the", self._one_of(_PLACES)]
        return " ".join(words)

    def _subject(self) -> list[str]:
        # The first line of all begins a story whatever the dice say: that costs nothing.
        if self._pronoun and not self._happens(_NEW_STORY):
            return [self._pronoun]
        self._pronoun = self._one_of(("he", "she"))
        return [self._one_of(_HEROES[self._pronoun])]

    def _animal(self) -> list[str]:
        words = ["the"]
        if self._happens(_ADJECTIVE):
            words.append(self._one_of(_ADJECTIVES))
        words.append(self._one_of(_ANIMALS))
        if self._happens(_RELATIVE):
            words += ["that", self._one_of(_VERBS), "the", self._one_of(_ANIMALS)]
        return words

    # Only `random()` is promised to give the same numbers in every version of Python.
    def _happens(self, chance: float) -> bool:
        is_so = self._random.random() < chance
        self.nats -= math.log(chance if is_so else 1 - chance)
        return is_so

    def _one_of(self, words: tuple[str, ...]) -> str:
        self.nats += math.log(len(words))
        return words[int(self._random.random() * len(words))]
