import math

import pytest

from tekoa.models import sample_text


def grammar_nats(lines):
    """Returns the negative log probability of lines, computed independently of the generator."""
    men = {"adam", "boaz", "caleb", "david", "enoch", "felix", "gideon", "hiram"}
    nats, pronoun = 0.0, None
    for line in lines:
        words = line.split()
        if words[0] in ("he", "she"):
            assert words[0] == pronoun
            nats -= math.log(0.8)
        else:
            nats -= math.log(0.2) * (pronoun is not None) + math.log(1 / 16)
            pronoun = "he" if words[0] in men else "she"
        nats += math.log(9)  # The verb.
        assert words[2] == "the"
        has_adjective = len(words) > 4 and words[4] not in ("that", "with", "near")
        nats += math.log(2) + math.log(9) * (1 + has_adjective)
        rest = words[4 + has_adjective :]
        has_relative = rest[:1] == ["that"]
        nats += math.log(9) * 2 * has_relative - math.log(0.2 if has_relative else 0.8)
        rest = rest[4:] if has_relative else rest
        has_tool = rest[:1] == ["with"]
        if has_tool:
            assert rest[1] == {"he": "his", "she": "her"}[pronoun]
        nats += math.log(6) * has_tool - math.log(0.4 if has_tool else 0.6)
        rest = rest[3:] if has_tool else rest
        assert rest[:2] in ([], ["near", "the"])
        nats += math.log(8) * bool(rest) - math.log(0.4 if rest else 0.6)
    return nats


@pytest.mark.parametrize("split", sample_text.SPLITS)
def test_best_perplexity_equals_that_of_the_grammar(split):
    lines = sample_text.text(split).splitlines()
    n_tokens = sum(len(line.split()) for line in lines) + len(lines)
    expected = math.exp(grammar_nats(lines) / n_tokens)
    assert sample_text.best_perplexity(split) == pytest.approx(expected, rel=1e-9)


def test_all_words_are_in_the_vocabulary():
    words = sample_text.vocabulary()
    assert len(set(words)) == len(words)
    assert words[:2] == ["<s>", "</s>"]
    assert set(sample_text.text("train").split()) == set(words[2:])


def test_splits_differ():
    assert sample_text.text("valid") not in sample_text.text("train")
    assert sample_text.text("valid") != sample_text.text("test")
