import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thinfer import LLM
from thinfer.errors import CheckFailed, UsageError
from thinfer.evals import tasks as tasks_module
from thinfer.evals.local_tasks import KNOWN, load_tasks
from thinfer.evals.tasks import score_tasks

CHOICES = [
    {"query": f"Question: {q}\n", "choices": choices, "gold": gold}
    for q, choices, gold in [
        ("is water wet?", ["yes", "not at all, never"], 0),
        ("how many legs has a cat?", ["four", "five"], 0),
        ("what is the sun?", ["a stone", "a star of the usual kind"], 1),
        ("who is it?", ["me", "you"], 1),
        ("where?", ["here", "there"], 0),
    ]
]
CONTEXTS = [
    {"context_options": ["Ann met Bob so Ann", "Ann met Bob so Bob"], "continuation": "went home.", "gold": 1},
    {"context_options": ["It rained so the street", "It rained so the roof"], "continuation": "was wet.", "gold": 0},
]
WORDS = [{"text": "once upon a time"}, {"text": "the quick brown fox\n"}]
HELLASWAG = {
    "dev": [],
    "test": [
        {
            "question": "[header] How to sit [title] Find a chair. [step] Look.",
            "choices": {"A": "[title] Sit.", "B": "Stand up.  Then go."},
            "answer": "B",
        }
    ],
}
RTE = 'sentence1\tsentence2\tlabel\tidx\nA "cat" sat.\tA cat sat.\t0\t0\nIt is.\tIt isn\'t.\t1\t1\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "deep"
    (folder / "rte").mkdir(parents=True)
    for name, rows in (("piqa", CHOICES), ("winogrande", CONTEXTS), ("words", WORDS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "hellaswag.json").write_text(json.dumps(HELLASWAG))
    (folder / "rte" / "dev.tsv").write_text(RTE)
    return tmp_path / "data"


def test_named_tasks_have_the_wording_of_lm_eval(data: Path) -> None:
    piqa, winogrande, hellaswag, rte = load_tasks(["piqa", "winogrande", "hellaswag", "rte"], data)
    assert [task.kind for task in (piqa, winogrande, hellaswag, rte)] == ["choices", "contexts", "choices", "choices"]
    assert piqa.documents[0]["query"] == "Question: is water wet?\nAnswer:"
    assert piqa.documents[2]["choices"] == ["a stone", "a star of the usual kind"]
    assert winogrande.documents[0] == CONTEXTS[0]
    assert hellaswag.documents == (
        {"query": "How to sit. Find a chair. Look.", "choices": ["Sit.", "Stand up. Then go."], "gold": 1},
    )
    assert rte.documents[0]["query"] == 'A "cat" sat.\nQuestion: A cat sat. True or False?\nAnswer:'
    assert [document["gold"] for document in rte.documents] == [0, 1]
    assert len(piqa.sha256) == 64


def test_a_file_of_ones_own(data: Path) -> None:
    (task,) = load_tasks([str(data / "deep" / "words.jsonl")], None)
    assert (task.name, task.kind, task.source) == ("words", "last word", "words.jsonl")
    assert task.documents == (
        {"context": "once upon a", "continuation": "time"},
        {"context": "the quick brown", "continuation": "fox"},
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"question": "x"}', "fields question; a task file has one JSON object a line"),
        ('{"query": "x", "choices": ["a", "b"], "gold": 2}', "document 1: gold is 2, not the number of one of the 2"),
        ('{"query": "x", "choices": ["a", "b"], "gold": true}', "gold is True"),
        ('{"query": "x", "choices": ["a"], "gold": 0}', "at least two texts"),
        ('{"query": "x", "choices": ["a", 3], "gold": 0}', "choices is 3, not a text"),
        ('{"query": " ", "choices": ["a", "b"], "gold": 0}', "query is ' ', not a text"),
        ('{"text": "one"}', "context is '', not a text"),
        ("", "holds no documents"),
    ],
)
def test_broken_files(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        load_tasks([str(tmp_path / "t.jsonl")], None)


def test_what_is_missing_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"task copa: no copa\.jsonl in .*--data DIR names"):
        load_tasks(["copa"], data)
    with pytest.raises(UsageError, match=r"task piqa: there is no folder .*; --data DIR"):
        load_tasks(["piqa"], tmp_path / "nowhere")
    with pytest.raises(UsageError, match="task piqa: no folder of task files was given; --data DIR"):
        load_tasks(["piqa"], None)
    with pytest.raises(UsageError, match="task 'mmlu' is neither one of piqa, arc_easy"):
        load_tasks(["mmlu"], data)
    with pytest.raises(UsageError, match="piqa is given twice"):
        load_tasks(["piqa", "piqa"], data)
    with pytest.raises(UsageError, match="no tasks; name some of"):
        load_tasks([], data)
    (data / "deep" / "piqa.jsonl").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8 at byte 0"):
        load_tasks(["piqa"], data)

    def absent(_: str) -> str:
        raise tasks_module.PackageNotFoundError

    monkeypatch.setattr(tasks_module, "version", absent)
    with pytest.raises(UsageError, match=r"needs lm-eval: pip install 'thinfer\[eval\]'"):
        tasks_module.require_harness()
    assert set(KNOWN) == {"piqa", "arc_easy", "winogrande", "boolq", "hellaswag", "rte", "copa"}


