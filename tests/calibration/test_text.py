"""Windows of calibration text are seeded, disjoint and named by hash."""

import hashlib
import json

import pytest

from thinfer.calibration.text import cut_windows, read_documents, read_text, token_windows
from thinfer.errors import UsageError


def encode(text):
    return list(text.encode())


def test_the_built_in_text_needs_no_file():
    documents, source, digest = read_documents(None)
    assert len(documents) == 1
    assert len(documents[0]) > 100_000
    assert source == "war-and-peace-excerpt"
    assert digest == hashlib.sha256(documents[0].encode()).hexdigest()


def test_a_file_and_json_lines(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("one\ntwo")
    assert read_documents(plain)[0] == ["one\ntwo"]
    assert read_documents("the text itself")[0] == ["the text itself"]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in ("one\u2028x", "", "two")) + "\n\n")
    documents, source, digest = read_documents(lines)
    assert documents == ["one\u2028x", "two"]
    assert source == "a.jsonl"
    assert digest == hashlib.sha256(lines.read_bytes()).hexdigest()


def test_bad_files_say_where(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"content": "x"}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_documents(bad)
    bad.write_text('{"text": 3}\n')
    with pytest.raises(UsageError, match="line 1"):
        read_documents(bad)
    bad.write_text("\n")
    with pytest.raises(UsageError, match="holds no text"):
        read_documents(bad)
    with pytest.raises(UsageError, match="No such file"):
        read_documents(tmp_path / "absent.txt")
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(UsageError, match="byte 2"):
        read_documents(binary)


def test_windows_are_seeded_disjoint_and_begin_with_bos():
    text = "".join(chr(97 + i // 26 % 26) + chr(97 + i % 26) for i in range(600))
    made = token_windows(encode, text, samples=5, held_out=3, length=50, seed=3, bos_id=999)
    again = token_windows(encode, text, samples=5, held_out=3, length=50, seed=3, bos_id=999)
    other = token_windows(encode, text, samples=5, held_out=3, length=50, seed=4, bos_id=999)
    assert made == again
    assert made.windows != other.windows
    everything = [*made.windows, *made.held_out]
    assert all(len(window) == 50 and window[0] == 999 for window in everything)
    stream = text.encode()
    starts = {next(i for i in range(0, len(stream), 49) if tuple(stream[i : i + 49]) == w[1:]) for w in everything}
    assert len(starts) == 8
    assert made.tokens == 250


def test_a_short_text_says_what_is_missing():
    with pytest.raises(UsageError, match="30 tokens, 4 windows of 10 need 40"):
        token_windows(encode, "x" * 30, samples=2, held_out=2, length=10)
    with pytest.raises(UsageError, match="too short"):
        token_windows(encode, "x" * 30, length=2, bos_id=1)


def test_windows_stand_in_a_row_from_the_start():
    ids = list(range(25))
    assert cut_windows(ids, 10, None) == [ids[:10], ids[10:20]]
    assert cut_windows(ids, 5, 2, stride=2) == [ids[:5], ids[10:15]]


@pytest.mark.parametrize(
    ("ctx", "windows", "stride"), [(10, 3, 1), (26, None, 1), (10, 2, 2), (1, 1, 1), (5, 0, 1), (5, 1, 0)]
)
def test_too_short_a_text_or_a_wrong_number_is_refused(ctx, windows, stride):
    with pytest.raises(UsageError):
        cut_windows(list(range(25)), ctx, windows, stride)


def test_line_ends_are_normalised(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a\r\nb\nc\rd")
    assert read_text(str(path)) == "a\nb\nc\rd"


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(UsageError, match="byte 2"):
        read_text(str(path))
    with pytest.raises(UsageError, match="No such file"):
        read_text(str(tmp_path / "absent"))
