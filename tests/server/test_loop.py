"""The engine thread: requests in, chunks out, failures that end one or all, and an end that leaves nothing behind."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from thinfer import LLM, SamplingParams
from thinfer.errors import CheckFailed, UsageError
from thinfer.server.failures import ApiError
from thinfer.server.loop import EngineLoop, Prompt

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(served_folder):
    with LLM(served_folder, executor="reference", max_sequences=4) as llm:
        yield llm


@asynccontextmanager
async def running(llm, **options):
    loop = EngineLoop(llm, **options)
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()
    assert llm.engine.pool.num_free == llm.engine.pool.layout.num_blocks


async def text(ticket):
    await ticket.admitted()
    chunks = []
    while new := await ticket.take():
        chunks += [chunk for _, chunk in new]
    if chunks[-1].error is not None:
        raise chunks[-1].error
    return "".join(chunk.text for chunk in chunks)


def test_many_tickets_get_what_each_would_alone(llm):
    async def main():
        async with running(llm) as loop:
            tickets = loop.submit([Prompt(llm.encode("x" * n), GREEDY) for n in range(9)])
            return await asyncio.gather(*map(text, tickets))

    assert asyncio.run(main()) == [llm.generate(llm.encode("x" * n), GREEDY).text for n in range(9)]


def test_what_the_scheduler_refuses_is_raised_at_the_ticket(llm):
    async def main():
        async with running(llm) as loop:
            good, bad = loop.submit([Prompt([1, 2], GREEDY), Prompt([1, 10**6], GREEDY)])
            with pytest.raises(UsageError, match="outside the vocabulary"):
                await bad.admitted()
            assert await bad.take() == []
            assert await text(good)
            assert loop.num_open == 0

    asyncio.run(main())


def test_the_queue_is_bounded_and_all_or_none(llm):
    async def main():
        async with running(llm, max_waiting=2) as loop:
            tickets = loop.submit([Prompt([1], LONG)] * 5)
            with pytest.raises(ApiError) as caught:
                loop.submit([Prompt([1], GREEDY)] * 2)
            assert caught.value.status == 429
            assert loop.num_open == 5
            for ticket in tickets:
                ticket.cancel()
            await asyncio.gather(*map(text, tickets))
            assert loop.num_open == 0
            assert await text(loop.submit([Prompt([1], GREEDY)])[0])

    asyncio.run(main())


def test_a_request_that_fails_ends_alone(llm):
    class Broken:
        def mask(self):
            raise CheckFailed("broken")

        def accept(self, token):
            raise AssertionError

    async def main():
        async with running(llm) as loop:
            bad = SamplingParams(temperature=0, max_tokens=5, allowed=Broken)
            failing, going = loop.submit([Prompt([1, 2], bad), Prompt([1, 2], GREEDY)])
            with pytest.raises(CheckFailed, match="broken"):
                await text(failing)
            return await text(going)

    assert asyncio.run(main()) == llm.generate([1, 2], GREEDY).text


def test_a_step_that_fails_ends_all_and_the_next_request_runs(llm, monkeypatch):
    async def main():
        async with running(llm) as loop:
            step, calls = llm.engine.step, []

            def broken(*arguments, **options):
                calls.append(1)
                if len(calls) == 3:
                    raise MemoryError("no more")
                return step(*arguments, **options)

            monkeypatch.setattr(llm.engine, "step", broken)
            results = await asyncio.gather(*map(text, loop.submit([Prompt([1], LONG)] * 2)), return_exceptions=True)
            assert [type(result) for result in results] == [MemoryError, MemoryError]
            return await text(loop.submit([Prompt([1, 2], GREEDY)])[0])

    assert asyncio.run(main()) == llm.generate([1, 2], GREEDY).text


def test_watchers_see_every_step_and_one_that_fails_is_dropped(llm):
    seen, failed = [], []

    def broken(chunks):
        failed.append(1)
        raise ValueError

    async def main():
        async with running(llm) as loop:
            remove = loop.watch(lambda chunks: seen.extend(chunk.token_ids for _, chunk in chunks))
            loop.watch(broken)
            await text(loop.submit([Prompt([1], GREEDY)])[0])
            remove()
            await text(loop.submit([Prompt([1], GREEDY)])[0])
            return loop.facts

    facts = asyncio.run(main())
    assert len(seen) == 12
    assert len(failed) == 1
    assert facts.bytes_per_token > 0


def test_the_end_cancels_what_runs(llm):
    async def main():
        async with running(llm) as loop:
            (ticket,) = loop.submit([Prompt([1], LONG)])
            await ticket.take()
            await loop.stop()
            chunks = []
            while new := await ticket.take():
                chunks += [chunk for _, chunk in new]
            assert chunks[-1].finish_reason == "cancelled"

    asyncio.run(main())


def test_what_is_not_streamed_comes_with_the_last_and_has_its_times(llm):
    async def main():
        async with running(llm) as loop:
            (ticket,) = loop.submit([Prompt([1, 2], GREEDY)], streamed=False)
            pieces = []
            while new := await ticket.take():
                pieces.append(new)
            return pieces

    pieces = asyncio.run(main())
    # The first token may come with the news that the request was taken.
    assert len(pieces) <= 2
    whole = [timed for piece in pieces for timed in piece]
    assert sum(len(chunk.token_ids) for _, chunk in whole) == GREEDY.max_tokens
    times = [at for at, _ in whole]
    assert times == sorted(times)
    assert len(set(times)) > 1


def test_the_first_token_of_a_stream_is_not_held_and_quick_ones_come_together(llm):
    async def main():
        async with running(llm) as loop:
            (ticket,) = loop.submit([Prompt([1, 2], LONG)])
            first = await ticket.take()
            wakes, tokens, begun = 0, 0, time.perf_counter()
            while new := await ticket.take():
                wakes += 1
                tokens += sum(len(chunk.token_ids) for _, chunk in new)
                if new[-1][1].finish_reason is not None:
                    break
            return first, wakes, tokens, time.perf_counter() - begun

    first, wakes, tokens, seconds = asyncio.run(main())
    assert sum(len(chunk.token_ids) for _, chunk in first) == 1
    # One wake-up each 8 ms at most, and two for how it ends; the tiny model makes a token much faster.
    assert wakes <= seconds / 0.008 * 2 + 2
    assert wakes < tokens
