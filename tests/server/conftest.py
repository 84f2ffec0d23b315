"""One server for the tests that only talk to it."""

import pytest

from server.serving import running_server
from tiny_llama import write_tiny_llama

# The tiny model's own template, with what templates that know tools do: they print the schemas and earlier calls.
TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|user|>{% for t in tools %}{{ t['function'] | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ c['function']['arguments']['city'] }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "llama", context=1024)


@pytest.fixture(scope="session")
def server(served_folder):
    with running_server(served_folder, engine={"chat_template": TOOL_TEMPLATE}, ping_seconds=0.2) as url:
        yield url
