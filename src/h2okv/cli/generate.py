"""`h2okv generate` and `h2okv demo`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import h2okv
from h2okv.assets import sample_article, sample_prompt
from h2okv.cli import args, readers
from h2okv.cli.args import option
from h2okv.config import BEST, CacheConfig
from h2okv.console import (
    INTERRUPTED,
    format_bytes,
    format_table,
    write_json,
    write_remark,
    write_text,
)
from h2okv.prompts.chat_template import check_pinnable, message_spans
from h2okv.prompts.messages import Conversation, ImagePart
from h2okv.records import decode_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from h2okv.engine.generation import Comparison, Generation, Job
    from h2okv.models.loading import Described

_FEW_TOKENS = 32
_SPAN = 64
_MOST_PROMPT_TOKENS = 4096  # of the demo
_SHOWN_CHARACTERS = 300
_QUESTION = "Write a short summary of this article for a newsletter."


def generate(
    choice: args.Choice = args.cache_options(),
    model: args.ModelOptions = args.model_options(),
    sampling: args.SamplingOptions = args.sampling_options(),
    prompt: str | None = typer.Argument(None, help="The prompt; - or nothing: from stdin."),
    file: Path | None = option(None, "Read the prompt from a text file.", read=readers.readable),
    image: list[Path] | None = option(None, "An image before the prompt; repeatable.", "--image"),
    raw: bool = args.RAW,
    system: str = option("", "System message: text or @FILE.", read=readers.text_or_file),
    pin: args.Typed = args.PIN,
    compile: bool = args.COMPILE,
    weight_bits: int | None = args.WEIGHT_BITS,
    compare: str | None = option(
        None, "Run the full cache too, and compare.", read=readers.choice("full")
    ),
    verify: args.Typed = args.VERIFY,
    as_json: bool = args.JSON,
) -> int:
    check_pinnable(pin)
    text = read_prompt(prompt, file)
    from h2okv.calibration.layer_budgets import with_measured_budgets
    from h2okv.engine.generation import Job, generate_and_compare
    from h2okv.prompts.images import EncodedPrompt, read_image_file

    if verify and image:
        raise ValueError("--verify reads no prompt with images again; leave out one of the two")
    images = [read_image_file("--image", path) for path in image or ()]
    described = model.describe()
    if images:
        described.image_encoder.check(images)
    params = sampling.params(described)
    cache = choice.cache.seeded(int(params.seed or 0))
    if cache.positions == "rolling" and described.context:
        cache = cache.with_cuts(max(1, min(_SPAN, described.context // 4)))
    args.check_cache(described.config, cache)  # mistakes show before the weights load
    is_chat = not raw and described.tokenizer.chat_template is not None
    if system and not is_chat:
        raise ValueError(
            f"--system needs a chat template{', and --raw leaves it out' if raw else ''}; put the"
            " text into the prompt itself"
        )
    if pin and not is_chat:
        raise ValueError("--pin needs a chat template; leave it out, or give --cache sink=4")
    if cache.positions != "original" and compare is None:
        described = replace(described, context=None)  # the context window is not a limit
    chat = Conversation(chat_of(text, system, images))
    encoded = EncodedPrompt(())
    if images:
        encoded = described.image_encoder.encode(chat if is_chat else text, images)
        prompt_ids = described.checked(list(encoded.token_ids))
    else:
        prompt_ids = described.encode(chat if is_chat else text)
    note = args.minimum_entries_note(cache, len(prompt_ids))
    pins = message_spans(described.tokenizer, chat, pin)
    load = model.load if compare is None else partial(_load, model)
    loaded = load(described, compile, weight_bits)
    cache = with_measured_budgets(cache, loaded, described)
    if pin:
        cache = cache.with_room_for_pins
    job = Job(loaded, described, prompt_ids, params, is_chat, compile, pins, encoded.inputs, verify)
    comparison = generate_and_compare(job, cache, None if compare is None else [], quiet=as_json)
    if as_json:
        write_json(_json_fields(job, cache, comparison))
    else:
        report(comparison, note or args.growth_note([cache]))
    return INTERRUPTED if comparison.interrupted else 0


def demo(
    model: args.ModelOptions = args.model_options(),
    max_new_tokens: int = option(128, "Tokens to generate.", read=readers.count),
) -> int:
    from h2okv.calibration.layer_budgets import with_measured_budgets
    from h2okv.engine.generation import Job, generate_and_compare

    params = h2okv.SamplingParams(max_tokens=max_new_tokens, seed=0, temperature=0.0)
    described = model.describe()
    is_chat = described.tokenizer.chat_template is not None
    if is_chat:
        prompt_ids = described.encode(chat_of(f"{sample_article()}\n{_QUESTION}", ""))
        source = f"an article on a tidal power station, then: {_QUESTION}"
    else:
        prompt_ids = _long_prompt(described, max_new_tokens)
        text = described.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        source = f"a novel that it was not trained on, ending in\n\n...{text[-_SHOWN_CHARACTERS:]}"
    write_text(f"{described.name}, {len(prompt_ids)} tokens of {source}\n\n")
    loaded = _load(model, described)
    job = Job(loaded, described, prompt_ids, params, is_chat)
    best = CacheConfig(policy=BEST, min_tokens=0)
    best = with_measured_budgets(best, loaded, described)
    baselines = [CacheConfig(policy=name, min_tokens=0) for name in ("h2o", "recent")]
    comparison = generate_and_compare(job, best, baselines, quiet=False)
    report(comparison)
    return INTERRUPTED if comparison.interrupted else 0


def _load(model: args.ModelOptions, described: Described, *options: Any) -> PreTrainedModel:
    """Load the model of a comparison and report the time, which its table does not include."""
    begun = time.perf_counter()
    loaded = model.load(described, *options)
    write_remark(f"{described.name} loaded in {time.perf_counter() - begun:.1f} s")
    return loaded


def _long_prompt(described: Described, max_new_tokens: int) -> list[int]:
    """Return the start of the sample text, in tokens, with room for the new tokens."""
    from h2okv.prompts.chat_template import encode

    context = described.context or _MOST_PROMPT_TOKENS
    room = min(context, _MOST_PROMPT_TOKENS) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in a context of"
            f" {context}; give fewer"
        )
    return encode(described.tokenizer, sample_prompt())[:room]


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Read the prompt from the argument, the file or stdin; raise ValueError for none or two."""
    if argument not in (None, "-") and file is not None:
        raise ValueError("the prompt is both an argument and in --file; leave one of them out")
    if file is not None:
        return readers.read_text("--file", file)
    if argument is None and sys.stdin.isatty():
        raise ValueError("there is no prompt; give it as an argument, by --file, or on stdin")
    if argument in (None, "-"):
        text = decode_text(sys.stdin.buffer.read(), "the prompt on stdin").rstrip("\r\n")
    else:
        text = decode_text(os.fsencode(str(argument)), "the prompt")
    if not text.strip():
        raise ValueError("the prompt is empty; give some text to continue")
    return text


