"""A thinfer model as lm-eval wants it: log-likelihoods of continuations.

Requests that share a beginning are scored together: the shared tokens run once, and every continuation then runs from
there, in place of the one before it. Several such groups run in one step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import TemplateLM
from numpy.typing import NDArray

from thinfer.engine.runtime import Work
from thinfer.errors import CheckFailed, ResourceError, UnsupportedError

if TYPE_CHECKING:
    from thinfer.engine.kv_cache import Sequence as KvSequence
    from thinfer.engine.llm import LLM

Float32 = NDArray[np.float32]

# Groups of one step: enough rows for whole batches, few enough to keep keys and values in the cache.
_WAVE = 16


@dataclass(frozen=True, slots=True)
class _Request:
    """Tokens to run (the last is not: nothing follows it) and how many of them at the end are scored."""

    index: int
    tokens: tuple[int, ...]
    scored: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests that begin with the same ``shared`` tokens, none of which is scored."""

    requests: tuple[_Request, ...]
    shared: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(len(request.tokens) for request in self.requests)


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A loaded model for lm-eval's evaluator; it scores, it does not generate.

    BOS goes before every text if the model's metadata says so. Requests longer than the context lose their beginning;
    `truncated` counts them.

    Example:
        >>> lm = EngineLM(LLM("model.gguf"))  # doctest: +SKIP
        >>> lm_eval.simple_evaluate(lm, tasks=["piqa"], limit=100)  # doctest: +SKIP
    """

    def __init__(self, llm: "LLM", *, decode: bool = False, progress: Callable[[str], None] = lambda _: None) -> None:
        """Wrap a model.

        Args:
            llm: The model; the caller closes it.
            decode: Let the model's thresholds act on every row as they do in decode.
            progress: Told how many requests are done.
        """
        super().__init__()
        self._llm = llm
        self._progress = progress
        engine = llm.engine
        self._sparse = decode or (engine.selector is not None and engine.selector.prefill)
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; UnsupportedError when the model has none."""
        ends = self._llm.tokenizer.eos_ids or tuple(sorted(self._llm.eos_ids))
        if not ends:
            raise UnsupportedError("the model has no end-of-text token, so a text cannot be scored by itself")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: BOS, or the token that ends a text."""
        bos = self._llm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, in which control tokens are never spelled, after BOS if the model wants it."""
        tokenizer = self._llm.tokenizer
        ids = tokenizer.encode(string, add_special=False)
        if add_special_tokens is False or not tokenizer.adds_bos or tokenizer.bos_id is None:
            return ids
        return [tokenizer.bos_id, *ids]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of every continuation after its context, and whether it is the greedy one."""
        # Not lm-eval's own bar: `progress` is told.
        result: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return result

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused: `thinfer eval perplexity` does this."""
        raise UnsupportedError("tasks of running text are not scored here; thinfer eval perplexity scores a text")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refused: only choices and continuations are scored."""
        raise UnsupportedError("tasks in which the model writes an answer are not supported; multiple choice is")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of every continuation, and whether each of its tokens is the likeliest."""
        most = self._llm.engine.max_model_len
        wanted = []
        for index, (_pair, context, continuation) in enumerate(requests):
            # A continuation that joins the context's last token is empty: it adds nothing.
            if not continuation:
                continue
            if len(continuation) > most:
                raise ResourceError(
                    f"a continuation of {len(continuation)} tokens does not fit the context of {most};"
                    f" raise max_model_len (the model allows {self._llm.config.max_position_embeddings})"
                )
            tokens = [*context, *continuation]
            # The last token is never run.
            self.truncated += len(tokens) > most + 1
            tokens = tokens[-(most + 1) :]
            wanted.append(_Request(index, tuple(tokens), len(continuation)))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        done = 0
        for wave in self._waves(group_requests(wanted)):
            for index, score in self._run(wave):
                results[index] = score
            done += sum(len(group.requests) for group in wave)
            self._progress(f"{done} of {len(wanted)} continuations")
        return results

    def _waves(self, groups: Sequence[_Group]) -> Iterator[list[_Group]]:
        """Groups that fit the KV pool together, the longest first so that a failure comes early."""
        pool = self._llm.engine.pool
        wave: list[_Group] = []
        blocks = 0
        for group in sorted(groups, key=lambda group: -group.longest):
            needed = pool.blocks_for(group.longest)
            if wave and (len(wave) == _WAVE or blocks + needed > pool.num_free):
                yield wave
                wave, blocks = [], 0
            wave.append(group)
            blocks += needed
        if wave:
            yield wave

    def _run(self, groups: Sequence[_Group]) -> Iterator[tuple[int, tuple[float, bool]]]:
        engine = self._llm.engine
        sequences = [engine.new_sequence() for _ in groups]
        try:
            starts = [
                Work(sequence, group.requests[0].tokens[: group.shared], logits="none", sparse=self._sparse)
                for sequence, group in zip(sequences, groups, strict=True)
                if group.shared
            ]
            if starts:
                engine.step(starts)
            for turn in range(max(len(group.requests) for group in groups)):
                turns = [
                    (sequence, group.requests[turn], group.shared)
                    for sequence, group in zip(sequences, groups, strict=True)
                    if turn < len(group.requests)
                ]
                yield from self._score(turns)
        finally:
            for sequence in sequences:
                engine.free(sequence)

    def _score(self, turns: Sequence[tuple["KvSequence", _Request, int]]) -> Iterator[tuple[int, tuple[float, bool]]]:
        works, requests = [], {}
        for sequence, request, shared in turns:
            # The keys and values after the shared tokens belong to the request before; they are written over.
            self._llm.engine.pool.truncate(sequence, shared)
            first = len(request.tokens) - request.scored - 1
            requests[id(sequence)] = request
            if first > shared:
                works.append(Work(sequence, request.tokens[shared:first], logits="none", sparse=self._sparse))
        if works:
            self._llm.engine.step(works)
        sums = dict.fromkeys(requests, 0.0)
        greedy = dict.fromkeys(requests, True)

        def receive(sequence: "KvSequence", position: int, logits: Float32) -> None:
            tokens = requests[id(sequence)].tokens
            targets = np.asarray(tokens[position + 1 : position + 1 + len(logits)])
            scores, best = token_scores(logits, targets)
            if np.isnan(scores).any():
                raise CheckFailed("the model predicts NaN; its weights are broken: fetch or prune it again")
            sums[id(sequence)] += float(scores.sum())
            greedy[id(sequence)] &= bool(best.all())

        scored = [
            Work(sequence, request.tokens[-request.scored - 1 : -1], logits="all", sparse=self._sparse)
            for sequence, request, _ in turns
        ]
        self._llm.engine.step(scored, on_logits=receive)
        for key, request in requests.items():
            yield request.index, (sums[key], greedy[key])


