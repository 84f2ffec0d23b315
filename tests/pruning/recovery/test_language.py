"""Text as batches: every token once a pass, the same batch for the same number."""

import pytest
import torch

from thinfer.errors import UsageError
from thinfer.pruning.recovery.language import next_token_loss, text_batches


def encode(text):
    return list(text.encode())


def test_every_pass_has_every_window_once_in_another_order():
    text = "".join(chr(97 + index % 26) for index in range(95))
    batches = text_batches(encode, text, length=10, batch=3, seed=1, bos_id=1)
    assert batches.windows.shape == (10, 10)
    assert bool((batches.windows[:, 0] == 1).all())
    assert batches.windows[:, 1:].flatten().tolist() == encode(text)[:90]
    rows = torch.cat([batches(number) for number in range(10)]).tolist()
    first, second, third = (sorted(rows[start : start + 10]) for start in (0, 10, 20))
    assert first == second == third == sorted(batches.windows.tolist())
    assert rows[:10] != rows[10:20]
    assert torch.equal(batches(7), batches(7))
    again = text_batches(encode, text, length=10, batch=3, seed=2, bos_id=1)
    assert not torch.equal(again(0), batches(0))


def test_short_documents_are_packed(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join('{"text": "abc"}' for _ in range(8)))
    batches = text_batches(encode, path, length=12)
    assert batches.windows.tolist() == [encode("abcabcabcabc")] * 2
    assert batches.source == "text.jsonl"


def test_a_short_text_is_refused():
    with pytest.raises(UsageError, match="has 3 tokens, less than one window of 8"):
        text_batches(encode, "abc", length=8)


def test_the_loss_skips_the_first_token_of_a_window():
    logits, ids = torch.randn(2, 4, 5), torch.randint(0, 5, (2, 4))
    chosen = [-logits[row, place].log_softmax(-1)[ids[row, place + 1]] for row in range(2) for place in range(3)]
    assert next_token_loss(logits, ids).item() == pytest.approx(torch.stack(chosen).mean().item(), rel=1e-5)
