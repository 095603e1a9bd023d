import numpy as np
import pytest

from tekoa.data.reader import DataError
from tekoa.data.vocabulary import Vocabulary, read_vocabulary

WORDS = ["<s>", "</s>", "the", "cat"]


def test_each_line_ends_in_a_mark():
    ids = Vocabulary(WORDS).encode(b" the cat \n\nthe\n", "file")
    assert ids.tolist() == [2, 3, 1, 1, 2, 1]
    assert ids.dtype == np.int32


def test_a_last_line_without_newline_counts():
    vocabulary = Vocabulary(WORDS)
    assert (
        vocabulary.encode(b"the\ncat", "f").tolist()
        == vocabulary.encode(b"the\ncat\n", "f").tolist()
    )


def test_unknown_words_are_named_with_file_and_line():
    with pytest.raises(DataError, match=r"book\.txt, line 2: the word 'dog' is not in"):
        Vocabulary(WORDS).encode(b"the cat\nthe dog\n", "book.txt")


def test_unknown_words_have_a_number_if_the_vocabulary_says_so():
    assert Vocabulary([*WORDS, "<unk>"]).encode(b"the dog", "f").tolist() == [2, 4, 1]


def test_bad_utf8_is_named_with_file_and_line():
    with pytest.raises(DataError, match=r"book\.txt, line 2: byte 0xe9 at column 4"):
        Vocabulary([*WORDS, "<unk>"]).encode(b"the\ncaf\xe9\n", "book.txt")


def test_a_file_of_words_and_counts(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("<s> 0\n</s> 0\nthe 12\ncafé 3\nplain\n", encoding="utf-8")
    vocabulary = read_vocabulary(path)
    assert vocabulary.words == ["<s>", "</s>", "the", "café", "plain"]
    assert (vocabulary.start_id, vocabulary.end_id, len(vocabulary)) == (0, 1, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"</s> 0\nthe 1\nthe 2\n", r"line 3: the word 'the' stands in line 2 too"),
        (b"</s> 0\n\nthe 1\n", "line 2 is blank"),
        (b"the 1\n", "has no '</s>'"),
        (b"</s> 0\n\xff 1\n", "line 2: the word is no UTF-8"),
        (b"", "is empty"),
    ],
)
def test_broken_vocabularies_are_refused(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_vocabulary(path)
