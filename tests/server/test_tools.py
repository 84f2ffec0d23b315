"""Calls of tools in what models write, and the schema that forces one."""

import json

import pytest

from thinfer.server.protocol import Function, Tool
from thinfer.server.tools import Call, CallParser, call_schema

NAMES = {"get", "put"}


def parse(text, size):
    """The parts of a text that comes in pieces of a size; neighbouring text joined."""
    parser = CallParser(NAMES)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    joined = []
    for part in parts + parser.finish():
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


GET = '{"name": "get", "arguments": {"a": 1}}'
CALL = Call("get", '{"a": 1}')


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain text", ["plain text"]),
        ("", []),
        (f"<tool_call>\n{GET}\n</tool_call>", [CALL]),
        (f"Well: <tool_call>{GET}</tool_call>\n<tool_call>{GET}</tool_call>", ["Well: ", CALL, CALL]),
        (f"<tool_call>{GET}", [CALL]),
        (f"<tool_call>{GET}</tool_call> done", [CALL, "done"]),
        (GET, [CALL]),
        (f" \n{GET}; {GET}", [CALL, CALL]),
        (f"[{GET}, {GET}]", [CALL, CALL]),
        (f"<|python_tag|>{GET}", [CALL]),
        (f"[TOOL_CALLS] [{GET}]", [CALL]),
        ('{"name": "put", "parameters": {}}', [Call("put", "{}")]),
        ('{"name": "put", "arguments": "{\\"x\\": \\"é\\"}"}', [Call("put", '{"x": "é"}')]),
        # Not calls: they stay as they are.
        ('{"name": "other", "arguments": {}}', ['{"name": "other", "arguments": {}}']),
        ('{"name": "get", "arguments": [1]}', ['{"name": "get", "arguments": [1]}']),
        ('{"name": "get", "color": 1}', ['{"name": "get", "color": 1}']),
        ('{"answer": 5}', ['{"answer": 5}']),
        ("{not json", ["{not json"]),
        ("[1] is a note", ["[1] is a note"]),
        ("<tool_call>nothing</tool_call>", ["<tool_call>nothing</tool_call>"]),
        ("<tool_call>cut", ["<tool_call>cut"]),
        ("a < b and <tool", ["a < b and <tool"]),
        (f"The JSON {GET}", [f"The JSON {GET}"]),
        ("[" * 5000, ["[" * 5000]),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text, parts, size):
    assert parse(text, size) == parts


def test_text_comes_as_soon_as_it_is_certain():
    parser = CallParser(NAMES)
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <tool") == [" "]
    assert parser.push("box>") == ["<toolbox>"]


def test_ids_are_new_each_time():
    first, second = CALL.to_dict(), CALL.to_dict()
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "get", "arguments": '{"a": 1}'}


def test_references_follow_their_schema():
    parameters = {"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}}}
    tool = Tool(type="function", function=Function(name="get", parameters=parameters))
    schema = call_schema([tool], {"type": "object"})
    assert schema["$defs"]["tool0"]["properties"]["a"] == {"$ref": "#/$defs/tool0/$defs/x"}
    assert schema["$defs"]["tool0"]["properties"]["b"] == {"$ref": "#/$defs/tool0"}
    assert {"$ref": "#/$defs/answer"} in schema["anyOf"]
    assert json.dumps(parameters).count("tool0") == 0, "the given schema stays as it is"
