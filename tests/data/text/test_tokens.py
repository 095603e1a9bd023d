import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekoa import data
from tekoa.data.readers.base import RowRequest
from tekoa.data.text.tokens import TokenReader


@pytest.fixture
def corpus(tmp_path):
    """A directory with a text of 50 lines of 1 to 7 numbers and a vocabulary; the tokens."""
    rng = np.random.default_rng(0)
    lines = [[str(w) for w in rng.integers(0, 20, rng.integers(1, 8))] for _ in range(50)]
    (tmp_path / "text.txt").write_text("".join(f" {' '.join(line)} \n" for line in lines))
    (tmp_path / "vocab.txt").write_text("<s> 0\n</s> 0\n" + "".join(f"{w} 1\n" for w in range(20)))
    stream = [token for line in lines for token in [*(int(w) + 2 for w in line), 1]]
    return tmp_path, np.array(stream)


def test_without_random_skip_each_token_is_read_once(corpus):
    folder, stream = corpus
    source = data.tokens(folder / "text.txt", folder / "vocab.txt", 16)
    assert source.info.n_classes == 22
    facts = dict(source.info.facts)
    assert facts.pop("vocabulary").words[:3] == ["<s>", "</s>", "0"]
    assert facts == {"start_id": 0, "end_id": 1, "n_tokens": len(stream)}
    assert source.info.shapes == {"tokens": (16,), "token_mask": (16,)}
    sequences = [
        b["tokens"][b["token_mask"]] for b in source.batches(1, epochs=1, remainder="keep")
    ]
    np.testing.assert_array_equal(np.concatenate(sequences), stream)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
def test_with_random_skip_all_sequences_are_full(n_tokens, seq_length, seed):
    if n_tokens < seq_length:
        with pytest.raises(data.DataError, match="do not fill one sequence"):
            TokenReader(np.arange(n_tokens), seq_length, "test", random_skip=True)
        return
    reader = TokenReader(np.arange(n_tokens), seq_length, "test", random_skip=True)
    for epoch in range(4):
        rows = np.arange(len(reader))
        request = RowRequest(rows=rows, epochs=np.full_like(rows, epoch), seed=seed)
        batch = reader.gather(request)
        assert batch["token_mask"].all()
        flat = batch["tokens"].ravel()
        np.testing.assert_array_equal(flat, np.arange(len(flat)) + flat[0])
        assert 0 <= flat[0] < seq_length
        assert n_tokens - len(flat) < 2 * seq_length


def test_skips_differ_by_epoch_and_seed():
    reader = TokenReader(np.arange(1000), 50, "test", random_skip=True)

    def starts(seed):
        request = RowRequest(rows=np.zeros(40, int), epochs=np.arange(40), seed=seed)
        return reader.gather(request)["tokens"][:, 0].tolist()

    assert len(set(starts(0))) > 15
    assert starts(0) != starts(1)
    assert starts(0) == starts(0)


def test_bytes_are_tokens_without_a_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("abcabc")
    source = data.tokens(tmp_path / "a.txt", None, 4)
    assert source.info.n_classes == 256
    assert source[0]["tokens"].tolist() == [97, 98, 99, 97]
    assert source[1]["token_mask"].tolist() == [True, True, False, False]


def test_several_files_are_one_stream(tmp_path):
    for name, text in (("a", "abc"), ("b", "def")):
        (tmp_path / f"{name}.txt").write_text(text)
    source = data.tokens(f"{tmp_path}/*.txt", None, 6)
    assert bytes(source[0]["tokens"].astype(np.uint8)) == b"abcdef"


def test_error_messages_name_the_cause(corpus):
    folder, _ = corpus
    with pytest.raises(ValueError, match="seq_length must be at least 1"):
        data.tokens(folder / "text.txt", folder / "vocab.txt", 0)
    with pytest.raises(data.DataError, match="matches no file"):
        data.tokens(folder / "nothing.txt", folder / "vocab.txt", 8)
    with pytest.raises(data.DataError, match="matches no text file"):
        data.tokens("dummy://", folder / "vocab.txt", 8)
    (folder / "more.txt").write_text("3 4\n5 newword\n")
    with pytest.raises(data.DataError, match=r"more\.txt, line 2: the word 'newword'"):
        data.tokens(folder / "more.txt", folder / "vocab.txt", 8)


def check_continuity(make, stream, group, seq_length):
    """Checks that rows continue across a restart at each step on another number of hosts."""
    running = make((0, 1))
    places: list = []
    for step in range(3 * group + 1):
        state = json.loads(json.dumps(running.state()))
        parts = []
        for index in range(2):
            part = make((index, 2))
            part.restore(state)
            parts.append(next(part)["tokens"])
        batch = next(running)["tokens"]
        np.testing.assert_array_equal(np.concatenate(parts), batch)
        # The start of each row in the text, by search instead of the reader's arithmetic.
        expected = [None] * len(batch) if step % group == 0 else [at + seq_length for at in places]
        places = [find(stream, row, at) for row, at in zip(batch, expected, strict=True)]


def find(stream, row, expected):
    if expected is not None:
        np.testing.assert_array_equal(stream[expected : expected + len(row)], row)
        return expected
    windows = np.lib.stride_tricks.sliding_window_view(stream, len(row))
    (start,) = np.flatnonzero((windows == row).all(axis=1))[:1]
    return int(start)


def test_rows_continue_across_restarts(corpus):
    folder, stream = corpus
    source = data.tokens(folder / "text.txt", folder / "vocab.txt", 8, random_skip=True)

    def make(shard):
        return source.batches(4, shuffle=True, seed=5, consecutive=3, shard=shard)

    check_continuity(make, stream, 3, 8)


@pytest.mark.parametrize(
    ("split", "n_tokens"), [("train", 929_589), ("valid", 73_760), ("test", 82_430)]
)
def test_penn_treebank_has_the_published_counts(ptb, split, n_tokens):
    source = data.tokens(ptb / f"ptb.{split}.txt", ptb / "vocab.txt", 64)
    assert source.info.facts["n_tokens"] == n_tokens
    batches = source.batches(128, epochs=1, remainder="keep")
    assert sum(int(batch["token_mask"].sum()) for batch in batches) == n_tokens


def test_penn_treebank_rows_continue_across_restarts(ptb):
    # An independent reading of the text: words and an end marker per line.
    words = [line.split()[0] for line in (ptb / "vocab.txt").read_text().splitlines()]
    ids = {word: at for at, word in enumerate(words)}
    text = (ptb / "ptb.valid.txt").read_text().splitlines()
    stream = np.array([ids[word] for line in text for word in [*line.split(), "</s>"]])
    source = data.tokens(ptb / "ptb.valid.txt", ptb / "vocab.txt", 64, random_skip=True)

    def make(shard):
        return source.batches(8, shuffle=True, seed=1, consecutive=4, shard=shard)

    check_continuity(make, stream, 4, 64)
