"""Chat templates as Hugging Face writes them, in jinja2's sandbox.

A template comes from a model's author, not from the user of this machine: it may neither reach
Python's internals nor change what it is given.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import BundleError, InvalidRequest


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks what training counts: pass what is inside on."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Raises BundleError where the template is not one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise BundleError(f"chat_template.jinja: {error}; rebuild the bundle.") from error


def render(
    template: jinja2.Template, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str]
) -> str:
    """Render up to the place where the assistant's answer begins."""
    _check(messages)
    try:
        return template.render(
            messages=[dict(m) for m in messages], add_generation_prompt=True, **special
        )
    except jinja2.TemplateError as error:
        raise InvalidRequest(
            f"messages: the model's chat template refused them: {error}"
        ) from error


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages: received none. Expected at least one.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{i}]: received {message!r}. Expected an object with role and content."
            )


def _tojson(
    value: object, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
