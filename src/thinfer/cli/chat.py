"""The chat of ``thinfer run`` on a terminal."""

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from thinfer.cli.options import say

if TYPE_CHECKING:
    from thinfer import LLM, SamplingParams

_HELP = "Ctrl-C stops an answer, Ctrl-D leaves; /clear forgets the conversation"


def converse(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    """Read messages from the terminal and stream the answers, until the end of input."""
    import readline  # noqa: F401  (input() edits lines with it)

    start = [{"role": "system", "content": system}] if system is not None else []
    messages = list(start)
    say([_HELP])
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if text.strip() == "/clear":
            messages = list(start)
        elif text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _answer(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Stream one answer; an interrupted one stays in the conversation as far as it came."""
    parts: list[str] = []
    stopped = threading.Event()
    stream = llm.stream(llm.chat_prompt(messages), params, cancel=stopped)
    try:
        for chunk in stream:
            parts.append(chunk.text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stopped.set()
        deque(stream, maxlen=0)
    print()
    return "".join(parts)
