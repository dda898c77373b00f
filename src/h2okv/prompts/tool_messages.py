"""Tools in prompts: what a chat template does with them, and messages for one that has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CallForm = Literal["hermes", "llama"]
"""How a model writes a call: ``<tool_call>`` tags, or JSON with ``parameters``."""

_LLAMA = re.compile(r"""python_tag|\\?"name\\?":[^{}]*\\?"parameters\\?":""")
_PROBE = "h2okv_probe"
_INSTRUCTIONS = """\
You may call functions to answer. Their signatures, one a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between tags:
<tool_call>
{{"name": "function-name", "arguments": {{"parameter": "value"}}}}
</tool_call>
Its result comes between <tool_response> tags."""


def call_form(tokenizer: PreTrainedTokenizerBase) -> CallForm:
    """Return the form of calls that a model's chat template shows it."""
    template = _template(tokenizer, [{}])
    if "<tool_call>" in template or not _LLAMA.search(template):
        return "hermes"
    return "llama"


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the tools into the prompt."""
    template = _template(tokenizer, [{}])
    return "tools" in template and _renders_tools(tokenizer, template)


def _template(tokenizer: PreTrainedTokenizerBase, tools: list[Any]) -> str:
    return str(tokenizer.get_chat_template(None, tools)) if tokenizer.chat_template else ""


@lru_cache(maxsize=16)
def _renders_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Render one tool, rather than guess from the template's source."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
    function = {"name": _PROBE, "description": "a", "parameters": parameters}
    tools: Any = [{"type": "function", "function": function}]
    apply: Any = tokenizer.apply_chat_template
    try:
        text = apply(
            [{"role": "user", "content": "a"}],
            chat_template=template,
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # a template may raise anything
        return False
    return _PROBE in str(text)


def as_plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Write tools, calls and results into the texts of messages, for a template without tools.

    Messages are of system, user and assistant, in the Hermes form; results are a user's message,
    together with the user's text that follows.
    """
    turns: list[dict[str, Any]] = []
    is_after_result = False
    for message in messages:
        turn, role = dict(message), message["role"]
        calls = turn.pop("tool_calls", ())
        if calls:
            written = [turn["content"]] if turn["content"] else []
            turn["content"] = "\n".join([*written, *(_call_text(call) for call in calls)])
        if role == "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            turn = {"role": "user", "content": content}
        if is_after_result and turn["role"] == "user":
            turns[-1]["content"] += f"\n{turn['content']}"
        else:
            turns.append(turn)
        is_after_result = role == "tool"
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=lines)
        if turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{instructions}"
        else:
            turns.insert(0, {"role": "system", "content": instructions})
    return turns


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    fields = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(fields, ensure_ascii=False)}\n</tool_call>"
