"""LLM: text in and out, alone and together, streamed and cancelled."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thinfer.core.artifact import Artifact
from thinfer.core.sampling import SamplingParams
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.llm import LLM, sampling_defaults
from thinfer.errors import ArtifactError, CheckpointError, ResourceError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.text.stream import StreamDecoder
from tiny_llama import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "The quick brown fox jumps over the lazy dog. " * 3, "x", "Grüße, 世界"]


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(tiny_folder, executor="reference") as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SEEDED, replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.5)])
def test_many_prompts_together_equal_each_alone(llm, params):
    alone = [llm.generate(prompt, params) for prompt in PROMPTS]
    together = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.text for o in together] == [o.text for o in alone]
    assert all(len(o.token_ids) == 24 and o.finish_reason == "length" for o in together)
    assert llm.engine.pool.num_free == llm.engine.pool.layout.num_blocks


def test_little_room_only_makes_prompts_wait(llm, tiny_folder):
    with LLM(tiny_folder, executor="reference", chunk=7, kv_tokens=192, max_sequences=2) as small:
        expected = [o.token_ids for o in llm.generate(PROMPTS, SEEDED)]
        assert [o.token_ids for o in small.generate(PROMPTS, SEEDED)] == expected


def test_token_ids_are_a_prompt_too(llm):
    ids = llm.encode(PROMPTS[0])
    assert llm.generate(ids, GREEDY).token_ids == llm.generate(PROMPTS[0], GREEDY).token_ids
    assert llm.generate([ids, ids], [GREEDY, SEEDED])[1].token_ids == llm.generate(ids, SEEDED).token_ids


def test_a_stream_is_the_text_in_pieces(llm):
    whole = llm.generate(PROMPTS[1], SEEDED)
    chunks = list(llm.stream(PROMPTS[1], SEEDED))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].timings.decode_tokens == 23
    assert chunks[-1].timings.prompt_tokens == len(llm.encode(PROMPTS[1]))


def test_two_streams_may_interleave(llm):
    first, second = llm.stream(PROMPTS[0], SEEDED), llm.stream(PROMPTS[1], SEEDED)
    pairs = list(zip(first, second, strict=True))
    for side, prompt in enumerate(PROMPTS[:2]):
        assert "".join(pair[side].text for pair in pairs) == llm.generate(prompt, SEEDED).text


def test_a_closed_stream_frees_its_blocks(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert llm.engine.pool.num_free < llm.engine.pool.layout.num_blocks
    stream.close()
    assert llm.engine.pool.num_free == llm.engine.pool.layout.num_blocks


def test_stop_strings_end_before_themselves(llm):
    plain = llm.generate(PROMPTS[0], GREEDY)
    stop = plain.text[5:8]
    stopped = llm.generate(PROMPTS[0], replace(GREEDY, stop=(stop,)))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    chunks = list(llm.stream(PROMPTS[0], replace(GREEDY, stop=(stop,))))
    assert "".join(chunk.text for chunk in chunks) == stopped.text


def test_an_end_token_stops_unless_ignored(llm, monkeypatch):
    plain = llm.generate(PROMPTS[0], GREEDY)
    token = plain.token_ids[3]
    first = plain.token_ids.index(token)
    monkeypatch.setattr(LLM, "eos_ids", frozenset({token}))
    stopped = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=False))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.text == llm.tokenizer.decode(plain.token_ids[:first])
    longer = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=False, min_tokens=20))
    assert token not in longer.token_ids[:20]


def test_cancel_ends_with_what_there_is(llm):
    flag = threading.Event()
    chunks = []
    for chunk in llm.stream(PROMPTS[0], GREEDY, cancel=flag):
        chunks.append(chunk)
        if len(chunks) == 3:
            flag.set()
    assert chunks[-1].finish_reason == "cancelled"
    assert len(chunks) == 4
    outputs = llm.generate(PROMPTS, GREEDY, cancel=lambda: True)
    assert [output.finish_reason for output in outputs] == ["cancelled"] * 4
    assert llm.engine.pool.num_free == llm.engine.pool.layout.num_blocks


def test_prompts_are_never_cut(llm):
    with pytest.raises(ResourceError, match="the prompt has 601 tokens and the context 512"):
        llm.generate("y" * 600, GREEDY)
    long = llm.generate("y" * 500, replace(GREEDY, max_tokens=50))
    assert len(long.token_ids) == 11
    assert long.finish_reason == "length"


def test_a_request_larger_than_the_pool_names_the_option(tiny_folder):
    small = LLM(tiny_folder, executor="reference", kv_tokens=64)
    with small, pytest.raises(ResourceError, match="kv_tokens to at least 128"):
        small.generate("y" * 60, GREEDY)


def test_blocks_held_by_a_paused_stream_are_an_error_not_a_hang(tiny_folder):
    with LLM(tiny_folder, executor="reference", kv_tokens=64) as small:
        stream = small.stream("abc", GREEDY)
        next(stream)
        with pytest.raises(ResourceError, match="kv_tokens"):
            small.generate("abc", GREEDY)
        stream.close()
        assert small.generate("abc", GREEDY).finish_reason == "length"


def test_the_drawn_seed_is_reported_and_repeats_the_text(llm):
    first = llm.generate(PROMPTS[0], replace(SEEDED, seed=None))
    assert llm.generate(PROMPTS[0], replace(SEEDED, seed=first.seed)).text == first.text


def test_counts_of_prompts_and_parameters_must_agree(llm):
    with pytest.raises(UsageError, match="2 sampling parameters for 1"):
        llm.generate(["a"], [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []


def test_threads_may_share_a_model(tiny_folder):
    with LLM(tiny_folder) as llm:
        alone = [llm.generate(prompt, SEEDED).token_ids for prompt in PROMPTS]
        got = {}

        def work(index):
            got[index] = [llm.generate(PROMPTS[index], SEEDED).token_ids for _ in range(4)]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {index: [ids] * 4 for index, ids in enumerate(alone)}
        assert llm.engine.pool.num_free == llm.engine.pool.layout.num_blocks


@pytest.mark.parametrize("executor", ["auto", "reference"])
def test_a_closed_model_says_so(tiny_folder, executor):
    llm = LLM(tiny_folder, executor=executor)
    stream = llm.stream("abc", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for ask in (lambda: next(stream), lambda: llm.generate("abc", GREEDY), llm.describe, llm.engine.usage):
        with pytest.raises(UsageError, match="closed"):
            ask()


@pytest.mark.parametrize("prompt", [None, 5, b"abc", [1.5], [None], ["a", None], {"a": 1}, "\ud800"], ids=repr)
def test_what_is_no_prompt_is_refused(llm, prompt):
    with pytest.raises(UsageError, match=r"prompt|Unicode"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("params", ["greedy", 5, {"temperature": 0}, [None]], ids=repr)
def test_what_are_no_parameters_are_refused(llm, params):
    for ask in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match="SamplingParams"):
            ask("abc", params)


def test_ids_of_numpy_are_a_prompt(llm):
    ids = llm.encode("abc")
    assert llm.generate(np.array(ids), GREEDY).token_ids == llm.generate(ids, GREEDY).token_ids


def test_a_failing_sink_frees_its_blocks(llm, monkeypatch):
    def fail(*_):
        raise RuntimeError("sink")

    monkeypatch.setattr(StreamDecoder, "push", fail)
    monkeypatch.setattr(StreamDecoder, "finish", fail)
    with pytest.raises(RuntimeError, match="sink"):
        llm.generate("abc", GREEDY)
    assert llm.engine.pool.num_free == llm.engine.pool.layout.num_blocks


def test_chat_renders_the_model_s_template(llm):
    messages = [{"role": "user", "content": "Hi <|assistant|>"}]
    ids = llm.chat_prompt(messages)
    special = [i for i in ids if i >= 256]
    # begin, user, end, assistant: what the user wrote is no control token.
    assert special == [256, 258, 257, 259]
    assert llm.chat(messages, GREEDY).token_ids == llm.generate(ids, GREEDY).token_ids


def test_unknown_options_are_refused(tiny_folder):
    with pytest.raises(UsageError, match="unknown option thread"):
        LLM(tiny_folder, thread=2)


def test_generation_config_comes_before_neutral_defaults(tmp_path):
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [5, 257]}
    folder = write_tiny_llama(tmp_path / "m", generation=generation)
    with LLM(folder, executor="reference") as llm:
        assert llm.default_params == SamplingParams(temperature=0.7, top_k=20)
        assert llm.eos_ids == {5, 257}
    assert sampling_defaults({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert sampling_defaults({}) == SamplingParams()
    with pytest.raises(CheckpointError, match="top_p"):
        sampling_defaults({"top_p": "high"})
    with pytest.raises(CheckpointError, match="top_k must be"):
        sampling_defaults({"top_k": 1.5})


def save_thresholds(folder, model, base, fingerprint=None):
    checkpoint = open_checkpoint(model)
    selector = ThresholdSelector("teal", {"layers.0.qkv": 0.5, "layers.1.down": 0.4})
    section, tensors = selector.to_section()
    Artifact(base, fingerprint or checkpoint.fingerprint(), {"selector": section}, tensors).save(folder)
    checkpoint.close()


def test_thresholds_are_found_in_a_thinfer_folder_and_can_be_left_out(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    save_thresholds(tmp_path / "sparse", model, str(model))
    with LLM(tmp_path / "sparse", executor="reference") as llm, LLM(model, executor="reference") as dense:
        assert llm.engine.selector.thresholds["layers.0.qkv"] == 0.5
        assert dense.engine.selector is None
        sparse_ids = llm.generate(PROMPTS[0], GREEDY).token_ids
        # The first token comes from the dense prompt, later ones from sparse decode steps.
        assert sparse_ids[0] == dense.generate(PROMPTS[0], GREEDY).token_ids[0]
        assert sparse_ids != dense.generate(PROMPTS[0], GREEDY).token_ids
        together = llm.generate(PROMPTS, SEEDED)
        assert [o.token_ids for o in together] == [llm.generate(p, SEEDED).token_ids for p in PROMPTS]
        llm.engine.selector = None
        assert llm.generate(PROMPTS[0], GREEDY).token_ids == dense.generate(PROMPTS[0], GREEDY).token_ids
    with LLM(tmp_path / "sparse", executor="reference", sparsity=False) as llm:
        assert llm.engine.selector is None
        assert any("sparsity is off" in line for line in llm.describe())


def test_thresholds_beside_the_model_are_found(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    save_thresholds(model, model, ".")
    with LLM(model, executor="reference") as llm:
        assert llm.engine.selector is not None


def test_thresholds_for_other_weights_are_refused(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    save_thresholds(tmp_path / "sparse", model, "../model")
    write_tiny_llama(tmp_path / "model", seed=1)
    with pytest.raises(ArtifactError, match="stale"):
        LLM(tmp_path / "sparse", executor="reference")
    document = json.loads((tmp_path / "sparse" / "thinfer.json").read_text())
    assert document["base"] == "../model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 10**12}, "chunk is 1000000000000; it must be at most"),
        ({"kv_tokens": 10**12}, "kv_tokens is"),
        ({"isa": 5}, "isa is 5"),
        ({"threads": "x"}, "threads is 'x'"),
        ({"sparsity": 0.4}, "sparsity is 0.4"),
        ({"weights": ["q8"]}, "weights is"),
        ({"chat_template": 5}, "chat_template must be"),
    ],
    ids=str,
)
def test_options_of_a_wrong_kind_are_usage_errors(tiny_folder, options, message):
    with pytest.raises(UsageError, match=message):
        LLM(tiny_folder, **options)


@pytest.mark.parametrize("model", [None, 5, "", " "])
def test_what_names_no_model_is_a_usage_error(model):
    with pytest.raises(UsageError, match="a model is a path or a hub id"):
        LLM(model)


def test_calls_of_a_wrong_kind_are_usage_errors(llm):
    for messages in (None, 5, "Hello", {"role": "user"}):
        with pytest.raises(UsageError, match="a chat is a list of messages"):
            llm.chat_prompt(messages)
    for prompt in (None, 5):
        with pytest.raises(UsageError, match="a prompt is text or"):
            llm.generate(prompt)
    with pytest.raises(UsageError, match="cancel must be"):
        llm.generate("x", GREEDY, cancel=5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e5])
def test_weights_that_cannot_be_requantised_are_named(tmp_path, value):
    pytest.importorskip("thinfer._core")
    folder = write_tiny_llama(tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    for weights in ("q8", "q4", "f16"):
        with pytest.raises(CheckpointError, match=f"{name} has NaN, infinity .* row 3, which weights {weights}"):
            LLM(folder, executor="cpu", weights=weights)
    LLM(folder, executor="cpu").close()
