"""Chat templates: messages to prompt ids, with the model's own Jinja template in a sandbox.

Text of users must not become control tokens. Before rendering, every control token spelled inside a message is put
between two marks, and a message that begins or ends with a part of such a spelling gets a mark there, so that
neighbours cannot complete it. The marks are random for each rendering, so no message can forge one. After rendering
they are taken out, and the prompt is cut inside every control token that the marks show to be the user's: it stays
text. Messages without such spellings are rendered untouched, so templates see, test and trim what the user wrote.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from thinfer.errors import CheckpointError, UnsupportedError, UsageError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.formats.json_file import read_json
from thinfer.text.sandbox import compile_template, render_template
from thinfer.text.tokenizer import Tokenizer

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_PRIVATE_USE = range(0xE000, 0xF8FF)
_MARK_LENGTH = 10
_KINDS = "\ue000\ue001\ue002"
_END = "\ue003"


class ChatTemplate:
    """The chat template of one model, bound to its tokenizer.

    Args:
        source: The Jinja text.
        tokenizer: The tokenizer whose control tokens the template writes.
        where: Where the template is from, for messages.

    Raises:
        CheckpointError: The template is no valid Jinja.

    Example:
        >>> template = ChatTemplate.from_checkpoint(checkpoint, tokenizer)  # doctest: +SKIP
        >>> template.encode([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
        [1, 9690, 198, ...]
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = "chat template") -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._where = where
        self._template, literals = compile_template(source, where)
        added = tokenizer.added_tokens.values()
        # A single character cannot be cut; such tokens are whitespace, which templates write as ordinary text.
        spellings = [t.content for t in added if len(t.content) > 1]
        self._any_added = _alternatives(spellings)
        special = {t.content for t in added if t.special}
        in_template = {s for s in spellings if s in literals and not s.isspace()}
        # An assistant's message may hold the markup that the model itself writes, such as <think>, but no more.
        self._guards = {
            False: _Guard([s for s in spellings if s in special or s in in_template]),
            True: _Guard([s for s in spellings if s in special]),
        }

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, tokenizer: Tokenizer, override: str | None = None, name: str | None = None
    ) -> "ChatTemplate":
        """Return the template of a checkpoint.

        Args:
            checkpoint: The checkpoint.
            tokenizer: Its tokenizer.
            override: Jinja text to use instead.
            name: Which of several named templates; default: the unnamed one, or the one named ``default``.

        Raises:
            UnsupportedError: The checkpoint has no chat template, or none of that name.
        """
        if override is not None:
            return cls(override, tokenizer, "the given chat template")
        templates = stored_templates(checkpoint)
        if not templates:
            raise UnsupportedError(
                f"{checkpoint.path}: the model has no chat template; pass one (--chat-template FILE, or"
                " chat_template=TEXT in Python), or give the model plain text instead of messages"
            )
        wanted = name or "default"
        if wanted not in templates:
            raise UnsupportedError(
                f"{checkpoint.path}: no chat template named {wanted!r}; there are {', '.join(sorted(templates))}"
            )
        return cls(templates[wanted], tokenizer, f"{checkpoint.path}: chat template {wanted}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **variables: Any,
    ) -> list[str]:
        """Render messages to pieces of a prompt.

        Args:
            messages: The messages, each with ``role`` and ``content``.
            add_generation_prompt: End with the opening of an assistant message.
            tools: JSON schemas of tools, where the template knows tools.
            continue_final: Leave the last message open, so that the model goes on with it.
            variables: Further variables of the template.

        Returns:
            The pieces; joined they are the prompt. Control tokens may be parsed inside a piece, never across two.

        Raises:
            UsageError: No messages, a message without a proper role, what the template itself refuses, or a last
                message to continue that the template does not show.

        Example:
            >>> template.render([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
            ['<s>[INST] Hi [/INST]']
        """
        _check(messages)
        marks = _Marks()
        shown = {
            **self._tokenizer.named_tokens,
            **_marked(variables, self._guards[False], marks),
            "messages": [_message(m, self._guards[m["role"] == "assistant"], marks) for m in messages],
            "tools": _marked(list(tools), self._guards[False], marks) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final:
            last = shown["messages"][-1]
            last["content"] = f"{last.get('content', '')}{marks.end}"
        rendered = render_template(self._template, shown, self._where)
        if continue_final:
            rendered, found, _ = rendered.rpartition(marks.end)
            if not found:
                raise UsageError(f"{self._where} leaves the last message out or rewrites it: it cannot be continued")
        return self._pieces(rendered, marks)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Render messages to prompt ids, with exactly one BOS where the model wants one; arguments as ``render``."""
        return self.encode_pieces(self.render(messages, add_generation_prompt, tools, continue_final, **variables))

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Prompt ids of what `render` returned."""
        ids = [i for piece in pieces for i in self._tokenizer.encode(piece, add_special=False, parse_special=True)]
        bos = self._tokenizer.bos_id
        if bos is not None and self._tokenizer.adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _pieces(self, rendered: str, marks: "_Marks") -> list[str]:
        text, opened, closed, edges = marks.take_out(rendered)
        positions = sorted(opened | closed | edges)
        pieces, start = [], 0
        while (found := self._next_of_user(text, start, positions, opened, closed)) is not None:
            pieces.append(text[start : found + 1])
            start = found + 1
        pieces.append(text[start:])
        return [piece for piece in pieces if piece]

    def _next_of_user(
        self, text: str, start: int, positions: list[int], opened: set[int], closed: set[int]
    ) -> int | None:
        """Return where the next added token begins that a user's text makes or helps to make."""
        if not positions:
            return None
        for match in self._any_added.finditer(text, start):
            begin, end = match.span()
            whole = begin in opened and end in closed
            if whole or any(begin < position < end for position in positions):
                return begin
        return None


def stored_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the chat templates of a checkpoint by name; the usual one is called ``default``.

    Raises:
        CheckpointError: A template file that is not UTF-8, or tokenizer_config.json is corrupt.
    """
    if checkpoint.kind == "gguf":
        key = "tokenizer.chat_template"
        values = {k: v for k, v in checkpoint.metadata.items() if k == key or k.startswith(key + ".")}
        return {k.removeprefix(key).lstrip(".") or "default": v for k, v in values.items() if isinstance(v, str) and v}
    folder = checkpoint.path
    config_file = folder / "tokenizer_config.json"
    stored = (read_json(config_file) if config_file.is_file() else {}).get("chat_template")
    templates = {}
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        named = [t for t in stored if isinstance(t, dict)]
        templates = {str(t.get("name")): t["template"] for t in named if isinstance(t.get("template"), str)}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file}: cannot be read as text: {error}; fetch it again") from error
    return templates


class _Marks:
    """Random marks of private-use characters: before and after a whole spelling, at an edge, where a prompt ends."""

    def __init__(self) -> None:
        nonce = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_MARK_LENGTH))
        self.opening, self.closing, self.edge = (nonce + kind for kind in _KINDS)
        self.end = nonce + _END
        # A template may escape a message as ASCII JSON: the marks must be known there too.
        forms = [mark for plain in (self.opening, self.closing, self.edge) for mark in (plain, json.dumps(plain)[1:-1])]
        self._kind = dict(zip(forms, [kind for kind in _KINDS for _ in range(2)], strict=True))
        self._pattern = re.compile("|".join(map(re.escape, forms)))

    def take_out(self, rendered: str) -> tuple[str, set[int], set[int], set[int]]:
        """Return the text without marks, and where opening, closing and edge marks stood in it."""
        opened: set[int] = set()
        closed: set[int] = set()
        edges: set[int] = set()
        places = dict(zip(_KINDS, (opened, closed, edges), strict=True))
        removed = 0
        for match in self._pattern.finditer(rendered):
            places[self._kind[match[0]]].add(match.start() - removed)
            removed += len(match[0])
        return self._pattern.sub("", rendered), opened, closed, edges


class _Guard:
    """Marks the spellings of some tokens in a user's text."""

    def __init__(self, spellings: list[str]) -> None:
        self._whole = _alternatives(spellings)
        self._heads = {s[:n] for s in spellings for n in range(1, len(s))}
        self._tails = {s[n:] for s in spellings for n in range(1, len(s))}
        self._longest = max(map(len, spellings), default=0)

    def mark(self, text: str, marks: _Marks) -> str:
        body = text.strip()
        if not body:
            return text
        lead, trail = text[: text.index(body)], text[text.index(body) + len(body) :]
        lengths = range(1, min(self._longest, len(body)) + 1)
        # What a template joins to the text, another message for one, could complete these.
        begins = any(body[:n] in self._tails for n in lengths)
        ends = any(body[-n:] in self._heads for n in lengths)
        marked = self._whole.sub(lambda match: marks.opening + match[0] + marks.closing, body)
        return lead + marks.edge * begins + marked + marks.edge * ends + trail


def _alternatives(spellings: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _check(messages: object) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError(f"a chat is a list of messages with role and content, not {messages!r:.60}")
    if not messages:
        raise UsageError("a chat needs at least one message, such as {'role': 'user', 'content': 'Hi'}")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        # Templates paste the role between the marks of control tokens, so it must be a plain word.
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UsageError(f"a message's role must be a word such as system, user or assistant, not {role!r}")


def _message(message: Mapping[str, Any], guard: _Guard, marks: _Marks) -> dict[str, Any]:
    """Return a marked copy of a message; keys without a value are left out, since templates would print None."""
    fields = {key: value for key, value in message.items() if value is not None and key != "role"}
    return {"role": message["role"], **_marked(fields, guard, marks)}


def _marked(value: Any, guard: _Guard, marks: _Marks) -> Any:
    """Copy plain data with every string marked, keys too."""
    if isinstance(value, str):
        return guard.mark(str(value), marks)
    if isinstance(value, Mapping):
        return {_marked(str(key), guard, marks): _marked(item, guard, marks) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, guard, marks) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise UsageError(f"a chat message may hold text, numbers, lists and objects, not {type(value).__name__}")
