"""Tools: the schema that forces a call, and calls found in what a model writes.

Two ways of writing are known: JSON between ``<tool_call>`` tags (Hermes, Qwen), and JSON that is the whole answer
(Llama 3.1, and what `call_schema` forces). Anything else, and a call of a function that was not offered, stays text.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinfer.server.protocol import Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# What some templates have the model write before the JSON.
_LEADS = ("<|python_tag|>", "[TOOL_CALLS]")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's form, with a new id."""
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def call_schema(tools: Sequence[Tool], answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON schema of one call of one of the tools, or of an answer where one is given."""
    parts: dict[str, Any] = {}
    forms: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        key = f"tool{index}"
        parts[key] = _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/{key}")
        forms.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    if answer is not None:
        parts["answer"] = _moved(answer, "#/$defs/answer")
        forms.append({"$ref": "#/$defs/answer"})
    return {"$defs": parts, "anyOf": forms}


def _moved(schema: Any, place: str) -> Any:
    """A copy of a schema whose references to itself follow it to another place."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, place) for key, value in schema.items() if key not in ("$schema", "$id")}
        target = schema.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            moved["$ref"] = place + target[1:]
        return moved
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    return schema


class CallParser:
    """Separates calls from text as it comes; text that may become a call is held back.

    Args:
        names: the functions that were offered.

    Example:
        >>> parser = CallParser({"f"})
        >>> parser.push('Well. <tool_call>{"name": "f", "arguments": {}}</tool')
        ['Well. ']
        >>> parser.push("_call>") + parser.finish()
        [Call(name='f', arguments='{}')]
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._held = ""
        self._start = True
        self._after_call = False

    def push(self, text: str) -> list[str | Call]:
        """What is certain after this text."""
        self._held += text
        found: list[str | Call] = []
        if self._start:
            begin = self._held.lstrip()
            if not begin or begin[0] in "{[" or any(lead.startswith(begin) for lead in _LEADS):
                return found
            if any(begin.startswith(lead) for lead in _LEADS):
                return found
            self._start = False
        while True:
            before, tag, rest = self._held.partition(_OPEN)
            if not tag:
                keep = next((n for n in range(len(_OPEN) - 1, 0, -1) if before.endswith(_OPEN[:n])), 0)
                self._held = before[len(before) - keep :]
                self._say(found, before[: len(before) - keep])
                return found
            inside, end, after = rest.partition(_CLOSE)
            if not end:
                self._held = tag + rest
                self._say(found, before)
                return found
            self._held = after
            call = self._call(_parsed(inside))
            if call is None:
                self._say(found, before + tag + inside + end)
            else:
                self._say(found, before)
                self._after_call = True
                found.append(call)

    def finish(self) -> list[str | Call]:
        """What was held back, when the text ends."""
        held, self._held = self._held, ""
        body = held.strip()
        for lead in _LEADS:
            body = body.removeprefix(lead).lstrip()
        if self._start:
            values = _values(body)
            calls = [call for value in values if (call := self._call(value)) is not None]
            if values and len(calls) == len(values):
                return [*calls]
        elif held.startswith(_OPEN):
            # A model that ends right after its call leaves the closing tag out.
            call = self._call(_parsed(held.removeprefix(_OPEN)))
            if call is not None:
                return [call]
        found: list[str | Call] = []
        self._say(found, held)
        return found

    def _say(self, found: list[str | Call], text: str) -> None:
        if self._after_call:
            # Line ends that models write between and after calls mean nothing.
            text = text.lstrip()
        if text:
            self._after_call = False
            found.append(text)

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        if not set(value) <= {"name", "arguments", "parameters", "type", "id"}:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if not isinstance(arguments, dict):
            return None
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _values(text: str) -> list[Any]:
    """All JSON values that a text consists of, those of a list one by one; [None] when there is anything else."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    at = 0
    while at < len(text):
        if text[at] in "; \n\r\t":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [None]
        values.extend(value if isinstance(value, list) else [value])
    return values
