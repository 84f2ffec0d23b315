"""The server through the client that most programs use."""

import asyncio
import itertools
import json
from typing import Literal

import openai
import pydantic
import pytest

from thinfer import LLM, SamplingParams

USER = [{"role": "user", "content": "Tell me something."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "enum": ["Rome", "Oslo"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def llm(served_folder):
    with LLM(served_folder, executor="reference") as llm:
        yield llm


def test_a_chat_is_what_the_library_gives(client, llm):
    answer = client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=12, seed=3)
    expected = llm.chat(USER, SamplingParams(seed=3, max_tokens=12))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.id.startswith("chatcmpl-")
    assert answer.timings["predicted_n"] == len(expected.token_ids)


def test_a_stream_is_the_same_in_pieces(client, llm):
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=12, seed=3, stream=True, stream_options=options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == llm.chat(USER, SamplingParams(seed=3, max_tokens=12)).text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_have_seeds_of_their_own(client):
    def texts(**options):
        answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=8, n=3, **options)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 24
        return [choice.message.content for choice in answer.choices]

    assert texts(seed=5) == texts(seed=5)
    assert len(set(texts(seed=5))) == 3
    assert len(set(texts(temperature=0))) == 1


def test_streamed_choices_are_the_whole_ones(client):
    options = {"model": "tiny", "messages": USER, "max_tokens": 8, "n": 3, "seed": 5}
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in client.chat.completions.create(**options).choices]


def test_logprobs_of_a_chat(client):
    options = {"model": "tiny", "messages": USER, "max_tokens": 6, "temperature": 0, "logprobs": True}
    entries = client.chat.completions.create(top_logprobs=3, **options).choices[0].logprobs.content
    assert len(entries) == 6
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries), "greedy takes the likeliest"
    assert all(len(entry.top_logprobs) == 3 and len(entry.bytes) == 1 for entry in entries)
    streamed = []
    for chunk in client.chat.completions.create(stream=True, top_logprobs=3, **options):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == entries


def test_a_completion_continues_texts_and_ids(client, llm):
    greedy = SamplingParams(temperature=0, max_tokens=7)
    answer = client.completions.create(model="tiny", prompt=["Once upon", "x"], max_tokens=7, temperature=0)
    assert [choice.text for choice in answer.choices] == [llm.generate(p, greedy).text for p in ("Once upon", "x")]
    ids = llm.encode("Once upon")
    answer = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=7, temperature=0)
    assert [choice.text for choice in answer.choices] == [llm.generate(ids, greedy).text] * 2
    assert answer.usage.prompt_tokens == 2 * len(ids)


def test_a_streamed_completion(client):
    options = {"model": "tiny", "prompt": "Once", "max_tokens": 9, "seed": 1, "echo": True, "logprobs": 2}
    whole = client.completions.create(**options).choices[0]
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
    assert tokens == whole.logprobs.tokens


def test_echo_with_logprobs_scores_the_prompt(client, llm):
    """What lm-eval asks for: log-probabilities of every token of the prompt but the first."""
    ids = llm.encode("Hello there")
    (choice,) = client.completions.create(
        model="tiny", prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True
    ).choices
    expected = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1))
    values = [entry.logprob for entry in (*expected.prompt_logprobs[1:], *expected.logprobs)]
    assert choice.logprobs.token_logprobs == [None, *values]
    assert choice.logprobs.top_logprobs[0] is None
    assert all(value in top.values() for value, top in zip(values, choice.logprobs.top_logprobs[1:], strict=True)), (
        "the token itself is always there"
    )
    assert choice.text.startswith("Hello there")
    offsets = choice.logprobs.text_offset[1:12]
    assert [choice.text[a:b] for a, b in itertools.pairwise(offsets)] == list("Hello ther")


def test_echo_alone_generates_nothing(client):
    answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=0, logprobs=0, echo=True)
    assert answer.choices[0].text == "Hi"
    assert answer.choices[0].logprobs.tokens == ["<s>", "H", "i"]
    assert answer.usage.completion_tokens == 0


