"""Chat templates: the model's own Jinja text, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvarn.core.errors import InvalidRequest, ModelError

Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Plain JSON; jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


class ChatTemplate:
    """A compiled template. `tokens`: bos_token, eos_token ... as the template may name them."""

    def __init__(self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """Raises ModelError if the template is not Jinja."""
        self.source, self._tokens = source, dict(tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> str:
        """The prompt's text. Raises InvalidRequest for messages that the template refuses."""
        _check(messages)
        values = {**self._tokens, **more, "messages": list(messages), "tools": list(tools) if tools else None}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except SecurityError as error:
            raise ModelError(f"the model's chat template does what a template must not: {error}") from error
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"the model's chat template fails on these messages: {error}") from error


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidRequest("no messages", fixes=("give at least one message",))
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidRequest(f"message {index} is {message!r}", fixes=('write {"role": "user", "content": "..."}',))
