"""Chat templates: messages and tools to text, also by a template that has no tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from h2okv.prompts.messages import Conversation
from h2okv.prompts.readers import FieldError, PromptLimits
from h2okv.records import refusing, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_REASON = 300  # characters of a template's reason, which may repeat the entire chat
# Stop strings of the plain form, where the model would go on with the user's next line.
PLAIN_STOPS = ("\n\nUser:", "\nUser:")
_PROBE = "h2okv_probe"
_PLAIN_FORMS = {"system": "{}\n\n", "user": "User: {}\n\n", "assistant": "Assistant: {}\n\n"}
# The plain form as a template. It gives the first token that a text gets without one.
_PLAIN_TEMPLATE = """{{ FIRST }}{% for message in messages %}\
{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[message['role']] }}\
{{ message['content'] }}{{ '\\n\\n' }}{% endfor %}\
{% if add_generation_prompt %}Assistant:{% endif %}"""


class ChatTemplateError(ValueError):
    """A model's chat template does not accept these messages; `reason` says why, in one line."""

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split())[:_MAX_REASON].rstrip(".")
        super().__init__(
            f"the model's chat template does not take these messages ({self.reason}); give messages"
            " that it takes."
        )


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Conversation | Sequence[Mapping[str, Any]],
    *,
    to_answer: bool | None = None,
    with_images: bool = False,
) -> str:
    """Render messages with the model's chat template, or in the plain form if it has none.

    The text ends where a new answer begins if `to_answer`; by default as `Conversation` decides.
    `with_images` is for a processor, which replaces placeholders; else images are refused.
    """
    chat = messages
    if not isinstance(chat, Conversation):
        chat = Conversation(chat, to_answer, None if to_answer is None else False)
    if (images := chat.images) and not with_images:
        problem = f"={images[0]}: images are not supported here; leave them out, or use"
        raise FieldError(images[0].path, f"{problem} h2okv generate or serve")
    chat = _for_template(tokenizer, chat)
    *earlier, final = chat.messages
    continues, begins_answer = chat.continues, chat.begins_answer
    if continues and final["role"] == "assistant" and not final["content"]:
        # Nothing to continue: the answer begins after its header.
        chat = replace(chat, messages=earlier)
        continues, begins_answer = False, True
    if not tokenizer.chat_template:
        turns = [_PLAIN_FORMS[turn["role"]].format(turn["content"]) for turn in chat.messages]
        text = "".join(turns)
        return f"{text}Assistant:" if begins_answer else text[: -2 if continues else None]
    contents, tools = list[Any](chat.messages), list[Any](chat.tools) or None
    apply: Any = tokenizer.apply_chat_template
    try:
        template = str(tokenizer.get_chat_template(None, tools))
        # Some vision-language models leave out all contents but parts.
        if not _writes_probe(tokenizer, template, in_tool=False, on_error=True):
            contents = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message["content"], str)
                else message
                for message in contents
            ]
        switches = {"add_generation_prompt": begins_answer, "continue_final_message": continues}
        options = {"tools": tools, "tokenize": False, **switches}
        return str(apply(contents, **options, **chat.template_kwargs))
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ChatTemplateError(str(error)) from error


def _for_template(tokenizer: PreTrainedTokenizerBase, chat: Conversation) -> Conversation:
    """Write tools as texts where a template has none; refuse images that it cannot place."""
    images = chat.images
    if images and not tokenizer.chat_template:
        problem = ": the model has no chat template, which says where images stand; leave them out"
        raise FieldError(images[0].path, problem)
    is_call = any(turn["role"] == "tool" or "tool_calls" in turn for turn in chat.messages)
    if takes_tools(tokenizer) or not (chat.tools or is_call):
        return chat
    if images:
        problem = ": the model's chat template has no tools, and images cannot come with them"
        raise FieldError(images[0].path, f"{problem}; leave one of them out")
    return replace(
        chat,
        messages=as_plain_messages(chat.messages, chat.tools),
        tools=(),
        add_generation_prompt=chat.begins_answer,
        continue_final_message=chat.continues,
    )


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a chat template of the plain form, for a tokenizer that has none."""
    bos = tokenizer.bos_token
    has_bos = bos is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return _PLAIN_TEMPLATE.replace("FIRST", "bos_token" if has_bos else "''")


@lru_cache(maxsize=16)
def _writes_probe(
    tokenizer: PreTrainedTokenizerBase, template: str, in_tool: bool, on_error: bool
) -> bool:
    """Render a probe, in a message or a tool, rather than guess from the template's source."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
    function = {"name": _PROBE, "description": "a", "parameters": parameters}
    tools = [{"type": "function", "function": function}] if in_tool else None
    messages = [{"role": "user", "content": "a" if in_tool else _PROBE}]
    apply: Any = tokenizer.apply_chat_template
    try:
        options = {"tokenize": False, "add_generation_prompt": in_tool}
        return _PROBE in str(apply(messages, chat_template=template, tools=tools, **options))
    except Exception:  # a template may raise anything, and says it once more for the messages
        return on_error


