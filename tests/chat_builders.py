"""A byte tokenizer and chat templates for tests, and the formats that render with them."""

from __future__ import annotations

import json
import re

import jinja2
import jinja2.sandbox

from angelspec.core.modes import ModeFamily, mode_family
from angelspec.data.chat import ChatFormat
from angelspec.data.conversation import Conversation, Message, ToolCall

START, END, OPEN, CLOSE = 256, 257, 258, 259
SPECIAL = {"<|im_start|>": START, "<|im_end|>": END}

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['tool_calls'] is defined %}{{ message['tool_calls'] | tojson }}{% endif %}
{{- message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

THINKING = """{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' and loop.index0 > last.user -%}
<think>
{{ message['reasoning_content'] or '' }}
</think>

{% endif -%}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if not enable_thinking -%}<think>

</think>

{% endif -%}{%- endif -%}"""
"""Like Qwen3: without thinking the prompt holds an empty block, with it the model opens the block itself."""

OPENED = THINKING.replace("{% if not enable_thinking -%}<think>\n\n</think>\n\n{% endif -%}", "{{ '<think>\\n' }}")
"""The generation prompt opens the block."""


def encode(text: str) -> list[int]:
    """Bytes, and one id for each special text."""
    tokens: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
        tokens += [SPECIAL[part]] if part in SPECIAL else part.encode()
    return tokens


def decode(tokens) -> str:
    """The text again."""
    names = {token: text for text, token in SPECIAL.items()}
    return b"".join(names[t].encode() if t in names else bytes([t]) for t in map(int, tokens)).decode()


def fake_format(template: str = CHATML, *, mode: str = "no-think", family: str | ModeFamily = "qwen3", **changes):
    """A format that renders a template, byte for byte."""
    family = mode_family(family) if isinstance(family, str) else family
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()

    def fail(text):
        raise jinja2.TemplateError(text)

    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = json.dumps  # keys in their order, as transformers has it
    compiled = environment.from_string(template)

    def render(messages, *, mode, add_generation_prompt, tools=None):
        arguments = family.arguments(mode)
        return encode(
            compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, **arguments)
        )

    values = {"render": render, "mode": mode, "family": family, "stop_token_ids": frozenset({END})}
    return ChatFormat(**{**values, "special_texts": tuple(SPECIAL), **changes})


def conversation(*turns, name="c", **changes) -> Conversation:
    """From ('user', text), ('assistant', text[, reasoning]) and the like."""
    messages = tuple(
        turn if isinstance(turn, Message) else Message(turn[0], turn[1], reasoning=turn[2] if len(turn) > 2 else None)
        for turn in turns
    )
    return Conversation(**{"id": name, "workload": "chat", "messages": messages, "source": "s", **changes})


def calling(text: str, arguments: dict) -> Message:
    """An assistant turn that calls a tool."""
    return Message("assistant", text, tool_calls=(ToolCall("add", arguments, "c1"),))