def test_stop_ends_the_text(client):
    options = {"model": "tiny", "prompt": "Once", "max_tokens": 20, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    choice = client.completions.create(stop=[text[4:6]], **options).choices[0]
    assert choice.text == text[: text.index(text[4:6])]
    assert choice.finish_reason == "stop"


class Verdict(pydantic.BaseModel):
    """What the answer shall be."""

    mood: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


def test_an_answer_of_a_schema(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Verdict, max_tokens=200, seed=1, temperature=1
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_that_is_any_object(client, llm):
    # The tiny model would go on for ever: what ends strings and objects is made likely.
    bias = {str(llm.tokenizer.token_id(char)): 100.0 for char in '}"'}
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        response_format={"type": "json_object"},
        max_tokens=400,
        seed=1,
        logit_bias=bias,
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(client, choice, stream):
    options = {
        "model": "tiny",
        "messages": USER,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 300,
        "seed": 2,
    }
    if stream:
        name, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(stream=True, **options):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        answer = client.chat.completions.create(**options).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.message.content is None
        assert call.id.startswith("call_")
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "days"}
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert reason == "tool_calls"


def test_tools_reach_the_template_and_results_come_back(client):
    def length(**further):
        return client.chat.completions.create(model="tiny", max_tokens=1, **further).usage.prompt_tokens

    plain = length(messages=USER)
    assert length(messages=USER, tools=[WEATHER, CLOCK]) > plain + 100
    assert length(messages=USER, tools=[WEATHER], tool_choice="none") == plain
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    conversation = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert length(messages=conversation, tools=[WEATHER]) > length(messages=USER, tools=[WEATHER])


def test_what_clients_read_can_be_sent_back(client):
    """Parsed messages, and calls put together from a stream, carry fields of the clients' own."""
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Verdict, max_tokens=200, seed=1, temperature=1
    )
    call = {"index": 0, "id": "call_1", "type": "function"}
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}', "parsed_arguments": {"city": "Oslo"}}
    without = {"name": "get_weather", "arguments": ""}
    messages = [*USER, answer.choices[0].message, *USER]
    for each in (function, without):
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call | {"function": each}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
    options = {"include_usage": True, "include_obfuscation": False}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, stream=True, stream_options=options
        )
    )
    assert chunks[-1].usage.completion_tokens == 1


def test_the_last_message_is_continued(client, llm):
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, extra_body={"continue_final_message": True}
    )
    template = llm.chat_template
    ids = template.encode(messages, add_generation_prompt=False)
    end = llm.tokenizer.token_id("</s>")
    assert ids[-1] == end
    assert answer.choices[0].message.content == llm.generate(ids[:-1], SamplingParams(temperature=0, max_tokens=6)).text


def test_vllms_fields(client, llm):
    body = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 4}
    answer = client.completions.create(
        model="tiny", prompt="Once", max_tokens=6, seed=9, frequency_penalty=0.5, presence_penalty=0.5, extra_body=body
    )
    params = SamplingParams(seed=9, max_tokens=6, frequency_penalty=0.5, presence_penalty=0.5, **body)
    assert answer.choices[0].text == llm.generate("Once", params).text


def test_many_at_once_through_the_async_client(server, llm):
    prompts = [f"Story {i}: " + "x" * (7 * i) for i in range(12)]

    async def ask(client, prompt, stream):
        options = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "seed": 4}
        if not stream:
            return (await client.completions.create(**options)).choices[0].text
        return "".join([c.choices[0].text async for c in await client.completions.create(stream=True, **options)])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))

    params = SamplingParams(seed=4, max_tokens=16)
    assert asyncio.run(all_of_them()) == [llm.generate(prompt, params).text for prompt in prompts]


def test_failures_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="no model named"):
        client.chat.completions.create(model="gpt-4o", messages=USER)
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        client.completions.create(model="tiny", prompt="x" * 2000)
    assert "2001 tokens" in caught.value.message
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(model="tiny", messages=USER, top_logprobs=2)


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "thinfer"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
