"""lm-eval's client for completions, against the server, gives what `thinfer eval tasks` gives in process."""

import json

import pytest

from server.serving import running_server
from thinfer import LLM
from thinfer.evals.local_tasks import load_tasks
from thinfer.evals.tasks import harness_task, score_tasks
from tiny_llama import write_tiny_llama

pytest.importorskip("tenacity", reason="lm-eval's clients need it: pip install 'lm-eval[api]'")

CHOICES = [
    {"query": f"Question: {question}\nAnswer:", "choices": choices, "gold": gold}
    for question, choices, gold in [
        ("is water wet?", ["yes", "not at all, never"], 0),
        ("how many legs has a cat?", ["four", "five"], 0),
        ("what is the sun?", ["a stone", "a star of the usual kind"], 1),
        ("who is it?", ["me", "you"], 1),
        ("where?", ["here", "there"], 0),
        ("Grüße?", ["ja", "nein"], 1),
    ]
]
WORDS = [{"text": "once upon a time"}, {"text": "the quick brown fox"}]
OPTIONS = {"threads": 1, "executor": "reference"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Without BOS: lm-eval's own tokenizers put none before a text unless they are told to."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("lm-eval") / "llama")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": False}))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    data = tmp_path_factory.mktemp("tasks")
    for name, rows in (("choices", CHOICES), ("words", WORDS)):
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return load_tasks([str(data / "choices.jsonl"), str(data / "words.jsonl")], None)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_local_completions_equals_the_result_in_process(folder, tasks, batch, monkeypatch):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("TQDM_DISABLE", "1")
    with running_server(folder) as url:
        client = LocalCompletionsAPI(
            model="tiny", base_url=url + "/v1/completions", batch_size=batch, max_length=512, tokenizer_backend="remote"
        )
        served = evaluate(client, {task.name: harness_task(task) for task in tasks}, bootstrap_iters=1)
    with LLM(folder, **OPTIONS) as llm:
        scores = score_tasks(llm, tasks)
        by_itself = evaluate(_in_process(llm), {task.name: harness_task(task) for task in tasks}, bootstrap_iters=1)
    for score in scores.tasks:
        for metric, value in score.metrics.items():
            assert served["results"][score.name][f"{metric},none"] == pytest.approx(value, rel=1e-4), metric
        for over_http, here in zip(served["samples"][score.name], by_itself["samples"][score.name], strict=True):
            for (there, there_best), (own, own_best) in zip(
                over_http["filtered_resps"], here["filtered_resps"], strict=True
            ):
                assert there == pytest.approx(own, abs=1e-4)
                assert there_best == own_best


def _in_process(llm):
    from thinfer.evals.lm_eval_adapter import EngineLM

    return EngineLM(llm)
