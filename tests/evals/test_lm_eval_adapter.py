from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from thinfer import LLM, SamplingParams
from thinfer.errors import ResourceError, UnsupportedError
from thinfer.evals.lm_eval_adapter import EngineLM, _Request, group_requests, token_scores
from tiny_llama import write_tiny_llama

CONTEXT = 48
PAIRS = [
    ("The cat sat on the", " mat"),
    ("The cat sat on the", " roof of the house"),
    ("The cat sat on the ", "mat"),
    ("The cat sat on a", " mat"),
    ("The dog sat on the", " mat"),
    ("The", " end"),
    ("", "alone"),
    ("x", "y"),
    ("A long context that does not fit the model's window, since it has too many letters for it", " cut"),
    ("its context goes", " when the continuation takes all there is"),
    ("Question: is it? <s> </s>\nAnswer:", " no"),
    ("Question: is it? <s> </s>\nAnswer:", " yes"),
    ("The cat sat on the", " mat"),
    ("spaces at the end   ", "x"),
    ("é😀 mid", "dle é😀"),
]


def instances(pairs: list[tuple[str, str]]) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("adapter") / "llama", context=CONTEXT)
    # transformers puts BOS where tokenizer.json says so.
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    tokenizer.save(file)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> list[tuple[float, bool]]:
    """What lm-eval's own adapter gives for transformers' model, one request at a time."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    theirs = HFLM(
        pretrained=model,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        batch_size=1,
        add_bos_token=True,
        device="cpu",
    )
    # Text never becomes control tokens here; theirs reads the spelling of one as one.
    pairs = [(context.replace("<s> </s>", ""), continuation) for context, continuation in PAIRS]
    return [theirs.loglikelihood(instances([pair]), disable_tqdm=True)[0] for pair in pairs]


def scores(folder: Path, pairs: list[tuple[str, str]], **options: Any) -> tuple[list[tuple[float, bool]], EngineLM]:
    with LLM(folder, threads=1, activations="f32", kv_type="f32", **options) as llm:
        adapter = EngineLM(llm)
        return adapter.loglikelihood(instances(pairs)), adapter


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 128}, {"chunk": 7}, {"executor": "reference"}], ids=str)
def test_log_likelihoods_equal_transformers(folder: Path, oracle: list[tuple[float, bool]], options: Any) -> None:
    pairs = [(context.replace("<s> </s>", ""), continuation) for context, continuation in PAIRS]
    ours, adapter = scores(folder, pairs, **options)
    for pair, (score, greedy), (expected, greedy_expected) in zip(pairs, ours, oracle, strict=True):
        assert score == pytest.approx(expected, abs=2e-3), pair
        assert greedy == greedy_expected, pair
    # Two pairs differ only in which side has the space between them.
    assert len({round(score, 3) for score, _ in ours}) == len(set(pairs)) - 1
    assert adapter.truncated == 2


def test_greedy_continuations_are_known(folder: Path) -> None:
    with LLM(folder, threads=1, activations="f32", kv_type="f32") as llm:
        for context in "abcdefghijklmnopqrstuvwxyz":
            output = llm.generate(context, SamplingParams(temperature=0.0, max_tokens=1))
            if llm.tokenizer.encode(output.text, add_special=False) == list(output.token_ids):
                break
        wrong = "a" if output.text != "a" else "b"
        results = EngineLM(llm).loglikelihood(instances([(context, output.text), (context, wrong)]))
    assert [greedy for _, greedy in results] == [True, False]
    assert results[0][0] > results[1][0]


def test_a_continuation_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(ResourceError, match="a continuation of 49 tokens does not fit the context of 48"):
        scores(folder, [("a", "b" * 49)])


def test_order_does_not_matter(folder: Path) -> None:
    there, _ = scores(folder, PAIRS)
    back, _ = scores(folder, PAIRS[::-1])
    np.testing.assert_allclose([s for s, _ in there], [s for s, _ in back[::-1]], atol=1e-4)


def test_control_tokens_in_a_text_stay_text(folder: Path) -> None:
    with LLM(folder, threads=1) as llm:
        adapter = EngineLM(llm)
        ids = adapter.tok_encode("<s>a</s>")
        assert ids[0] == llm.tokenizer.bos_id
        assert llm.tokenizer.special_ids.isdisjoint(ids[1:])
        assert adapter.tok_encode("a", add_special_tokens=False) == ids[4:5]
        assert adapter.prefix_token_id == llm.tokenizer.bos_id
        for call in (adapter.generate_until, adapter.loglikelihood_rolling):
            with pytest.raises(UnsupportedError, match="not s"):
                call([])


def test_token_scores_are_log_softmax() -> None:
    logits = (np.random.default_rng(0).standard_normal((50, 1000)) * 20).astype(np.float32)
    targets = np.concatenate([logits[:25].argmax(axis=1), np.arange(25)])
    found, best = token_scores(logits, targets)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)[torch.arange(50), torch.from_numpy(targets)]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert best[:25].all()
    assert not best[25:].all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=8), st.integers(1, 7)), max_size=12),
)
def test_groups_share_what_they_say(texts: list[tuple[list[int], int]]) -> None:
    requests = [_Request(i, tuple(ids), min(scored, len(ids) - 1)) for i, (ids, scored) in enumerate(texts)]
    groups = group_requests(requests)
    assert sorted(r.index for group in groups for r in group.requests) == list(range(len(requests)))
    for group in groups:
        assert len({request.tokens[: group.shared] for request in group.requests}) == 1
        assert all(group.shared < len(request.tokens) - request.scored for request in group.requests)


def test_choices_of_one_context_share_it() -> None:
    context = tuple(range(20))
    requests = [_Request(i, (*context, i, i), 2) for i in range(4)] + [_Request(4, (0, 1, 9, 9, 9, 9, 9, 9), 1)]
    groups = group_requests(requests)
    assert sorted((len(group.requests), group.shared) for group in groups) == [(1, 6), (4, 19)]
