"""Templates that nobody should render end soon, in an error; those of models render as transformers renders them."""

import resource
import threading
import time
from pathlib import Path

import pytest

from thinfer.errors import CheckpointError, UsageError
from thinfer.text import template_limits
from thinfer.text.sandbox import compile_template, render_template

LOOP = "{% for i in range(99999) %}"
HOSTILE = {
    "nested loops": LOOP * 4 + "{% endfor %}" * 4,
    "loops that do nothing": LOOP + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "endless output": LOOP + LOOP + "{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "output of text": LOOP + LOOP + "x" * 1000 + "{% endfor %}{% endfor %}",
    "output kept in a block": "{% set a %}" + LOOP + "x" * 10_000 + "{% endfor %}{% endset %}{{ a|length }}",
    "repeated text": "{{ 'a' * 10 ** 10 }}",
    "repeated list": "{% set a = [0] * 10 ** 9 %}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
    "a large product": "{% set n = namespace(x=3) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='aa') %}"
    + LOOP
    + "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "doubling by a filter": "{% set n = namespace(x='aa') %}"
    + LOOP
    + "{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}",
    "hoarding copies": "{% set n = namespace(l=[], s='a' * 10 ** 7) %}"
    + LOOP
    + "{% set n.l = n.l + [n.s[1:]] %}{% endfor %}",
    "references that double": "{% set n = namespace(x=[1]) %}"
    + LOOP
    + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "comparing them": "{% set n = namespace(x=[1], y=[1]) %}"
    + "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "namespaces that double": "{% set n = namespace(x=namespace()) %}{% for i in range(60) %}"
    + "{% set m = namespace(a=n.x, b=n.x) %}{% set n.x = m %}{% endfor %}{{ n.x }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}"
    "{% endif %}{% endfor %}",
    "center": "{{ 'a'|center(10 ** 10) }}",
    "center of a constant": "{{ 'a'|center(10000000000) }}",
    "constants in a condition": "{% if 'a'|center(10000000000) %}{% endif %}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ ('\t' * 10 ** 6).expandtabs(10 ** 6) }}",
    "indent": "{{ ('a\n' * 10 ** 6)|indent(10 ** 6) }}",
    "indent by text": "{{ ('a\n' * 10 ** 6)|indent('x' * 10 ** 6) }}",
    "join": "{{ ('x' * 10 ** 6).join('a' * 10 ** 6) }}",
    "join of many": "{{ range(99999)|map('default', 'a')|list|join('x' * 10 ** 7) }}",
    "join of what is missing": "{{ ([{}] * 99999)|map(attribute='a', default='x' * 10 ** 7)|join }}",
    "sum of lists": "{{ ([[0] * 1000] * 1000)|sum(start=[])|length }}{{ ([[0] * 100] * 30000)|sum(start=[])|length }}",
    "printf width": "{{ '%10000000000d' % 1 }}",
    "printf width given": "{{ '%*d' % (10 ** 10, 1) }}",
    "printf filter": "{{ '%10000000000d'|format(1) }}",
    "format width": "{{ '{:>10000000000}'.format(1) }}",
    "format width given": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "format of many": "{{ ('{0}' * 10 ** 5).format('x' * 10 ** 5) }}",
    "translate": "{{ ('a' * 10 ** 6).translate({97: 'x' * 10 ** 6}) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10) }}",
    "tojson indent": "{{ ([0] * 10 ** 5)|tojson(indent=10 ** 5) }}",
    "slice": "{{ [1]|slice(10 ** 9)|list|length }}",
    "batch": "{{ [1]|batch(10 ** 9, 0)|list|length }}",
    "in, of many": "{{ ([1.5] * 10 ** 6)|select('in', [2.5] * 10 ** 6)|list|length }}",
    "a long text of the sandbox": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.fixture(autouse=True)
def bounded_memory():
    """A template that fills the memory must not take the machine with it: here it would be a MemoryError."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


def render(source, **variables):
    return render_template(compile_template(source, "m.gguf: chat template")[0], variables, "m.gguf: chat template")


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_end_soon_in_an_error(source, monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 0.3)
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="chat template") as caught:
        render(source)
    assert "MemoryError" not in str(caught.value)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    "source",
    [
        "x" * (2 << 20),
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{% for i in x %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 9000 + ")" * 9000 + " }}",
    ],
    ids=["long", "deep", "many blocks", "parentheses"],
)
def test_absurd_sources_are_refused_when_compiled(source):
    with pytest.raises(CheckpointError, match="chat template"):
        compile_template(source, "m.gguf: chat template")


def test_the_real_limits_end_a_loop():
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=r"was stopped: more than (300000 steps|5 seconds)"):
        render(HOSTILE["nested loops"])
    assert time.process_time() - begin < 10


def test_a_refusal_with_nested_references_is_refused_itself(monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 1.0)
    nested = "{% set n = namespace(x=namespace()) %}{% for i in range(60) %}"
    nested += "{% set m = namespace(a=n.x, b=n.x) %}{% set n.x = m %}{% endfor %}{{ raise_exception(n.x) }}"
    with pytest.raises(CheckpointError, match="stopped"):
        render(nested)
    with pytest.raises(UsageError, match="only users"):
        render("{{ raise_exception('only users') }}")


def test_what_templates_do_still_works():
    source = (
        "{% macro show(m) %}{{ m.role }}={{ m['content'] | trim }}{% endmacro %}"
        "{%- set ns = namespace(n=0, last='') -%}"
        "{% for m in messages[1:] if m.content %}{% set ns.n = ns.n + loop.index %}"
        "{{ loop.first ~ '/' ~ loop.last ~ '/' ~ loop.length }} {{ show(m) }};"
        "{%- if loop.index0 > 5 %}{% break %}{% endif %}{% endfor %}"
        "{% for key, value in {'a': 1, 'b': (2, 3)}.items() %}{{ key }}{{ value }}{% endfor %}"
        "{{ ns.n }}{{ 'ab'[::-1] }}{{ messages[-1]['content'].split('o')[0].lstrip() }}{{ [1, 'x'] + [none] }}"
        "{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}|{}'.format(1, 'b') }}{{ ['a', 'b'] | join(', ') }}"
        "{{ ', '.join(['c', 'd']) }}"
        "{{ tools | tojson(indent=2) }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'x' * 3 }}"
        "{{ messages | map(attribute='role') | unique | list }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": " hello "},
        {"role": "user", "content": "yo"},
    ]
    variables = {"messages": messages, "tools": [{"name": "f"}]}
    from jinja2 import Environment
    from jinja2.ext import loopcontrols

    plain = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])  # noqa: S701
    plain.filters["tojson"] = lambda value, indent=None: __import__("json").dumps(value, indent=indent)
    assert render(source, **variables) == plain.from_string(source).render(**variables)


def test_a_long_conversation_is_far_from_the_limits():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content | trim + '<|end|>' }}"
        "{% else %}{{ '<|assistant|>' ~ m['content'].split('</think>')[-1].lstrip('\n') }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 400} for i in range(2000)]
    assert len(render(source, messages=messages)) > 2000 * 1900
    one = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(render(source, messages=one)) > 9_000_000


def test_threads_have_budgets_of_their_own(monkeypatch):
    monkeypatch.setattr(template_limits, "_STEPS", 5000)
    template, _ = compile_template("{% for i in range(2000) %}{% set x = i ~ 'a' %}{% endfor %}done", "t")
    results = []
    threads = [threading.Thread(target=lambda: results.append(render_template(template, {}, "t"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 8