def token_scores(logits: Float32, targets: NDArray[np.int_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Log-probability in nats of a target under each row, and whether it is the row's best.

    Args:
        logits: float32 [rows, vocab].
        targets: token ids [rows].

    Example:
        >>> token_scores(np.zeros((1, 2), np.float32), np.array([0]))[0].tolist()
        [-0.6931471805599453]
    """
    most = logits.max(axis=1)
    chosen = logits[np.arange(len(targets)), targets]
    # The exponentials in float32, their sum in float64: as exact as the logits are.
    total = np.exp(logits - most[:, None]).sum(axis=1, dtype=np.float64)
    scores: NDArray[np.float64] = chosen.astype(np.float64) - most - np.log(total)
    return scores, logits.argmax(axis=1) == targets


def group_requests(requests: Sequence[_Request]) -> list[_Group]:
    """Put requests together that share most of their beginning; every request is in one group.

    A request joins while the group keeps at least half of the tokens it shares, so that texts which only begin with the
    same words stay apart.
    """
    groups: list[_Group] = []
    members: list[_Request] = []
    shared = 0
    for request in sorted(requests, key=lambda request: request.tokens):
        # The first scored token is predicted from the one before, which therefore runs with every request.
        own = len(request.tokens) - request.scored - 1
        if members:
            common = min(shared, own, _common(members[-1].tokens, request.tokens))
            if 2 * common >= max(shared, 1):
                members.append(request)
                shared = common
                continue
            groups.append(_Group(tuple(members), shared))
        members, shared = [request], own
    if members:
        groups.append(_Group(tuple(members), shared))
    return groups


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts begin with together."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
