"""Jinja in a sandbox with limits, and what chat templates expect: the environment of transformers."""

import datetime
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from thinfer.errors import CheckpointError, UsageError
from thinfer.text.template_limits import MAX_SOURCE, LimitedEnvironment, TooMuch


class _Refused(TemplateError):
    """What a template raises on purpose, with a message for the user."""


class _Generation(Extension):
    """The ``{% generation %}`` block, which marks an assistant's text for training, prints its body."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, where: str) -> tuple[Template, str]:
    """Compile a chat template.

    Args:
        source: The Jinja text.
        where: Where it is from, for messages.

    Returns:
        The template, and all text that stands in it literally.

    Raises:
        CheckpointError: Not valid Jinja.

    Example:
        >>> compile_template("{{ bos_token }}<|user|>", "test")[1]
        '<|user|>'
    """
    if len(source) > MAX_SOURCE:
        raise CheckpointError(
            f"{where}: {len(source)} characters are no chat template; pass another with --chat-template"
        )
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        tree = environment.parse(source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        template = environment.from_string(environment.limited(tree))
    except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:  # the last three: absurdly nested ones
        raise CheckpointError(
            f"{where}: not a valid Jinja template: {error}; pass another with --chat-template"
        ) from error
    return template, "\0".join(texts)


def render_template(template: Template, variables: Mapping[str, Any], where: str) -> str:
    """Render a template.

    Raises:
        UsageError: The template refuses the messages, with its own words.
        CheckpointError: The template fails, or wants more steps, time or text than any rendering should.
    """
    environment: Any = template.environment
    try:
        with environment.limits():
            return template.render(variables)
    except _Refused as error:
        raise UsageError(f"{where} refuses these messages: {error}") from error
    except TooMuch as error:
        raise CheckpointError(
            f"{where} was stopped: {error}; shorten the messages, or pass another with --chat-template"
        ) from error
    except Exception as error:  # a template can raise whatever Python can
        raise CheckpointError(
            f"{where} fails: {type(error).__name__}: {error}; check the messages, or pass another with --chat-template"
        ) from error


def _refuse(message: str) -> str:
    raise _Refused(message)


def _now(form: str) -> str:
    # Local time, as transformers gives it: templates print the user's date.
    return datetime.datetime.now().astimezone().strftime(form)


# Jinja's own filter escapes HTML, which would garble a prompt.
_to_json = partial(json.dumps, ensure_ascii=False)
