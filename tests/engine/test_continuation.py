"""Text that goes on after a prompt, of a tokenizer that puts a space before every text, against tokenizers' decode."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from thinfer.core.sampling import SamplingParams
from thinfer.engine.llm import LLM
from tiny_llama import write_tiny_llama

PROMPT = "ab cd"
SEEDS = range(8)


def sentencepiece_style(size: int) -> Tokenizer:
    """Words that begin with ▁, as most tokens of Llama 2 do."""
    words = ["<s>", "</s>", "<unk>", "▁", *"abcd", "▁a", "▁c", "▁ab", "▁cd", "cd"]
    vocab = {word: i for i, word in enumerate([*words, *(f"▁w{i}" for i in range(size - len(words)))])}
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "c"), ("▁c", "d"), ("c", "d")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return tokenizer


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("continuation") / "llama")
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    theirs = sentencepiece_style(size)
    theirs.save(str(folder / "tokenizer.json"))
    with LLM(folder, executor="reference") as llm:
        assert llm.tokenizer.strips_space
        yield llm, theirs


def params(seed):
    return SamplingParams(seed=seed, max_tokens=4, ignore_eos=True)


def test_a_text_is_continued_as_their_decoder_shows_the_whole(opened):
    llm, theirs = opened
    ids = llm.encode(PROMPT)
    before = theirs.decode(ids)
    assert before == PROMPT
    spaces = 0
    for seed in SEEDS:
        result = llm.generate(PROMPT, params(seed))
        assert before + result.text == theirs.decode([*ids, *result.token_ids])
        assert "".join(chunk.text for chunk in llm.stream(PROMPT, params(seed))) == result.text
        spaces += result.text.startswith(" ")
    assert spaces > 0


def test_after_ids_and_after_nothing_the_text_stands_by_itself(opened):
    llm, theirs = opened
    for prompt in (llm.encode(PROMPT), ""):
        for seed in SEEDS:
            result = llm.generate(prompt, params(seed))
            assert result.text == theirs.decode(list(result.token_ids))


def test_a_stop_string_may_begin_with_the_space(opened):
    llm, _ = opened
    seed = next(seed for seed in SEEDS if llm.generate(PROMPT, params(seed)).text.startswith(" "))
    stop = llm.generate(PROMPT, params(seed)).text[:2]
    result = llm.generate(PROMPT, SamplingParams(seed=seed, max_tokens=4, ignore_eos=True, stop=(stop,)))
    assert (result.text, result.finish_reason) == ("", "stop")