def adds_special(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Tell whether a chat's text gets special tokens: without a template, and as processors do."""
    if not tokenizer.chat_template:
        return True
    reads_images, bos = hasattr(tokenizer, "image_token"), tokenizer.bos_token
    return reads_images and bos is not None and not text.startswith(str(bos))


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Conversation | Sequence[Mapping[str, Any]],
    vocab_size: int | None = None,
    special: bool = True,
) -> list[int]:
    """Encode a text, or messages up to their answer; refuse tokens outside the vocabulary."""
    if not isinstance(prompt, str):
        prompt = chat_text(tokenizer, prompt)
        special = adds_special(tokenizer, prompt)
    ids = list(tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    if special and ids[:2] == [bos] * 2:  # the text may begin with a BOS token itself
        unprefixed = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        ids = ids[1:] if len(unprefixed) < len(ids) else ids
    if vocab_size is not None:
        PromptLimits(vocab_size).check_tokens(ids)
    return ids


PINNABLE = ("system", "tools", "user", "last_user")
Pins = Sequence[tuple[int, int]]
"""Spans of a prompt's tokens, ``(start, stop)``, that are never evicted."""


def reopens_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether earlier answers begin as a new one does, but for what opens thoughts."""
    question = {"role": "user", "content": "question"}
    answer = {"role": "assistant", "content": _PROBE}
    with suppress(ChatTemplateError):
        new = chat_text(tokenizer, [question]).rstrip().removesuffix("<think>")
        before = chat_text(tokenizer, [question, answer, question]).partition(_PROBE)[0]
        return before.rstrip() == new.rstrip()
    return False


def check_pinnable(pin: Sequence[str], tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raise if a name in ``pin`` is not one of `PINNABLE`, or the template hides its messages."""
    if pin and (isinstance(pin, str) or not isinstance(pin, Sequence)):
        raise ValueError(f"pin must be a list of {', '.join(PINNABLE)}, got {pin!r}.")
    for name in pin:
        if name not in PINNABLE:
            raise unknown_name("pin", name, PINNABLE)
    if pin and tokenizer is not None:
        messages = [{"role": role, "content": f"{_PROBE} {role}"} for role in ("system", "user")]
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}] if "tools" in pin else []
        chat = Conversation(messages[0 if "system" in pin else 1 :], tools=tools)
        with refusing(f"pin={', '.join(pin)}", "pin others, or none.", ValueError):
            message_spans(tokenizer, chat, pin)


def message_spans(
    tokenizer: PreTrainedTokenizerBase,
    chat: Conversation | Sequence[Mapping[str, Any]],
    pin: Sequence[str],
    needs_all: bool = True,
) -> list[tuple[int, int]]:
    """Find the tokens of the messages that `PINNABLE` names, for `H2OCache.pin`.

    ``tools`` is what the prompt says of tools: all that one without them lacks. With `needs_all`
    a name without a message is an error.
    """
    if not pin:
        return []
    check_pinnable(pin)
    if not isinstance(chat, Conversation):
        chat = Conversation(chat)
    messages = chat.messages
    if any(not isinstance(message["content"], str) for message in messages):
        raise ValueError(
            f"pin={', '.join(pin)} finds no messages beside images; leave it out, or give"
            " LLM.generate the spans of tokens as pins."
        )
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    numbers = [
        number
        for number, message in enumerate(messages)
        if message["role"] in pin or ("last_user" in pin and users[-1:] == [number])
    ]
    for name in pin if needs_all else ():
        role = name.removeprefix("last_")
        if not (chat.tools if name == "tools" else any(turn["role"] == role for turn in messages)):
            such = "tools; leave it out, or give some."
            if name != "tools":
                such = f"{name} message; leave it out, or give one."
            raise ValueError(f"pin={name!r} finds no {such}")
    text = chat_text(tokenizer, chat)
    tools = _written_tools(tokenizer, chat, text) if chat.tools else (0, 0)
    ranges = [tools] if "tools" in pin else []
    offset = 0
    for number, message in enumerate(messages[: max(numbers, default=-1) + 1]):
        content = message["content"].strip()
        offset = text.find(content, offset)
        if tools[0] <= offset < tools[1]:  # a word that stands in a tool's description too
            offset = text.find(content, tools[1])
        if offset < 0:
            raise ValueError("the chat template changes the messages, so they cannot be pinned.")
        if number in numbers:
            ranges.append((offset, offset + len(content)))
        offset += len(content)
    encoded = tokenizer(text, add_special_tokens=adds_special(tokenizer, text), verbose=False)
    dropped = len(encoded["input_ids"]) - len(encode(tokenizer, chat))
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(ends for ends in ranges if ends[0] < ends[1]):
        first = encoded.char_to_token(start) - dropped
        if spans and first < spans[-1][1]:  # one token has the end of one and the start of the next
            first = spans.pop()[0]
        spans.append((first, encoded.char_to_token(stop - 1) - dropped + 1))
    return spans


def _written_tools(
    tokenizer: PreTrainedTokenizerBase, chat: Conversation, text: str
) -> tuple[int, int]:
    """Find the characters of a chat's text that it would not have without tools."""
    without = chat_text(tokenizer, replace(chat, tools=()))
    start = len(commonprefix([text, without]))
    after = len(commonprefix([text[start:][::-1], without[start:][::-1]]))
    inserted = text[start : len(text) - after]
    if not all(tool["function"]["name"] in inserted for tool in chat.tools):
        raise ValueError("the chat template changes the tools, so they cannot be pinned.")
    start += len(inserted) - len(inserted.lstrip())
    return start, start + len(inserted.strip())


# --- tools ----------------------------------------------------------------------------------------

CallForm = Literal["hermes", "llama"]
"""How a model writes a call: ``<tool_call>`` tags, or JSON with ``parameters``."""

_LLAMA = re.compile(r"""python_tag|\\?"name\\?":[^{}]*\\?"parameters\\?":""")
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
    template = _template(tokenizer)
    if "<tool_call>" in template or not _LLAMA.search(template):
        return "hermes"
    return "llama"


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the tools into the prompt."""
    template = _template(tokenizer)
    return "tools" in template and _writes_probe(tokenizer, template, in_tool=True, on_error=False)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.get_chat_template(None, [{}])) if tokenizer.chat_template else ""


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
