"""Evaluation tasks from local files: multiple choice, one continuation under several contexts, and the last word.

A file is one object a line, and its fields say what kind of task it is::

    {"query": "...", "choices": ["...", "..."], "gold": 1}                 which choice continues the query?
    {"context_options": ["...", "..."], "continuation": "...", "gold": 0}  under which context is it likelier?
    {"context": "...", "continuation": "word"}, or {"text": "... word"}    is the last word the likeliest?

The tasks with names are read from the files in which they are commonly handed around, with lm-eval's wording where the
file has what it needs.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from thinfer.errors import UsageError

Kind = Literal["choices", "contexts", "last word"]
Document = Mapping[str, Any]

_FORMS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("choices", ("query", "choices", "gold")),
    ("contexts", ("context_options", "continuation", "gold")),
    ("last word", ("context", "continuation")),
)
_HELP = (
    'one JSON object a line: {"query", "choices", "gold"}, {"context_options", "continuation", "gold"},'
    ' {"context", "continuation"} or {"text"}'
)


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A task ready to score.

    Attributes:
        name: What the result is called.
        kind: Which fields the documents have: query, choices and gold; context_options, continuation and gold; or
            context and continuation. They are joined with one space.
        documents: In file order.
        source: Name of the file.
        sha256: Hash of its bytes.
    """

    name: str
    kind: Kind
    documents: tuple[Document, ...]
    source: str
    sha256: str


@dataclass(frozen=True, slots=True)
class _Known:
    """A task with a name: the files it may lie in, how they are read, and what follows the query."""

    files: tuple[str, ...]
    read: Callable[[str, str], list[Document]]
    ask: str = ""


def _json_lines(text: str, where: str) -> list[Document]:
    documents: list[Document] = []
    # Not splitlines: JSON strings may hold other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: line {number} is not JSON ({error}); a task file has {_HELP}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: line {number} is not an object; a task file has {_HELP}")
        documents.append(row)
    return documents


def _hellaswag(text: str, where: str) -> list[Document]:
    try:
        rows = json.loads(text)["test"]
        return [
            {
                "query": _wikihow(row["question"]),
                "choices": [_wikihow(choice) for choice in row["choices"].values()],
                "gold": list(row["choices"]).index(row["answer"]),
            }
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f'{where}: not {{"test": [{{"question", "choices": {{"A": ...}}, "answer"}}]}} ({error!r})'
        ) from error


def _wikihow(text: str) -> str:
    """Take the marks of WikiHow out, as lm-eval does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()


def _rte(text: str, where: str) -> list[Document]:
    rows = csv.DictReader(text.split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        return [
            {
                "query": f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:",
                "choices": ["True", "False"],
                "gold": int(row["label"]),
            }
            for row in rows
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where}: not tab-separated sentence1, sentence2 and label of 0 or 1 ({error!r})") from error


_ANSWER = "\nAnswer:"
KNOWN: Mapping[str, _Known] = MappingProxyType(
    {
        "piqa": _Known(("piqa.jsonl",), _json_lines, _ANSWER),
        "arc_easy": _Known(("arc_easy.jsonl",), _json_lines, _ANSWER),
        "winogrande": _Known(("winogrande.jsonl",), _json_lines),
        "boolq": _Known(("boolq.jsonl",), _json_lines, _ANSWER),
        "hellaswag": _Known(("hellaswag.json",), _hellaswag),
        "rte": _Known(("rte/dev.tsv", "rte.tsv"), _rte),
        "copa": _Known(("copa.jsonl",), _json_lines),
    }
)


def load_tasks(names: Sequence[str], data: Path | None) -> list[LocalTask]:
    """Read tasks by name or by file.

    Args:
        names: Keys of `KNOWN`, or paths of task files.
        data: The folder that holds the files of the named ones, at any depth; None when all are paths.

    Raises:
        UsageError: An unknown name, a missing folder or file, or one that holds something else.

    Example:
        >>> load_tasks(["copa"], Path("zeroshot"))[0].kind  # doctest: +SKIP
        'choices'
    """
    if not names:
        raise UsageError(f"no tasks; name some of {', '.join(KNOWN)}, or task files")
    tasks = [_load(name, data) for name in names]
    seen = [task.name for task in tasks]
    twice = sorted({name for name in seen if seen.count(name) > 1})
    if twice:
        raise UsageError(f"task {twice[0]} is given twice; give one file another name")
    return tasks


def _load(name: str, data: Path | None) -> LocalTask:
    known = KNOWN.get(name)
    if known is None:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UsageError(f"task {name!r} is neither one of {', '.join(KNOWN)} nor a file; a task file has {_HELP}")
        return _read(path.stem, path, _Known((), _json_lines))
    return _read(name, _find(name, known, data), known)


def _find(name: str, known: _Known, data: Path | None) -> Path:
    if data is None or not data.is_dir():
        shown = "no folder of task files was given" if data is None else f"there is no folder {data}"
        raise UsageError(f"task {name}: {shown}; --data DIR names one that holds {known.files[0]}")
    for file in known.files:
        found = sorted(data.rglob(file))
        if found:
            return found[0]
    raise UsageError(f"task {name}: no {known.files[0]} in {data}; --data DIR names a folder that holds it")


def _read(name: str, path: Path, known: _Known) -> LocalTask:
    try:
        blob = path.read_bytes()
        text = blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the path") from error
    rows = [_words(row) for row in known.read(text, str(path))]
    if not rows:
        raise UsageError(f"{path}: holds no documents; a task file has {_HELP}")
    kind = next((kind for kind, fields in _FORMS if rows[0].keys() >= set(fields)), None)
    if kind is None:
        raise UsageError(f"{path}: fields {', '.join(rows[0]) or 'none'}; a task file has {_HELP}")
    documents = tuple(_document(row, kind, known.ask, f"{path}: document {n}") for n, row in enumerate(rows, 1))
    return LocalTask(name, kind, documents, path.name, hashlib.sha256(blob).hexdigest())


def _words(row: Document) -> Document:
    """A text whose last word is asked for, as context and continuation; other rows as they are."""
    if row.keys() >= {"text"} and isinstance(row["text"], str) and "query" not in row and "context" not in row:
        context, _, word = row["text"].rstrip().rpartition(" ")
        return {"context": context, "continuation": word}
    return row


def _document(row: Document, kind: Kind, ask: str, where: str) -> Document:
    if kind == "choices":
        choices = _texts(row.get("choices"), where, "choices")
        query = _text(row.get("query"), where, "query").rstrip() + ask
        return {"query": query, "choices": choices, "gold": _gold(row, len(choices), where)}
    continuation = _text(row.get("continuation"), where, "continuation").strip()
    if kind == "contexts":
        options = [option.rstrip() for option in _texts(row.get("context_options"), where, "context_options")]
        return {"context_options": options, "continuation": continuation, "gold": _gold(row, len(options), where)}
    return {"context": _text(row.get("context"), where, "context").rstrip(), "continuation": continuation}


def _text(value: object, where: str, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: {field} is {value!r:.40}, not a text")
    return value


def _texts(value: object, where: str, field: str) -> list[str]:
    items: Iterable[object] = value if isinstance(value, list) else ()
    texts = [_text(item, where, field).strip() for item in items]
    if len(texts) < 2:
        raise UsageError(f"{where}: {field} must be a list of at least two texts")
    return texts


def _gold(row: Document, count: int, where: str) -> int:
    gold = row.get("gold")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < count:
        raise UsageError(f"{where}: gold is {gold!r}, not the number of one of the {count} (from 0)")
    return gold
