"""`h2okv generate` and `h2okv demo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from h2okv.cli import args
from h2okv.cli.args import COMPILE, JSON, PIN, RAW, ModelOptions, SamplingOptions, option
from h2okv.config import CacheConfig
from h2okv.console import (
    INTERRUPTED,
    check_least,
    format_bytes,
    format_table,
    write_json,
    write_remark,
    write_text,
)
from h2okv.records import decode_text

if TYPE_CHECKING:
    import torch

    from h2okv.chat.generation import Comparison, Generation
    from h2okv.integration.loading import Described

_FEW_TOKENS = 32
_CHUNK = 512
_MOST_PROMPT_TOKENS = 4096
"""What the demo's prompt may use of a context that is longer than its sample text."""
_SHOWN_CHARACTERS = 300
_QUESTION = "Write a short summary of this article for a newsletter."


@args.cache_options()
@args.model_options()
@args.sampling_options()
def generate(
    cache: CacheConfig,
    model: ModelOptions,
    sampling: SamplingOptions,
    prompt: str | None = typer.Argument(None, help="The prompt; - or nothing reads it from stdin."),
    file: Path | None = option(None, "Read the prompt from a text file."),
    raw: bool = RAW,
    system: str = option("", "System message, for a chat template."),
    pin: str | None = PIN,
    compile: bool = COMPILE,
    compare: str | None = option(None, "full: run the full cache too and compare."),
    as_json: bool = JSON,
) -> int:
    """Generate text with an H2O cache.

    A model with a chat template gets the prompt as a user's message, unless --raw is given. The
    text streams to stdout; a line with time and memory goes to stderr.

    Examples:

        h2okv generate --file chapter.txt --budget 20%
        h2okv generate "It was late when" --heavy 64 --recent 64
        cat chapter.txt | h2okv generate --model smollm2 --compare full
        h2okv generate --file book.txt --budget 1024 --positions rolling
    """
    from h2okv.cache import H2OCache
    from h2okv.chat.generation import Job, generate_and_compare
    from h2okv.integration.chat_template import message_spans

    if compare not in (None, "full"):
        raise ValueError(f"--compare {compare!r} is not known; the one choice is --compare full")
    text = read_prompt(prompt, file)
    described = model.describe()
    params = sampling.params(described)
    cache = cache.seeded(int(params.seed or 0))
    if cache.positions == "rolling" and cache.prefill_chunk is None and described.context:
        cache = replace(cache, prefill_chunk=max(1, min(_CHUNK, described.context // 4)))
    H2OCache.from_config(described.config, cache)  # mistakes show before the weights load
    is_chat = not raw and described.tokenizer.chat_template is not None
    if system and not is_chat:
        raise ValueError("--system needs a chat template; put the text into the prompt itself")
    if pin and not is_chat:
        raise ValueError("--pin needs a chat template; leave it out, or give --sink")
    if cache.positions != "original" and compare is None:
        described = replace(described, context=None)  # nothing ends with the context window
    input_ids = encode_prompt(described, text, system if is_chat else None)
    cache, note = args.with_least_entries(cache, input_ids.shape[1])
    pins = message_spans(described.tokenizer, chat_of(text, system), args.split_list(pin or ""))
    job = Job(model.load(described), described, input_ids, params, is_chat, compile, pins)
    found = generate_and_compare(job, cache, None if compare is None else [], quiet=as_json)
    if as_json:
        write_json(_settings(job, cache) | _results(found))
    else:
        report(found, note)
    return INTERRUPTED if found.interrupted else 0


@args.model_options()
def demo(model: ModelOptions, max_new_tokens: int = option(128, "Tokens to generate.")) -> int:
    """Compare H2O at 20 % with the full cache and with a recent window of the same size.

    A model with a chat template summarizes an article, any other continues a novel.

    Example:

        h2okv demo --model smollm2
    """
    from h2okv.assets import sample_article
    from h2okv.chat.generation import Job, generate_and_compare
    from h2okv.engine.sampling_params import SamplingParams

    check_least(max_new_tokens=max_new_tokens)
    params = SamplingParams(max_tokens=max_new_tokens, seed=0, temperature=0.0)
    described = model.describe()
    is_chat = described.tokenizer.chat_template is not None
    if is_chat:
        input_ids = encode_prompt(described, f"{sample_article()}\n{_QUESTION}", "")
        what = f"an article on a tidal power station, then: {_QUESTION}"
    else:
        input_ids = _long_prompt(described, max_new_tokens)
        text = described.tokenizer.decode(input_ids[0], skip_special_tokens=True)
        what = f"a novel that it was not trained on, ending in\n\n...{text[-_SHOWN_CHARACTERS:]}"
    write_text(f"{described.name}, {input_ids.shape[1]} tokens of {what}\n\n")
    job = Job(model.load(described), described, input_ids, params, is_chat)
    found = generate_and_compare(job, CacheConfig(), [CacheConfig(policy="recent")], quiet=False)
    report(found)
    return INTERRUPTED if found.interrupted else 0


def _long_prompt(described: Described, max_new_tokens: int) -> torch.Tensor:
    """Takes as much of the sample text as leaves room for the new tokens."""
    from h2okv.assets import sample_prompt

    context = described.context or _MOST_PROMPT_TOKENS
    room = min(context, _MOST_PROMPT_TOKENS) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the context window"
            f" of {context}; give fewer"
        )
    encoded = described.tokenizer(sample_prompt(), return_tensors="pt", verbose=False)
    return encoded["input_ids"][:, :room]


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Reads the prompt from the one place where the user put it."""
    if argument not in (None, "-") and file is not None:
        raise ValueError("the prompt is given twice, as an argument and by --file; leave one out")
    if file is not None:
        return args.read_text("file", file)
    if argument is None and sys.stdin.isatty():
        raise ValueError("there is no prompt; give it as an argument, by --file, or on stdin")
    if argument in (None, "-"):
        text = decode_text(sys.stdin.buffer.read(), "the prompt on stdin").rstrip("\r\n")
    else:
        text = decode_text(os.fsencode(str(argument)), "the prompt")
    if not text.strip():
        raise ValueError("the prompt is empty; give some text to go on from")
    return text


def encode_prompt(described: Described, prompt: str, system: str | None = None) -> torch.Tensor:
    """Tokenizes the prompt: as a chat with this system message, or as it is with None."""
    from h2okv.integration.chat_template import chat_text
    from h2okv.integration.loading import check_vocabulary

    if system is not None:
        prompt = chat_text(described.tokenizer, chat_of(prompt, system))
    encoded = described.tokenizer(
        prompt, return_tensors="pt", verbose=False, add_special_tokens=system is None
    )
    input_ids: torch.Tensor = encoded["input_ids"]
    length = input_ids.shape[1]
    if length == 0:
        raise ValueError("the prompt has no tokens for this model; give some text to go on from")
    if described.context is not None and length >= described.context:
        raise ValueError(
            f"the prompt has {length} tokens, but the context window of --model"
            f" {described.name!r} is {described.context}; add --positions rolling, which reads"
            f" beyond it, or shorten the prompt to {described.context - 1} or fewer"
        )
    check_vocabulary(input_ids[0].tolist(), described.vocab_size)
    return input_ids


def chat_of(prompt: str, system: str) -> list[dict[str, str]]:
    """The messages that a prompt is the last of."""
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": prompt}]


def report(found: Comparison, note: str | None = None) -> None:
    """Tells people what a generation cost, and how it compares to the full cache's.

    The table goes to stdout, for it is the result of a comparison; remarks go to stderr.
    """
    run = next(iter(found.runs.values()))
    if found.agreements:
        write_text(comparison_table(found))
    else:
        write_remark(summary_line(run))
    if note or (note := few_entries_note(run)):
        write_remark(note)
    if run.finish_reason == "context":
        write_remark(
            "note: the text ends with the model's context window; --positions rolling goes on"
            " beyond it"
        )


def summary_line(run: Generation) -> str:
    """Puts a generation's measurements in one line."""
    held, full = format_bytes(run.kv_bytes), format_bytes(run.kv_bytes_full)
    memory = f"{held} of {full} ({_fraction(run)})"
    if run.kv_bytes > run.kv_bytes_full:  # slots are reserved at once, a full cache grows
        memory = f"{held} reserved, full cache {full}"
    return (
        f"{len(run.token_ids)} tokens ({run.finish_reason})"
        f" | first after {_known(run.time_to_first_token, '.3f', ' s')}"
        f" | {_known(run.tokens_per_second, '.1f')} tokens/s | KV {memory}"
        f" | {run.num_seen_tokens} tokens seen, {run.num_cached_tokens} kept"
    )


def few_entries_note(run: Generation) -> str | None:
    """Warns of a budget that hardly keeps anything."""
    kept = run.num_cached_tokens
    if kept >= _FEW_TOKENS or kept >= run.num_seen_tokens:
        return None
    return (
        f"note: only {kept} tokens were kept, too few for good text; give a larger budget, such"
        " as --budget 128"
    )


def comparison_table(found: Comparison) -> str:
    """Sets generations beside that of the full cache."""
    from h2okv.chat.generation import FULL

    labels = [FULL, *found.agreements]
    cells: dict[str, Callable[[Generation], str]] = {
        "tokens generated": lambda run: str(len(run.token_ids)),
        "time to first token": lambda run: _known(run.time_to_first_token, ".3f", " s"),
        "tokens per second": lambda run: _known(run.tokens_per_second, ".1f"),
        "KV cache held": lambda run: format_bytes(run.kv_bytes),
        "of a full one": _fraction,
        "tokens seen": lambda run: str(run.num_seen_tokens),
        "tokens kept": lambda run: str(run.num_cached_tokens),
    }
    rows = [(name, *(cell(found.runs[label]) for label in labels)) for name, cell in cells.items()]
    agreements = list(found.agreements.values())
    equal = (f"{own.equal} of {own.compared}" for own in agreements)
    rows.append(("tokens that agree", "", *equal))
    firsts = ("-" if own.first_difference is None else str(own.first_difference + 1)
              for own in agreements)  # fmt: skip
    rows.append(("first token that differs", "", *firsts))
    if any(own.same_next_token is not None for own in agreements):
        count = len(found.runs[FULL].token_ids)
        same = (f"{own.same_next_token} of {count}" for own in agreements)
        rows.append(("same next token on the full cache's text", "", *same))
    return format_table(("", *labels), rows, left=("",))


def _settings(job: Any, cache: CacheConfig) -> dict[str, Any]:
    from h2okv.chat.session import sampling_fields

    return {
        "model": job.described.name,
        **cache.to_dict(),
        **sampling_fields(job.params),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "device": str(job.model.device),
        "chat_template": job.is_chat,
        "prompt_tokens": job.input_ids.shape[1],
    }


def _results(found: Comparison) -> dict[str, Any]:
    told = [_fields(run) for run in found.runs.values()]
    if not found.agreements:
        return told[0]
    agreement = next(iter(found.agreements.values()))
    return {**told[0], "full": told[1], "agreement": asdict(agreement)}


def _fields(run: Generation) -> dict[str, Any]:
    names = {"time_to_first_token": "time_to_first_token_s"}
    told = {names.get(name, name): value for name, value in asdict(run).items()}
    return told | {"text": told.pop("shown")}


def _known(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _fraction(run: Generation) -> str:
    return f"{100 * run.kv_bytes / run.kv_bytes_full:.0f} %" if run.kv_bytes_full else "-"
