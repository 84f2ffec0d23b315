"""Ways to corrupt a file: flipped, cut, inserted, repeated and absurd bytes."""

import struct
from collections.abc import Callable

from hypothesis import strategies as st

Mutation = Callable[[bytes], bytes]

_ABSURD = [0, 1, 255, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1]


def mutations(hot: int) -> st.SearchStrategy[Mutation]:
    """One to four corruptions; most of them fall on the first ``hot`` bytes, where the header is."""
    place = st.one_of(st.integers(0, hot), st.integers(0, hot), st.integers(0, 1 << 20))

    def flip(at: int, bit: int) -> Mutation:
        return lambda data: (
            data[: at % len(data)] + bytes([data[at % len(data)] ^ 1 << bit]) + data[at % len(data) + 1 :]
        )

    def cut(at: int) -> Mutation:
        return lambda data: data[: 1 + at % len(data)]

    def remove(at: int, count: int) -> Mutation:
        return lambda data: data[: 1 + at % len(data)] + data[1 + at % len(data) + count :]

    def insert(at: int, piece: bytes) -> Mutation:
        return lambda data: data[: 1 + at % len(data)] + piece + data[1 + at % len(data) :]

    def number(at: int, value: int, form: str) -> Mutation:
        packed = struct.pack(form, value & ((1 << (32 if form == "<I" else 64)) - 1))
        return lambda data: data[: 1 + at % len(data)] + packed + data[1 + at % len(data) + len(packed) :]

    single = st.one_of(
        st.builds(flip, place, st.integers(0, 7)),
        st.builds(cut, place),
        st.builds(remove, place, st.integers(1, 64)),
        st.builds(insert, place, st.binary(min_size=1, max_size=32)),
        st.builds(number, place, st.sampled_from(_ABSURD), st.sampled_from(["<I", "<Q"])),
    )

    def chain(steps: list[Mutation]) -> Mutation:
        def apply(data: bytes) -> bytes:
            for step in steps:
                data = step(data)
            return data

        return apply

    return st.lists(single, min_size=1, max_size=4).map(chain)