def reference_scores(llm: LLM, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Log-likelihoods from one plain run for each pair."""
    from thinfer.engine.runtime import Work

    scores = []
    for context, continuation in pairs:
        ids, whole = llm.encode(context), llm.encode(context + continuation)
        sequence = llm.engine.new_sequence()
        (logits,) = llm.engine.step([Work(sequence, whole[:-1], logits="all")])
        llm.engine.free(sequence)
        rows = logits[len(ids) - 1 :].astype(np.float64)
        log_p = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        target = np.array(whole[len(ids) :])
        scores.append((log_p[np.arange(len(target)), target].sum(), bool((rows.argmax(axis=1) == target).all())))
    return scores


def test_metrics_follow_from_the_log_likelihoods(
    data: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_tasks(["piqa", "winogrande", str(data / "deep" / "words.jsonl")], data)
    with LLM(tiny_folder, threads=1, activations="f32", kv_type="f32") as llm:
        result = score_tasks(llm, loaded).to_dict()
        limited = score_tasks(llm, loaded[:1], limit=3).to_dict()
        right, right_norm = [], []
        for row in CHOICES:
            query = row["query"].rstrip() + "\nAnswer:"
            sums = [s for s, _ in reference_scores(llm, [(query, f" {choice}") for choice in row["choices"]])]
            right.append(int(np.argmax(sums)) == row["gold"])
            lengths = [len(choice) for choice in row["choices"]]
            right_norm.append(int(np.argmax(np.array(sums) / lengths)) == row["gold"])
        contexts = []
        for row in CONTEXTS:
            pairs = [(option, " " + row["continuation"]) for option in row["context_options"]]
            contexts.append(int(np.argmax([s for s, _ in reference_scores(llm, pairs)])) == row["gold"])
        words = reference_scores(llm, [("once upon a", " time"), ("the quick brown", " fox")])
    piqa = result["results"]["piqa"]
    assert (piqa["acc"], piqa["acc_norm"]) == (np.mean(right), np.mean(right_norm))
    assert piqa["acc_stderr"] == pytest.approx(np.std(right, ddof=1) / np.sqrt(len(right)))
    assert piqa["example"] == ["Question: is water wet?\nAnswer:", " yes"]
    assert result["results"]["winogrande"]["acc"] == np.mean(contexts)
    last = result["results"]["words"]
    assert last["acc"] == np.mean([greedy for _, greedy in words])
    assert last["perplexity"] == pytest.approx(np.exp(-np.mean([s for s, _ in words])), rel=1e-4)
    assert result["mean_acc"] == pytest.approx(np.mean([piqa["acc"], np.mean(contexts), last["acc"]]))
    assert (limited["results"]["piqa"]["scored"], limited["results"]["piqa"]["documents"]) == (3, 5)
    assert limited["results"]["piqa"]["acc"] == pytest.approx(np.mean(right[:3]))
    assert result["bos"] is True
    assert "it/s" not in capfd.readouterr().err


def test_a_model_that_predicts_nan_has_no_accuracy(data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, broken / "model.safetensors")
    with LLM(broken, threads=1) as llm, pytest.raises(CheckFailed, match="predicts NaN"):
        score_tasks(llm, load_tasks(["piqa"], data))


def test_command(data: Path, tiny_folder: Path) -> None:
    def run(*arguments: str) -> Any:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("THINFER")}
        command = [sys.executable, "-m", "thinfer", "eval", "tasks", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run(str(tiny_folder), "--tasks", "piqa, winogrande", "--data", str(data), "-t", "1", "-o", "json", "-q")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["results"]) == {"piqa", "winogrande"}
    assert result["harness"].startswith("lm-eval ")
    assert "it/s" not in done.stderr
    missing = run(str(tiny_folder), "--tasks", "copa", "--data", str(data))
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
