"""Rows of a benchmark as JSON, CSV or llama-bench's Markdown table."""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def as_json(rows: Sequence[Row]) -> str:
    """One JSON list."""
    return json.dumps(list(rows), indent=2)


def as_jsonl(rows: Sequence[Row]) -> str:
    """One JSON object a line."""
    return "\n".join(json.dumps(row) for row in rows)


def as_csv(rows: Sequence[Row]) -> str:
    """One line a row under a header; lists and objects are JSON in their cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = (row.get(name) for name in names)
        writer.writerow(json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells)
    return text.getvalue().rstrip("\n")


def as_md(rows: Sequence[Row]) -> str:
    """llama-bench's table with sparsity, density and bytes read; ``ratio`` when a peer ran; operations below."""
    with_ratio = any("ratio_median" in row for row in rows)
    head = ["model", "size", "params", "backend", "threads", "test", "t/s", "sparsity", "density", "MB/token"]
    body = []
    for row in rows:
        read = row["bytes_per_token"]
        line = [
            short_name(row["model"]),
            f"{row['size_bytes'] / 2**20:.2f} MiB",
            f"{row['n_params'] / 1e6:.2f} M",
            row["backend"],
            str(row["threads"]),
            row["test"],
            f"{row['t_s_median']:.2f} ± {row['t_s_stddev']:.2f}",
            f"{row['sparsity']:.2f}",
            f"{row['density']:.2f}",
            "" if read is None else f"{read / 1e6:.1f}",
        ]
        body.append([*line, f"{row['ratio_median']:.2f}x" if "ratio_median" in row else ""] if with_ratio else line)
    parts = [table([*head, "ratio"] if with_ratio else head, body, left=4)]
    parts += [_operations(row) for row in rows if row.get("operations")]
    return "\n\n".join(parts)


def as_streams_md(rows: Sequence[Row]) -> str:
    """Tokens a second of all streams together, and the time between two tokens of one.

    ``agree`` is the fraction of our tokens that the other engine finds the likeliest.
    """
    with_ratio = any("ratio_median" in row for row in rows)
    head = ["model", "backend", "threads", "test", "streams", "t/s", "ITL ms", "P99 ITL ms", "density", "MB/token"]
    body = []
    for row in rows:
        read = row["bytes_per_token"]
        line = [
            short_name(row["model"]),
            row["backend"],
            str(row["threads"]),
            row["test"],
            str(row["streams"]),
            f"{row['t_s_median']:.2f} ± {row['t_s_stddev']:.2f}",
            f"{row['median_itl_ms']:.2f}",
            f"{row['p99_itl_ms']:.2f}",
            f"{row['density']:.2f}",
            "" if read is None else f"{read / 1e6:.1f}",
        ]
        if with_ratio:
            agree = row["agreement"]
            line.append("" if agree is None else f"{agree:.3f}")
            line.append(f"{row['ratio_median']:.2f}x" if "ratio_median" in row else "")
        body.append(line)
    return table([*head, "agree", "ratio"] if with_ratio else head, body, left=2)


def as_plain_md(rows: Sequence[Row]) -> str:
    """A Markdown table with the rows' own names as its head; floats with four significant digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table(names, [[_plain(row.get(name)) for name in names] for row in rows])


def stream_md(rows: Iterable[Row], widths: Mapping[str, int]) -> Iterator[str]:
    """Lines of `as_plain_md` as the rows come, the head at once; ``widths`` are the columns by name."""
    sizes = list(widths.values())
    yield _line(list(widths), sizes, 1)
    yield _rule(sizes, 1)
    for row in rows:
        yield _line([_escape(_plain(row.get(name))) for name in widths], sizes, 1)


def stream_csv(rows: Iterable[Row], names: Sequence[str]) -> Iterator[str]:
    """Lines of CSV as the rows come, the head at once."""
    for cells in itertools.chain([names], ([row.get(name) for name in names] for row in rows)):
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(cells)
        yield text.getvalue()


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are flush left, the others flush right."""
    head, body = ([_escape(cell) for cell in head], [[_escape(cell) for cell in line] for line in body])
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join([_line(head, widths, left), _rule(widths, left), *(_line(line, widths, left) for line in body)])


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    sides: list[Callable[[str, int], str]] = [str.ljust if i < left else str.rjust for i in range(len(cells))]
    return "| " + " | ".join(side(cell, width) for side, cell, width in zip(sides, cells, widths, strict=True)) + " |"


def _rule(widths: Sequence[int], left: int) -> str:
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return _line(rule, widths, left)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def _escape(cell: str) -> str:
    """A bar would end the cell."""
    return cell.replace("|", "\\|")


def short_name(model: str) -> str:
    """The last part of a path without .gguf; a hub id as it is."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model


def _operations(row: Row) -> str:
    """Where the time of one row went: seconds, bytes and bandwidth by kind of node."""
    total = sum(op["seconds"] for op in row["operations"]) or 1.0
    body = [
        [
            op["kind"],
            f"{op['seconds'] * 1e3:.2f}",
            f"{100 * op['seconds'] / total:.1f} %",
            f"{op['bytes'] / 1e6:.1f}" if op["bytes"] else "",
            f"{op['bytes'] / op['seconds'] / 1e9:.1f}" if op["bytes"] and op["seconds"] else "",
        ]
        for op in sorted(row["operations"], key=lambda op: -op["seconds"])
    ]
    head = [f"{short_name(row['model'])} {row['test']}", "ms", "share", "MB", "GB/s"]
    return table(head, body)
