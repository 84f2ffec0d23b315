"""Sampler: logits to the next token, in a documented order.

1. the request's constraint leaves the tokens that it allows
2. end tokens and stop tokens are barred until ``min_tokens`` were generated, unless the constraint allows no other
3. logit bias, repetition penalty (prompt and generated tokens, as Hugging Face), then presence and frequency
   penalties (generated tokens, as OpenAI)
4. temperature
5. top-k, 6. top-p over what top-k left, 7. min-p over what top-p left, each relative to the renormalised rest
   (Hugging Face's order)
8. one uniform number from the request's own Philox generator picks the token

Temperature 0 is greedy: after step 3 the largest logit, the lowest id among equals. Ties at the border of top-k stay
in. The result depends on the request's logits, seed and number of drawn tokens alone, never on its neighbours.
"""

import secrets
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinfer.core.sampling import SamplingParams
from thinfer.errors import CheckFailed

if TYPE_CHECKING:
    from thinfer._core import Softmax

Float32 = NDArray[np.float32]
# Tokens whose weights are added up first to pick one.
_BLOCK = 128
# Tokens of which only the largest is looked at first, for few and for many wanted ones.
_GROUPS = (16, 4)
_FIRST_LOOK = 256
# Outside these the distribution no longer changes, and float32 would overflow or divide zero by zero.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-20, 1e20


class Scratch:
    """What the samplers of one thread share for the arithmetic over a vocabulary.

    Memory: fresh one would cost as much as the arithmetic, and one for each request would not stay in the cache. And
    native softmax: it finds a token in one pass where that does not hang on how sums are rounded. Elsewhere NumPy
    decides, so the tokens are NumPy's in any case.

    Attributes:
        softmax: None where the native part is not built, or the machine has no instruction set with which it is faster
            than NumPy.
    """

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)
        self.softmax = _native_softmax()

    def like(self, scores: Float32) -> Float32:
        """Float32 of the same shape with any content, valid until the next call."""
        if len(self._values) != len(scores):
            self._values = np.empty_like(scores)
        return self._values


def _native_softmax() -> "Softmax | None":
    if find_spec("thinfer._core") is None:
        return None
    from thinfer._core import Softmax

    softmax = Softmax()
    return softmax if softmax.isa != "scalar" else None


