"""The lists of a completion's log-probabilities: places in its text, and numbers that JSON has."""

import math

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.serving import running_server
from thinfer.core.request import TokenLogprob
from thinfer.server.logprobs import TextLogprobs, chat_logprobs
from thinfer.server.sse import to_json
from thinfer.text.tokenizer import Tokenizer as Ours
from tiny_llama import SPECIAL, write_tiny_llama


def sentencepiece():
    vocab = {"<s>": 0, "\u2581Hi": 1, "\u2581there": 2, "!": 3, "</s>": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return Ours(backend, bos_id=0, eos_ids=[4])


def offsets(ids, prompt=""):
    return TextLogprobs(sentencepiece(), prompt).add(ids, [None] * len(ids))["text_offset"]


def test_the_space_that_sentencepiece_puts_before_a_text_is_not_in_it():
    assert offsets([0, 1, 2, 3], "Hi there") == [0, 0, 2, 8]
    assert offsets([1, 2, 3]) == [0, 3, 9], "what goes on with a prompt keeps its space"


def test_what_follows_token_ids_keeps_its_space(tmp_path):
    folder = write_tiny_llama(tmp_path / "llama")
    words = Tokenizer(models.BPE(vocab={f"\u2581w{i}": i for i in range(256)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    words.save(str(folder / "tokenizer.json"))
    body = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "seed": 1, "logprobs": 0}
    with running_server(folder) as url:
        alone, echoed = (
            httpx.post(url + "/v1/completions", json=body | {"echo": echo}).json()["choices"][0]
            for echo in (False, True)
        )
    assert alone["text"] == "".join(alone["logprobs"]["tokens"])
    assert alone["text"].startswith(" w")
    assert echoed["text"] == "w1 w2" + alone["text"]


def test_control_tokens_count_where_the_text_spells_them_alone():
    assert offsets([0, 1, 4, 2], "Hi</s> there") == [0, 0, 2, 6]
    assert offsets([0, 0, 1], "<s>Hi") == [0, 3, 3]
    assert offsets([0, 1, 4], "Hi") == [0, 0, 2]


def test_impossible_tokens_are_numbers_too():
    entry = TokenLogprob(1, -math.inf, ((2, -0.5), (3, -math.inf)))
    text = TextLogprobs(sentencepiece()).add([1], [entry])
    assert text["token_logprobs"] == [-9999.0]
    chat = chat_logprobs(sentencepiece(), [entry])
    assert chat["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    assert to_json([text, chat])
