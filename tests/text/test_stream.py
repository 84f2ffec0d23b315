from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from text.conftest import TEXTS, byte_level_keys, sentencepiece_keys, train_byte_level, write_gguf
from thinfer.errors import UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.text.stream import StopMatcher, StreamDecoder
from thinfer.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["bpe", "spm"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sentencepiece_model: bytes
) -> Tokenizer:
    keys = (
        byte_level_keys(train_byte_level("llama-bpe"), "llama-bpe")
        if request.param == "bpe"
        else sentencepiece_keys(sentencepiece_model)
    )
    path: Path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    return Tokenizer.from_checkpoint(open_checkpoint(write_gguf(path, keys)))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 610), max_size=30), skip=st.booleans(), continuation=st.booleans())
def test_pieces_joined_are_the_decoded_text(
    tokenizer: Tokenizer, ids: list[int], skip: bool, continuation: bool
) -> None:
    decoder = StreamDecoder(tokenizer, skip, continuation)
    pieces = [*map(decoder.push, ids), decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip, continuation)


@pytest.mark.parametrize("text", [t for t in TEXTS if t])
def test_no_character_is_split_or_repeated(tokenizer: Tokenizer, text: str) -> None:
    decoder = StreamDecoder(tokenizer)
    shown = ""
    for i in tokenizer.encode(text):
        piece = decoder.push(i)
        assert "\ufffd" not in piece
        shown += piece
        assert text.startswith(shown)
    assert shown + decoder.finish() == text


def test_an_incomplete_character_is_held_until_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🧬", add_special=False)
    assert len(ids) > 2
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert decoder.finish() == "\ufffd"


def cuts(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=15),
)
def test_stop_strings_wherever_the_text_is_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    ends = {(text.index(s) + len(s), text.index(s)) for s in stops if s in text}
    expected = text[: min(ends)[1]] if ends else text
    matcher = StopMatcher(stops)
    shown = ""
    for piece in cuts(text, sizes):
        shown += matcher.push(piece)
        assert expected.startswith(shown)
    assert (matcher.stopped is not None) is bool(ends)
    assert shown + matcher.finish() == expected


def test_nothing_is_held_without_need() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(c) for c in "a ST b"] == ["a", " ", "", "", "ST ", "b"]
    assert StopMatcher([]).push("anything") == "anything"
    with pytest.raises(UsageError, match="must not be empty"):
        StopMatcher(["ok", ""])