class Sampler:
    """Chooses the tokens of one request.

    Args:
        params: sampling settings.
        prompt: its token ids, for the repetition penalty.
        eos_ids: tokens that end a text.
        scratch: shared by the samplers of one thread; None: its own.

    Attributes:
        seed: the seed in use; drawn from the system when the parameters have none.

    Example:
        >>> sampler = Sampler(SamplingParams(temperature=0.0), prompt=[0])
        >>> sampler.sample(np.array([0.5, 2.0, 1.0], np.float32))
        1
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        eos_ids: Iterable[int] = (),
        scratch: Scratch | None = None,
    ) -> None:
        self.params = params
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self._random = np.random.Generator(np.random.Philox(self.seed))
        self._ends = np.array(sorted({*eos_ids, *params.stop_token_ids}), np.int64)
        self._biased = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._constraint = None if params.allowed is None else params.allowed()
        self._generated: dict[int, int] = {}
        self._seen = dict.fromkeys(prompt)
        self._count = 0
        self._scratch = scratch or Scratch()
        self._look = _FIRST_LOOK

    def sample(self, logits: Float32) -> int:
        """The next token from logits float32 [vocab], which stay as they are.

        NaN or no finite logit, and a constraint that allows no token, raise CheckFailed.
        """
        scores = self._penalised(logits)
        if self.params.temperature == 0:
            token = int(scores.argmax())
            _require_finite(scores[token])
        else:
            token = self._draw(scores)
        if self._constraint is not None:
            self._constraint.accept(token)
        self._count += 1
        self._generated[token] = self._generated.get(token, 0) + 1
        self._seen[token] = None
        return token

    def _penalised(self, logits: Float32) -> Float32:
        params = self.params
        bar = self._count < params.min_tokens and len(self._ends) > 0
        repetition = params.repetition_penalty != 1 and len(self._seen) > 0
        counted = (params.presence_penalty != 0 or params.frequency_penalty != 0) and len(self._generated) > 0
        if self._constraint is None and not (bar or repetition or counted or len(self._biased)):
            return logits
        scores = logits.copy()
        if self._constraint is not None:
            # A masked NaN would pass for a good distribution.
            _require_finite(scores.max())
            _forbid(scores, self._constraint.mask())
        if bar:
            ends = scores[self._ends]
            scores[self._ends] = -np.inf
            if self._constraint is not None and scores.max() == -np.inf:
                scores[self._ends] = ends
        scores[self._biased] += self._bias
        if repetition:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            values = scores[ids]
            penalty = np.float32(params.repetition_penalty)
            scores[ids] = np.where(values < 0, values * penalty, values / penalty)
        if counted:
            ids = np.fromiter(self._generated, np.int64, len(self._generated))
            counts = np.fromiter(self._generated.values(), np.float32, len(self._generated))
            scores[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        return scores

    def _draw(self, scores: Float32) -> int:
        params = self.params
        top = scores.max()
        _require_finite(top)
        limit = params.top_k if params.top_k else len(scores)
        if params.top_p < 1 or limit < len(scores):
            ids, weights = self._nucleus(scores, top, limit)
            if params.min_p > 0:
                # Weights are relative to the largest, which is 1.
                keep = weights >= params.min_p
                ids, weights = ids[keep], weights[keep]
            return int(ids[_pick(weights, self._random.random())])
        uniform = self._random.random()
        softmax = self._scratch.softmax
        if softmax is not None:
            token = softmax.draw(scores, float(top), _temperature(params), params.min_p, uniform)
            if token is not None:
                return token
        weights = self._weights_of_all(scores, top)
        if params.min_p > 0:
            weights[weights < params.min_p] = 0
        return _pick(weights, uniform)

    def _nucleus(self, scores: Float32, top: np.float32, limit: int) -> tuple[NDArray[np.int64], Float32]:
        """Ids and weights, largest first, that top-k and top-p leave."""
        params = self.params
        if limit < len(scores):
            ids = largest(scores, limit)
            weights = _weights(scores[ids], top, params.temperature)
            if params.top_p >= 1:
                return ids, weights
            sums = np.cumsum(weights, dtype=np.float64)
            return _cut(ids, weights, sums, params.top_p * weights.sum(dtype=np.float64))
        # Without top-k the nucleus is usually small: sort the largest few, more only while they fall short. How many to
        # begin with is what the last token took; the nucleus is the same whatever the guess.
        softmax = self._scratch.softmax
        if softmax is None:
            mass, doubt = self._mass(scores, top), 0.0
        else:
            mass, doubt = softmax.total(scores, float(top), _temperature(params)), softmax.error
        limit = self._look
        while True:
            ids = largest(scores, limit)
            weights = _weights(scores[ids], top, params.temperature)
            sums = np.cumsum(weights, dtype=np.float64)
            if doubt and np.abs(sums - params.top_p * mass).min() <= doubt * mass:
                # The border is too near a token to trust a sum that is rounded otherwise.
                mass, doubt = self._mass(scores, top), 0.0
            if sums[-1] >= params.top_p * mass or len(ids) == len(scores):
                break
            limit *= 8
        ids, weights = _cut(ids, weights, sums, params.top_p * mass)
        self._look = max(_FIRST_LOOK, 2 * len(ids))
        return ids, weights

    def _mass(self, scores: Float32, top: np.float32) -> float:
        return float(self._weights_of_all(scores, top).sum(dtype=np.float64))

    def _weights_of_all(self, scores: Float32, top: np.float32) -> Float32:
        """Weights of the whole vocabulary, valid until the next call."""
        return _weights(scores, top, self.params.temperature, self._scratch.like(scores))


def _forbid(scores: Float32, allowed: NDArray[np.bool_]) -> None:
    """Set what the mask does not allow to -inf; ids beyond the mask are not allowed."""
    known = len(allowed)
    if known > len(scores):
        allowed = allowed[: len(scores)]
    scores[known:] = -np.inf
    scores[: len(allowed)][~allowed] = -np.inf
    if scores.max() == -np.inf:
        raise CheckFailed("the constraint allows no token here; loosen the grammar or the schema")


def _cut(
    ids: NDArray[np.int64], weights: Float32, sums: NDArray[np.float64], mass: float
) -> tuple[NDArray[np.int64], Float32]:
    """The largest weights, with their running sums, up to the one that reaches the mass; the largest in any case."""
    # The token that crosses top_p belongs to the nucleus.
    keep = sums - weights < mass
    keep[0] = True
    return ids[keep], weights[keep]


def _temperature(params: SamplingParams) -> float:
    return min(max(params.temperature, _LEAST_TEMPERATURE), _MOST_TEMPERATURE)


def _weights(scores: Float32, top: np.float32, temperature: float, out: Float32 | None = None) -> Float32:
    """Probabilities relative to the largest one, which has weight 1."""
    weights: Float32 = np.subtract(scores, top, out=out)
    if temperature != 1:
        weights /= np.float32(min(max(temperature, _LEAST_TEMPERATURE), _MOST_TEMPERATURE))
    np.exp(weights, out=weights)
    return weights


def _pick(weights: Float32, uniform: float) -> int:
    """Index whose share of the summed weights holds the point ``uniform`` in [0, 1).

    Block sums first: a running sum over a large vocabulary would take longer than all the rest.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    point = min(uniform * ends[-1], float(np.nextafter(ends[-1], 0)))
    block = int(np.searchsorted(ends, point, side="right"))
    inside = weights[starts[block] : starts[block] + _BLOCK]
    rest = point - (ends[block - 1] if block else 0.0)
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), rest, side="right"))
    # The two sums round differently, so the point may lie past the block's end: its last index of any weight is meant.
    return int(starts[block]) + min(place, int(np.flatnonzero(inside)[-1]))


