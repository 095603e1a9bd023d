import types

import numpy as np
import pytest

from tekoa import data
from tekoa.data.readers.base import DataError
from tekoa.data.text.vocabulary import Bytes, Vocabulary, read_vocabulary

WORDS = ["<s>", "</s>", "the", "cat"]


def test_each_line_ends_with_an_end_marker():
    ids = Vocabulary(WORDS).encode(b" the cat \n\nthe\n", "file")
    assert ids.tolist() == [2, 3, 1, 1, 2, 1]
    assert ids.dtype == np.int32


def test_last_line_without_newline_counts():
    vocabulary = Vocabulary(WORDS)
    assert (
        vocabulary.encode(b"the\ncat", "f").tolist()
        == vocabulary.encode(b"the\ncat\n", "f").tolist()
    )


def test_unknown_words_are_named_with_file_and_line():
    with pytest.raises(DataError, match=r"book\.txt, line 2: the word 'dog' is not in"):
        Vocabulary(WORDS).encode(b"the cat\nthe dog\n", "book.txt")


def test_unknown_words_map_to_unk():
    assert Vocabulary([*WORDS, "<unk>"]).encode(b"the dog", "f").tolist() == [2, 4, 1]


def test_bad_utf8_is_named_with_file_and_line():
    with pytest.raises(DataError, match=r"book\.txt, line 2: byte 0xe9 at column 4"):
        Vocabulary([*WORDS, "<unk>"]).encode(b"the\ncaf\xe9\n", "book.txt")


def test_vocabulary_file_of_words_and_counts(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("<s> 0\n</s> 0\nthe 12\ncafé 3\nplain\n", encoding="utf-8")
    vocabulary = read_vocabulary(path)
    assert vocabulary.words == ["<s>", "</s>", "the", "café", "plain"]
    assert (vocabulary.start_id, vocabulary.end_id, len(vocabulary)) == (0, 1, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"</s> 0\nthe 1\nthe 2\n", r"line 3: the word 'the' is already on line 2"),
        (b"</s> 0\n\nthe 1\n", "line 2 is blank"),
        (b"the 1\n", "has no '</s>'"),
        (b"</s> 0\n\xff 1\n", "line 2: byte 0xff at column 1 is not UTF-8"),
        (b"", "is empty"),
    ],
)
def test_invalid_vocabulary_file_raises(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_vocabulary(path)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", []), ("the cat", [2, 3]), ("the\ncat", [2, 1, 3]), ("the\n", [2, 1]), ("\n", [1])],
)
def test_a_prompt_has_no_end_marker_after_its_last_line(text, ids):
    vocabulary = Vocabulary(WORDS)
    assert vocabulary.encode_prompt(text).tolist() == ids
    assert vocabulary.decode(ids) == text


def test_bytes_of_a_prompt_are_those_of_its_text():
    assert Bytes().encode_prompt("é\n").tolist() == [0xC3, 0xA9, 10]
    assert Bytes().decode([0xC3, 0xA9, 10]) == "é\n"
    # A model may write what is not text.
    assert Bytes().decode([0xC3, 97, 300]) == "\ufffda\ufffd"


@pytest.fixture
def tokenizer_json(tmp_path):
    """A byte-pair tokenizer, trained here."""
    tokenizers = pytest.importorskip("tokenizers", reason="the 'tokenizers' extra is not installed")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=special)
    tokenizer.train_from_iterator(["low lower lowest", "new newer newest"] * 4, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path, tokenizer


def test_a_trained_tokenizer_is_a_vocabulary(tokenizer_json, tmp_path):
    path, tokenizer = tokenizer_json
    text = tmp_path / "text.txt"
    text.write_text("lowest new\nnewer lows\n")
    source = data.tokens(text, path, 16)
    expected = [*tokenizer.encode("lowest new").ids, 2, *tokenizer.encode("newer lows").ids, 2]
    assert source[0]["tokens"][: len(expected)].tolist() == expected
    assert source.info.n_classes == tokenizer.get_vocab_size()
    facts = dict(source.info.facts)
    vocabulary = facts.pop("vocabulary")
    assert facts == {"start_id": 1, "end_id": 2, "n_tokens": len(expected)}
    prompt = vocabulary.encode_prompt("lowest new\nnewer")
    assert prompt.tolist() == [*expected[: expected.index(2) + 1], *tokenizer.encode("newer").ids]
    decoded = [tokenizer.decode(tokenizer.encode(line).ids) for line in ("lowest new", "newer")]
    assert vocabulary.decode(prompt.tolist()) == "\n".join(decoded)


def test_a_tokenizer_need_not_be_saved(tokenizer_json):
    path, tokenizer = tokenizer_json
    texts = [{"text": "lowest new"}, {"text": "newer"}]
    fast = types.SimpleNamespace(backend_tokenizer=tokenizer)  # As in `transformers`.
    expected = [row["tokens"].tolist() for row in data.documents(texts, path)]
    for vocab in (tokenizer, fast):
        source = data.documents(texts, vocab)
        assert [source[i]["tokens"].tolist() for i in range(2)] == expected
    with pytest.raises(DataError, match="The list is neither a vocabulary nor a tokenizer"):
        data.documents(texts, ["a", "b"])


def test_a_tokenizer_that_cannot_be_used_is_named(tokenizer_json, tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"other\.json is not the tokenizer\.json"):
        read_vocabulary(path)
    path.write_text(tokenizer_json[0].read_text().replace("</s>", "stop"))
    with pytest.raises(DataError, match=r"no token that marks the end of a text"):
        read_vocabulary(path)
