"""The kernel experiment: which rows it gives, when, and what they count."""

import csv
import io
import json
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("thinfer._core")

from thinfer.bench import kernels, report
from thinfer.cli.main import app

TINY = kernels.Shape("tiny", 512, 192)
SMALL = 1 << 20


def measure(**options):
    return kernels.measure(**({"shapes": [TINY], "seconds": 0.0, "working_set": SMALL} | options))


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "kernels", *arguments], prog_name="thinfer", catch_exceptions=False)


def test_every_case_has_a_row():
    rows = list(measure(threads=[1, 2]))
    assert all(tuple(row) == tuple(kernels.COLUMNS) for row in rows)
    cases = {(row["codec"], row["threads"], row["layout"], row["cut"], row["rows"], row["density"]) for row in rows}
    expected = set()
    for codec in ("u4", "u5", "u6", "i8"):
        for threads in (1, 2):
            for layout, cut in (("rows", "-"), ("columns", "outputs"), ("columns", "segments")):
                for density in (1.0,) if layout == "rows" else (1.0, 0.8, 0.6, 0.5, 0.3, 0.1):
                    expected.add((codec, threads, layout, cut, 1, density))
                expected |= {(codec, threads, layout, cut, batch, 1.0) for batch in (4, 16)}
    assert cases == expected
    assert len(rows) == len(expected)


def test_bytes_are_those_of_the_matrix_and_fall_with_the_density():
    """Q8_0 has 34 bytes for 32 weights in every layout; 192 outputs need no padding."""
    read = {
        (row["layout"], row["cut"], row["density"], row["rows"]): row["gb_s"] * row["us"] * 1e3
        for row in measure(codecs=["i8"], threads=[1])
    }
    whole = 512 * 192 * 34 / 32
    for (layout, _, density, batch), nbytes in read.items():
        if layout == "rows" or batch > 1:
            assert nbytes == pytest.approx(whole, rel=0.2)  # gb_s has one decimal
        else:
            assert nbytes == pytest.approx(whole * (density * 32 + 2) / 34, rel=0.25)


def test_rows_come_as_they_are_measured_and_layouts_are_packed_once(monkeypatch):
    packed = []
    pack = kernels._pack
    monkeypatch.setattr(kernels, "_pack", lambda *given: packed.append(given[:2]) or pack(*given))
    rows = measure(codecs=["u4", "i8"], threads=[1, 2])
    next(rows)
    assert packed == [(TINY, "u4")]
    list(rows)
    assert packed == [(TINY, "u4"), (TINY, "i8")]


def test_time_bounds_the_rounds(monkeypatch):
    def rounds(seconds):
        calls = []
        monkeypatch.setattr(kernels, "_time", lambda *given: calls.append(given) or 1e-3)
        list(measure(codecs=["i8"], threads=[1], seconds=seconds))
        return len(calls) / (3 * 3 + 5 * 2)  # layouts in the cases of density 1, and in the others

    assert rounds(0.0) == 1 + 3
    assert rounds(1e3) == 1 + 15


def test_samples_go_round_all_copies(monkeypatch):
    ranges = []
    monkeypatch.setattr(kernels, "_time", lambda program, first, last, rows: ranges.append((first, last)) or 1e-3)
    monkeypatch.setattr(kernels, "_SAMPLE_BYTES", 0)
    list(measure(codecs=["i8"], threads=[1]))
    copies = -(-SMALL // (3 * 512 * 192 * 34 // 32))
    assert set(ranges) == {(i, i + 1) for i in range(copies)}


@pytest.mark.parametrize("output", ["md", "jsonl", "csv"])
def test_lines_are_printed_at_once(monkeypatch, output):
    printed = []

    def slow(**_):
        for index in range(3):
            printed.append(sys.stdout.buffer.getvalue().count(b"\n"))
            yield dict.fromkeys(kernels.COLUMNS, index)

    monkeypatch.setattr(kernels, "measure", slow)
    result = invoke("-o", output, "-q")
    head = {"md": 2, "jsonl": 0, "csv": 1}[output]
    assert printed == [head, head + 1, head + 2]
    assert result.stdout.count("\n") == head + 3


def test_outputs_hold_the_rows(monkeypatch):
    row = dict.fromkeys(kernels.COLUMNS, 12345.678) | {"shape": "a|b", "rows": 4}
    monkeypatch.setattr(kernels, "measure", lambda **_: iter([row, row]))
    assert json.loads(invoke("-o", "json", "-q").stdout) == [row, row]
    assert json.loads(invoke("-o", "jsonl", "-q").stdout.splitlines()[1]) == row
    (line, _) = csv.DictReader(io.StringIO(invoke("-o", "csv", "-q").stdout))
    assert line == {name: str(value) for name, value in row.items()}
    head, rule, first, _ = invoke("-q").stdout.splitlines()
    assert len(head) == len(rule) == len(first)
    assert "a\\|b" in first
    assert "12346" in first


def test_options_choose_a_part(monkeypatch):
    chosen = []
    monkeypatch.setattr(kernels, "measure", lambda **options: chosen.append(options) or iter(()))
    invoke("--shape", "smollm2", "--shape", "8B down", "--codec", "u4_k", "-t", "1", "-t", "3")
    (options,) = chosen
    assert [shape.model.split()[0] for shape in options["shapes"]] == ["SmolLM2"] * 3 + ["Llama-8B"]
    assert (options["codecs"], options["threads"]) == (["u4_k"], [1, 3])
    result = invoke("--shape", "nothing")
    assert result.exit_code == 2
    assert "SmolLM2 down" in result.stderr
    assert "largest cache" in invoke().stderr


def test_stream_md_is_the_table():
    rows = [{"a": "x", "b": 1.5}, {"a": "yy", "b": 20.25}]
    assert list(report.stream_md(rows, {"a": 2, "b": 5})) == report.as_plain_md(rows).splitlines()