def largest(scores: Float32, count: int) -> NDArray[np.int64]:
    """Ids of the ``count`` largest scores and of ties with the last of them, largest first, equal ones by id.

    The count-th largest of the maxima of groups is a lower bound of the count-th largest score, so one pass leaves few
    candidates: a large vocabulary takes a fraction of a full partition. Groups are columns, whose maxima are quick.
    """
    # With fewer groups than four times the count the bound would be low.
    group = next((each for each in _GROUPS if 4 * count * each < len(scores)), None)
    if group is None:
        candidates = np.arange(len(scores))
        if count < len(scores):
            candidates = np.flatnonzero(scores >= np.partition(scores, len(scores) - count)[len(scores) - count])
    else:
        width = len(scores) // group
        maxima = scores[: width * group].reshape(group, width).max(axis=0)
        candidates = np.flatnonzero(scores >= np.partition(maxima, width - count)[width - count])
    # One whole number says score and id: the bits of a float, its sign apart, are in the order of the floats. Numbers
    # are sorted many times faster than pairs. Adding 0 makes the two zeros equal.
    bits = (scores[candidates] + np.float32(0)).view(np.int32)
    ranks = ~(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    keys = (ranks << 32) | candidates
    keys.sort()
    if count < len(keys):
        keys = keys[: np.searchsorted(keys, (keys[count - 1] >> 32) + 1 << 32)]
    return keys & 0xFFFFFFFF


def _require_finite(largest: np.floating) -> None:
    """The maximum of NaN and numbers is NaN, so one look tells whether the logits are usable."""
    if not np.isfinite(largest):
        raise CheckFailed(
            f"the logits hold {largest}: the weights or the activations overflow; check the file with `thinfer info` "
            "or run with activations f32"
        )
