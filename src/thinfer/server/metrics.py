"""Prometheus metrics, with the names that vLLM uses after ``thinfer_``."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from thinfer.core.request import StreamChunk, Timings
from thinfer.server.loop import LoopFacts

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)


class Metrics:
    """The figures of one server, in a registry of their own, so that two servers in a process do not mix.

    Attributes:
        facts: gives what the engine last said of itself.

    Example:
        >>> b"thinfer_generation_tokens_total 0.0" in Metrics().render()
        True
    """

    def __init__(self) -> None:
        self.facts: Callable[[], LoopFacts] = LoopFacts
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(self))
        self._prompt = self._counter("thinfer_prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("thinfer_prompt_tokens_cached", "Tokens of prompts found in the KV cache.")
        self._generated = self._counter("thinfer_generation_tokens", "Generated tokens.")
        self._ended = Counter(
            "thinfer_requests", "Requests that ended, by reason.", ["finished_reason"], registry=self._registry
        )
        self._refused = Counter("thinfer_http_errors", "Failed HTTP requests.", ["status"], registry=self._registry)
        self._first = self._histogram("thinfer_time_to_first_token_seconds", "From a request to its first token.")
        self._between = self._histogram("thinfer_inter_token_latency_seconds", "From one token to the next.")
        self._whole = self._histogram("thinfer_e2e_request_latency_seconds", "From a request to its end.")
        self._queue = self._histogram("thinfer_request_queue_time_seconds", "From a request to its first step.")

    def clock(self) -> "RequestClock":
        """Measures one request, from now on."""
        return RequestClock(self)

    def refused(self, status: int) -> None:
        """Count an HTTP request that failed."""
        self._refused.labels(str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def on_first(self, seconds: float) -> None:
        """A request got its first token."""
        self._first.observe(seconds)

    def on_next(self, seconds: float, tokens: int) -> None:
        """A request got more tokens, so long after the ones before."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def on_tokens(self, count: int) -> None:
        """Tokens were generated."""
        self._generated.inc(count)

    def on_end(self, reason: str, seconds: float, timings: Timings | None) -> None:
        """A request ended."""
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)
        if timings is not None:
            self._prompt.inc(timings.prompt_tokens)
            self._cached.inc(timings.cached_tokens)
            self._queue.observe(timings.queue_seconds)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self._registry)


class RequestClock:
    """Times the tokens of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: float | None = None

    def see(self, chunk: StreamChunk, at: float) -> None:
        """Count one chunk, which the engine had at that time of `time.perf_counter`."""
        if chunk.token_ids:
            self._metrics.on_tokens(len(chunk.token_ids))
            if self._last is None:
                self._metrics.on_first(at - self._start)
            else:
                self._metrics.on_next(at - self._last, len(chunk.token_ids))
            self._last = at
        if chunk.finish_reason is not None:
            self._metrics.on_end(chunk.finish_reason, at - self._start, chunk.timings)


class _Engine(Collector):
    """What the engine thread last said of itself."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        facts = self._metrics.facts()
        gauges = [
            ("thinfer_num_requests_running", "Requests that take part in steps.", facts.running),
            ("thinfer_num_requests_waiting", "Requests that wait.", facts.waiting),
            ("thinfer_kv_cache_usage_perc", "Fraction of KV blocks in use; 1 is full.", facts.kv_used),
            ("thinfer_prefix_cache_perc", "Fraction of KV blocks that only the prefix cache holds.", facts.kv_cached),
            (
                "thinfer_active_neuron_ratio",
                "Fraction of the block linears' weights that were multiplied lately; 1 is dense.",
                facts.density,
            ),
            ("thinfer_weight_bytes_per_token", "Weight bytes read a token lately.", facts.bytes_per_token),
            ("thinfer_tokens_per_second", "Generated tokens a second lately.", facts.tokens_per_second),
        ]
        counters = [
            ("thinfer_num_preemptions", "Times a request gave its KV blocks back.", facts.preemptions),
            ("thinfer_model_rows", "Tokens that went through the model.", facts.rows),
            ("thinfer_weight_bytes", "Weight bytes read.", facts.bytes_read),
        ]
        if facts.recall is not None:
            recall = "Fraction of the neurons that fired which their predictors had named, in samples lately."
            gauges.append(("thinfer_predictor_recall", recall, facts.recall))
            counters += [
                ("thinfer_predictor_needed_neurons", "Neurons that fired in samples.", facts.needed),
                ("thinfer_predictor_found_neurons", "Of them those that predictors had named.", facts.found),
            ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)