def chat_of(prompt: str, system: str, images: Sequence[ImagePart] = ()) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    content: Any = prompt
    if images:
        content = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": prompt})
    return [*messages, {"role": "user", "content": content}]


def report(comparison: Comparison, note: str | None = None) -> None:
    """Write the cost of a run to stderr, or the table of a comparison to stdout."""
    label, run = next(iter(comparison.runs.items()))
    if comparison.same_choices:
        write_text(comparison_table(comparison))
    else:
        write_remark(f"{summary_line(run)} | {label}")
    if run.verified is not None:
        write_remark(str(run.verified))
    entries = run.num_cached_tokens
    if note is None and entries < min(_FEW_TOKENS, run.num_seen_tokens):
        few = f"note: only {entries} tokens were kept, too few for good text"
        note = f"{few}; give --budget 128 or more"
    if note:
        write_remark(note)
    if run.finish_reason == "context":
        write_remark(
            "note: the text ends with the context window; --cache positions=rolling continues"
        )


def summary_line(run: Generation) -> str:
    first, speed = run.time_to_first_token, run.tokens_per_second
    times = "" if first is None else f" | first after {first:.3f} s"
    times += "" if speed is None else f" | {speed:.1f} tokens/s"
    tokens = f"{len(run.token_ids)} tokens ({run.finish_reason})"
    return f"{tokens}{times} | {run.memory_text} | {run.kept_text}"


def comparison_table(comparison: Comparison) -> str:
    """Return a table with a column for each generation, that of the full cache first."""
    from h2okv.engine.generation import FULL

    labels = (FULL, *comparison.same_choices)
    count = len(comparison.runs[FULL].token_ids)
    columns = [
        _column(comparison.runs[label], comparison.same_choices.get(label), count)
        for label in labels
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return format_table(("", *labels), rows, left=("",))


def _column(run: Generation, same: int | None, full: int) -> dict[str, str]:
    cells = {
        "tokens generated": str(len(run.token_ids)),
        "time to first token": _format(run.time_to_first_token, ".3f", " s"),
        "tokens per second": _format(run.tokens_per_second, ".1f"),
        "KV cache": format_bytes(run.kv_bytes),
        "of a full one": run.share_text,
        "tokens seen": str(run.num_seen_tokens),
        "tokens kept": f"{run.mean_cached_tokens:.0f}",
    }
    if round(run.mean_cached_tokens) != run.num_cached_tokens:
        cells["tokens kept by the largest head"] = str(run.num_cached_tokens)
    if run.smaller_from is not None and run.kv_bytes >= run.kv_bytes_full:
        cells["saves memory from"] = f"{run.smaller_from} tokens on"
    if same is not None:
        cells["same next token on the full cache's text"] = f"{same} of {full}"
    return cells


def _json_fields(job: Job, cache: CacheConfig, comparison: Comparison) -> dict[str, Any]:
    """Return the fields of --json."""
    runs = []
    for values in map(asdict, comparison.runs.values()):
        values["time_to_first_token_s"] = values.pop("time_to_first_token")
        if not job.verify:
            del values["verified"]
        runs.append(values)
    fields = {
        "model": job.described.name,
        "cache": cache.label,
        **cache.to_dict(),
        **_sampling_fields(job.params),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "device": str(job.model.device),
        "chat_template": job.is_chat,
        "prompt_tokens": len(job.prompt_ids),
        **runs[0],
    }
    for same in [*comparison.same_choices.values()][:1]:
        fields |= {"full": runs[1], "same_next_token": same}
    return fields


def _sampling_fields(params: h2okv.SamplingParams) -> dict[str, Any]:
    """Return the fields that always matter or differ from their default, by option name."""
    always = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")
    default, fields = vars(h2okv.SamplingParams()), dict(vars(params))
    changed = {"max_new_tokens": fields.pop("max_tokens")}
    for name, value in fields.items():
        if name in always or value != default[name]:
            changed[name] = value
    return changed


def _format(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
