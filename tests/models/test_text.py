import math

import numpy as np
import pytest

from tekoa.data import DataError, as_source
from tekoa.models import sample_text, text


def test_every_token_of_a_split_occurs_once():
    source = text.open_text("sample://split=valid", None, 50)
    ids = np.concatenate([example["tokens"][example["token_mask"]] for example in source])
    words = np.array(sample_text.vocabulary())[ids]
    expected = sample_text.text("valid").replace("\n", " </s> ").split()
    assert list(words) == expected
    facts = dict(source.info.facts)
    assert facts.pop("vocabulary").words == sample_text.vocabulary()
    assert facts == {"start_id": 0, "end_id": 1, "n_tokens": len(expected)}


def test_training_sequences_are_full_and_start_elsewhere_in_each_epoch():
    source = text.open_text("sample://split=valid", None, 50, train=True)
    n = len(source)
    batches = source.batches(n, epochs=2)
    first, second = next(batches), next(batches)
    assert first["token_mask"].all()
    assert (first["tokens"] != second["tokens"]).any()


def test_files_are_words_with_a_vocabulary_and_bytes_without(tmp_path):
    (tmp_path / "a.txt").write_text("b a\na\n")
    (tmp_path / "v.txt").write_text("<s> 0\n</s> 0\na 2\nb 1\n")
    words = text.open_text(str(tmp_path / "a.txt"), str(tmp_path / "v.txt"), 5)
    assert words[0]["tokens"].tolist() == [3, 2, 1, 2, 1]
    assert text.tokens_of(words.info) == (4, 0)
    as_bytes = text.open_text(str(tmp_path / "a.txt"), None, 6)
    assert bytes(as_bytes[0]["tokens"].tolist()) == b"b a\na\n"
    assert text.tokens_of(as_bytes.info) == (256, 0)


def test_mistakes_raise_data_errors():
    with pytest.raises(DataError, match=r"sample://split=dev.*train.*valid.*test"):
        text.open_text("sample://split=dev", None, 8)
    with pytest.raises(DataError, match=r"own vocabulary, but vocab_path is 'vocab.txt'"):
        text.open_text("sample://split=valid", "vocab.txt", 8)
    with pytest.raises(DataError, match=r"not a stream of tokens.*vocab_path"):
        text.tokens_of(as_source({"x": np.zeros((2, 3))}).info)


def test_token_scores_equal_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    batch = {
        "tokens": rng.integers(0, 5, (2, 3)),
        "token_mask": np.array([[True, True, True], [True, False, False]]),
    }
    losses, ranks = [], []
    for row, column in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        scores, true = logits[row, column].astype(float), batch["tokens"][row, column]
        losses.append(math.log(sum(math.exp(s) for s in scores)) - scores[true])
        ranks.append(1 / (1 + sorted(scores, reverse=True).index(scores[true])))
    cost, rank = text.token_losses(logits, batch), text.reciprocal_ranks(logits, batch)
    assert float(cost.total) == pytest.approx(sum(losses), rel=1e-5)
    assert float(rank.total) == pytest.approx(sum(ranks), rel=1e-5)
    assert float(cost.count) == float(rank.count) == 4


def test_without_a_mask_all_tokens_count():
    batch = {"tokens": np.zeros((2, 3), np.int32)}
    mean = text.token_losses(np.zeros((2, 3, 4), np.float32), batch)
    assert float(mean.count) == 6
    assert float(mean.compute()) == pytest.approx(math.log(4))


def test_ties_are_ranked_before_the_true_token():
    batch = {"tokens": np.zeros((1, 1), np.int32)}
    assert float(text.reciprocal_ranks(np.zeros((1, 1, 4), np.float32), batch).total) == 0.25


def test_perplexity_overflows_to_infinity():
    assert text.with_perplexity({"cost": 1e4}) == {"cost": 1e4, "perplexity": math.inf}


def test_the_training_loss_is_smoothed_and_reports_the_plain_one():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    batch = {
        "tokens": rng.integers(0, 5, (2, 3)),
        "token_mask": np.array([[True, True, True], [True, False, False]]),
    }
    plain = text.token_losses(logits, batch)
    value, metrics = text.training_loss(label_smoothing=0.2, z_loss=0.01)(logits, batch)
    is_counted = batch["token_mask"]
    normalizer = np.log(np.exp(logits).sum(-1))[is_counted]
    uniform = normalizer - logits.mean(-1)[is_counted]
    expected = 0.8 * float(plain.total) + 0.2 * uniform.sum() + 0.01 * (normalizer**2).sum()
    assert float(value.total) == pytest.approx(expected, rel=1e-5)
    assert float(value.count) == 4
    assert float(metrics["loss"].total) == float(metrics["cost"].total) == float(plain.total)
