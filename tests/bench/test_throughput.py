"""The measuring loop, the rows and the reports, on workers that do not run a model."""

import csv
import io
import json
from dataclasses import dataclass, field

import pytest

from thinfer.bench import report
from thinfer.bench.throughput import START_TOKENS, Contender, Test, measure
from thinfer.bench.worker import Sample
from thinfer.errors import UsageError

FIELDS = {
    "model",
    "size_bytes",
    "n_params",
    "backend",
    "threads",
    "test",
    "t_s_median",
    "t_s_stddev",
    "samples",
    "sparsity",
    "density",
    "bytes_per_token",
    "rss_bytes",
    "commit",
    "cpu",
}


@dataclass
class FakeWorker:
    log: list
    name: str
    seconds: list
    calls: list = field(default_factory=list)

    def _next(self, call):
        self.log.append(self.name)
        self.calls.append(call)
        return Sample(
            self.seconds[len(self.calls) % len(self.seconds)], 0.5, 1e6, ({"kind": "add", "seconds": 1.0, "bytes": 0},)
        )

    def prefill(self, tokens, *, operations=False):
        return self._next(("prefill", list(tokens), operations))

    def decode(self, start, tokens, *, operations=False):
        return self._next(("decode", list(start), list(tokens), operations))

    def rss_bytes(self):
        return 123


def contender(log, name, seconds, *, path="a.gguf", is_peer=False, sparsity=0.0):
    facts = {
        "model": name,
        "path": path,
        "size_bytes": 2**20,
        "n_params": 10**6,
        "backend": "llama.cpp" if is_peer else "cpu",
        "threads": 2,
        "sparsity": sparsity,
        "commit": "abc",
    }
    return Contender(FakeWorker(log, name, seconds), facts, list(range(600)), is_peer=is_peer)


def test_rounds_interleave_and_the_first_is_not_counted():
    log = []
    a, b = contender(log, "A", [1.0, 2.0, 4.0, 4.0]), contender(log, "B", [1.0])
    rows = measure([a, b], [Test("pp", 512)], 3)
    assert log == ["A", "B"] * 4
    assert [row["model"] for row in rows] == ["A", "B"]
    assert rows[0]["samples"] == [128.0, 128.0, 512.0]
    assert rows[0]["t_s_median"] == 128.0
    assert rows[0]["t_s_stddev"] == pytest.approx(221.7025, rel=1e-4)


def test_a_row_has_the_promised_fields():
    (row,) = measure([contender([], "A", [1.0])], [Test("tg", 8)], 1)
    assert set(row) == FIELDS
    assert (row["test"], row["density"], row["bytes_per_token"], row["rss_bytes"]) == ("tg8", 0.5, 1e6, 123)
    assert row["t_s_stddev"] == 0.0


def test_decode_starts_with_a_short_prompt():
    a = contender([], "A", [1.0])
    measure([a], [Test("tg", 8)], 1)
    kind, start, tokens, _ = a.worker.calls[0]
    assert (kind, len(start), len(tokens)) == ("decode", START_TOKENS, 8)
    assert start + tokens == list(range(START_TOKENS + 8))


def test_ratio_is_ours_over_theirs_on_the_same_file():
    log = []
    ours, sparse = contender(log, "A", [1.0]), contender(log, "S", [0.5], sparsity=0.4)
    other = contender(log, "C", [1.0], path="c.gguf")
    peer = contender(log, "a.gguf", [2.0], is_peer=True)
    rows = measure([ours, sparse, other, peer], [Test("pp", 512)], 1)
    assert [row.get("ratio_median") for row in rows] == [2.0, 4.0, None, None]


def test_operations_are_measured_in_a_round_of_their_own():
    a = contender([], "A", [1.0])
    (row,) = measure([a], [Test("pp", 4)], 2, operations=True)
    assert [call[2] for call in a.worker.calls] == [False, False, False, True]
    assert row["operations"] == [{"kind": "add", "seconds": 1.0, "bytes": 0}]
    assert "add" in report.as_md([row])


def test_no_rounds_is_refused():
    with pytest.raises(UsageError):
        measure([], [Test("pp", 1)], 0)


@pytest.fixture
def rows():
    log = []
    return measure(
        [contender(log, "A", [1.0]), contender(log, "a.gguf", [2.0], is_peer=True)], [Test("pp", 512), Test("tg", 2)], 2
    )


def test_json_and_jsonl_hold_the_rows(rows):
    assert json.loads(report.as_json(rows)) == rows
    assert [json.loads(line) for line in report.as_jsonl(rows).splitlines()] == rows


def test_csv_has_one_line_a_row(rows):
    read = list(csv.DictReader(io.StringIO(report.as_csv(rows))))
    assert [line["test"] for line in read] == ["pp512", "pp512", "tg2", "tg2"]
    assert json.loads(read[0]["samples"]) == rows[0]["samples"]


def test_csv_keeps_the_operations():
    rows = measure([contender([], "A", [1.0])], [Test("pp", 512)], 1, operations=True)
    (line,) = csv.DictReader(io.StringIO(report.as_csv(rows)))
    assert json.loads(line["operations"]) == [{"kind": "add", "seconds": 1.0, "bytes": 0}]


def test_md_is_a_table_of_equal_columns(rows):
    lines = report.as_md(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    assert "512.00 ± 0.00" in lines[2]
    assert "2.00x" in lines[2]


def test_a_bar_in_a_cell_does_not_end_it():
    assert report.table(["a"], [["gate|up"]]).splitlines()[2] == r"| gate\|up |"
