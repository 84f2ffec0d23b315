"""What a load test sends: how long prompts and answers are, and when each request starts."""

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinfer.errors import CheckpointError, UsageError

# Azure's traces, and names that other tools use.
_PROMPT_COLUMNS = ("ContextTokens", "Request tokens", "prompt_tokens")
_ANSWER_COLUMNS = ("GeneratedTokens", "Response tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a prompt, and of the answer that is asked for; both at least 1."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when it starts, in seconds from the beginning, its prompt's token ids, and the answer's tokens."""

    start: float
    prompt: Sequence[int]
    answer: int


def read_trace(path: Path) -> list[Length]:
    """Lengths of a trace in its own order: a CSV file with the columns ContextTokens and GeneratedTokens.

    Lines without a prompt or an answer are left out.

    Raises:
        CheckpointError: the file cannot be read.
        UsageError: it has no such columns, a number is none, or it holds no request.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            names = lines.fieldnames or []
            prompt = next((name for name in _PROMPT_COLUMNS if name in names), None)
            answer = next((name for name in _ANSWER_COLUMNS if name in names), None)
            if prompt is None or answer is None:
                raise UsageError(
                    f"{path.name}: a trace needs the columns {_PROMPT_COLUMNS[0]} and {_ANSWER_COLUMNS[0]}"
                )
            lengths = [_length(path, number, line[prompt], line[answer]) for number, line in enumerate(lines, 2)]
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name}: not UTF-8 at byte {error.start}; convert it first") from error
    kept = [length for length in lengths if length.prompt > 0 and length.answer > 0]
    if not kept:
        raise UsageError(f"{path.name}: the trace holds no request")
    return kept


def _length(path: Path, line: int, prompt: str | None, answer: str | None) -> Length:
    try:
        return Length(int(float(prompt or "")), int(float(answer or "")))
    except (ValueError, OverflowError):
        raise UsageError(f"{path.name}, line {line}: {prompt!r} and {answer!r} are not numbers of tokens") from None


def fit(length: Length, context: int) -> Length:
    """The length cut to a context: the prompt first, down to half of it, then the answer.

    Example:
        >>> fit(Length(900, 300), 1000)
        Length(prompt=700, answer=300)
    """
    prompt = min(length.prompt, max(context - length.answer, context // 2))
    return Length(prompt, min(length.answer, context - prompt))


def plan(
    lengths: Sequence[Length], text: Sequence[int], *, rate: float = math.inf, context: int | None = None, seed: int = 0
) -> list[PlannedRequest]:
    """The requests of a load test; equal arguments give equal requests.

    Args:
        lengths: of every request, in order.
        text: token ids that prompts are cut from, repeated where one is longer; every prompt begins at a random place,
            so that few begin alike.
        rate: mean requests a second; times between starts are exponential (a Poisson process). Infinity starts all at
            once.
        context: most tokens of a prompt and its answer together; what is longer is cut.
        seed: of places and times.
    """
    if not rate > 0:
        raise UsageError(f"--request-rate {rate:g}: it must be larger than 0, or inf")
    if not text:
        raise UsageError("there is no text to cut prompts from")
    numbers = random.Random(seed)  # noqa: S311  (a repeatable load, not a secret)
    planned = []
    start = 0.0
    for wanted in lengths:
        length = wanted if context is None else fit(wanted, context)
        place = numbers.randrange(len(text))
        repeated = [*text[place:], *text[:place]]
        prompt = (repeated * -(-length.prompt // len(text)))[: length.prompt]
        planned.append(PlannedRequest(start, prompt, length.answer))
        if math.isfinite(rate):
            start += numbers.expovariate(rate)
    return planned
