"""schemathesis: requests made from the OpenAPI document, right and wrong ones, and what the answers must be."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

pytestmark = pytest.mark.slow

load_all_checks()
# A right form may still be refused: a model that is not there, a prompt too long, a schema that allows nothing.
CHECKED = [check for check in CHECKS.get_all() if check.__name__ != "positive_data_acceptance"]
OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/tokenizer_info", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
]


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(server + "/openapi.json")


def test_all_operations_are_tried(document):
    shown = {(result.ok().path, result.ok().method.upper()) for result in document.get_all_operations()}
    assert shown == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_the_server_keeps_to_its_document(document, path, method, mode):
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and operation.body.items == []:
        pytest.skip("it takes nothing that could be wrong")
    few = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

    @few
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=CHECKED, timeout=60)

    check()
