"""Token masks: only what a schema allows, and end tokens alone at its end."""

import json

import numpy as np
import pytest

from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.server.constrain import ANY_OBJECT, Grammars
from thinfer.server.failures import ApiError
from thinfer.text.tokenizer import Tokenizer

VOCAB = 260
EOS = 257


@pytest.fixture(scope="module")
def tokenizer(served_folder):
    checkpoint = open_checkpoint(served_folder)
    yield Tokenizer.from_checkpoint(checkpoint)
    checkpoint.close()


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, {EOS}, VOCAB)


def follow(constraint, tokenizer, text):
    for token in tokenizer.encode(text, add_special=False):
        assert constraint.mask()[token], f"{text!r} is not allowed"
        constraint.accept(token)


def test_a_text_that_fits_is_allowed_and_then_ends(grammars, tokenizer):
    make = grammars.json_schema({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, "x")
    constraint = make()
    follow(constraint, tokenizer, '{"a": 2}')
    mask = constraint.mask()
    assert mask.shape == (VOCAB,)
    assert mask[EOS]
    assert not mask[tokenizer.token_id("<s>")]
    constraint.accept(EOS)
    assert np.flatnonzero(constraint.mask()).tolist() == [EOS]


def test_what_does_not_fit_is_masked(grammars, tokenizer):
    constraint = grammars.json_schema({"enum": ["ab", "ac"]}, "x")()
    follow(constraint, tokenizer, '"a')
    allowed = [tokenizer.token_bytes(token) for token in np.flatnonzero(constraint.mask())]
    assert allowed == [b"b", b"c"]


def test_constraints_of_one_schema_are_independent(grammars, tokenizer):
    make = grammars.json_schema({"enum": ["ab", "ac"]}, "x")
    first, second = make(), make()
    follow(first, tokenizer, '"ab"')
    follow(second, tokenizer, '"ac"')


def test_random_walks_give_valid_json(grammars, tokenizer):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    make = grammars.json_schema(schema, "x")
    rng = np.random.default_rng(0)
    for _ in range(20):
        constraint, ids = make(), []
        while not ids or ids[-1] != EOS:
            ids.append(int(rng.choice(np.flatnonzero(constraint.mask()))))
            constraint.accept(ids[-1])
        value = json.loads(tokenizer.decode(ids))
        assert 0 <= value["n"] <= 99
        assert value["b"] in (True, False)


def test_any_object_is_an_object(grammars, tokenizer):
    constraint = grammars.json_schema(ANY_OBJECT, "x")()
    follow(constraint, tokenizer, '{"x": [1, {"y": "é\\n"}], "z": null}')


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/$defs/none"}, {"pattern": "(", "type": "string"}, {"$ref": "#"}]
)
def test_a_wrong_schema_is_a_400(grammars, schema):
    with pytest.raises(ApiError, match="x: ") as caught:
        grammars.json_schema(schema, "x")
    assert caught.value.status == 400


def test_a_model_without_an_end_cannot_be_constrained(tokenizer):
    with pytest.raises(UnsupportedError, match="no end token"):
        Grammars(tokenizer, set(), VOCAB).json_schema(ANY_OBJECT, "x")
