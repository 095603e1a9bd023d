import json

import numpy as np
import pytest

from tekoa import data


def test_each_text_is_a_document_with_its_end_marker(tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("the cat\n\nthe\n")
    jsonl = tmp_path / "texts.jsonl"
    jsonl.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("the cat", " ", "the")))
    words = data.Vocabulary(["<s>", "</s>", "the", "cat"])
    for form in (lines, jsonl, [{"text": "the cat"}, {"text": "the"}]):
        source = data.documents(form, words)
        assert [example["tokens"].tolist() for example in source] == [[2, 3, 1], [2, 1]]
        facts = {"start_id": 0, "end_id": 1, "n_tokens": 5, "vocabulary": words}
        assert source.info.facts == facts
        assert source.info.n_classes == 4


def test_packed_documents_are_all_there_once(ptb):
    source = data.documents(ptb / "ptb.test.txt")
    rows = source.pack(256)
    assert rows.info.facts["padding"] < 0.005
    pieces = []
    for row in rows:
        for segment in range(1, row["segments"].max() + 1):
            tokens = row["tokens"][row["segments"] == segment]
            assert (row["positions"][row["segments"] == segment] == np.arange(len(tokens))).all()
            pieces.append(bytes(tokens.astype(np.uint8)))
    lines = [line.encode() + b"\n" for line in (ptb / "ptb.test.txt").read_text().splitlines()]
    cut = [line[at : at + 256] for line in lines for at in range(0, len(line), 256)]
    assert sorted(pieces) == sorted(cut)


def test_unusable_texts_are_refused():
    with pytest.raises(data.DataError, match="There is no text in a field 'text'"):
        data.documents({"x": np.arange(3)})
    with pytest.raises(data.DataError, match="contains no text"):
        data.documents([{"text": " "}])
    mixed = data.mix({"a": data.as_source([{"text": "a"}])})
    with pytest.raises(data.DataError, match="Use documents on the sources before"):
        data.documents(mixed)
