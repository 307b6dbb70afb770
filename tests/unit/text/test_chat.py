"""Chat templates are rendered in a sandbox, with the helpers that models expect."""

from __future__ import annotations

from datetime import datetime

import pytest

from kvarn.core.errors import InvalidRequest, ModelError
from kvarn.text.chat import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages=USER, **more) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 2, 3)).render(messages, **more)


def test_tokens_messages_and_prompt_marker() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert render(source) == "<s>[user]hi[assistant]"
    assert render(source, add_generation_prompt=False) == "<s>[user]hi"


def test_block_lines_leave_no_blanks() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}") == "x\n"


def test_helpers() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}said{% endgeneration %}") == "said"


def test_tools_are_handed_over() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert render("{{ tools[0].function.name }}", tools=[tool]) == "f"
    assert render("{% if tools %}yes{% else %}no{% endif %}") == "no"


def test_refusal_of_the_template_names_its_reason() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises((ModelError, InvalidRequest)):
        render(source)


def test_broken_template() -> None:
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], ["hi"], [{"content": "x"}], [{"role": 1, "content": "x"}]]
)
def test_malformed_messages(messages: list) -> None:
    with pytest.raises(InvalidRequest):
        render("x", messages)


def test_a_missing_value_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="fails on these messages"):
        render("{{ messages[0].content + 1 }}")
