"""`h2okv generate` and `h2okv demo`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2okv.cli.args import (
    COMPILE_HELP,
    ModelOptions,
    SamplingOptions,
    cache_options,
    checked_text,
    decode,
    model_options,
    own_generation_config,
    read_text,
    sampling_options,
)
from h2okv.config import CacheConfig
from h2okv.console import (
    INTERRUPTED,
    discard,
    format_bytes,
    format_table,
    write_remark,
    write_text,
)

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache

    from h2okv.chat.generation import Agreement, Generation, Job
    from h2okv.integration.loading import Described

_NONE = "-"
_FEW_TOKENS = 32
_LEAST_ENTRIES = 64
"""What a fraction of a short prompt is raised to, for heavy hitters and recent tokens each."""
_CHUNK = 512
_MOST_PROMPT_TOKENS = 4096
"""What the demo's prompt may use of a context that is longer than its sample text."""
_SHOWN_CHARACTERS = 300
_QUESTION = "Summarize the article in three sentences."


@cache_options()
@model_options()
@sampling_options()
def generate(
    cache: CacheConfig,
    model: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads it from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a text file.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text: no chat template, if there is one.")
    ] = False,
    system: Annotated[str, typer.Option(help="System message, for a chat template.")] = "",
    compile: Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)] = False,
    compare: Annotated[
        str | None, typer.Option(help="full: run the full cache too and compare.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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
    from h2okv.chat.generation import Job, end_tokens

    if compare not in (None, "full"):
        raise ValueError(f"--compare {compare!r} is not known; the one choice is --compare full")
    text = read_prompt(prompt, file)
    described = model.describe()
    params = sampling.params(own_generation_config(described))
    cache = cache.seeded(int(params.seed or 0))
    if cache.positions == "rolling" and cache.prefill_chunk is None and described.context:
        cache = replace(cache, prefill_chunk=max(1, min(_CHUNK, described.context // 4)))
    H2OCache.from_config(described.config, cache)  # mistakes show before the weights load
    is_chat = not raw and described.tokenizer.chat_template is not None
    if system and not is_chat:
        raise ValueError("--system needs a chat template; put the text into the prompt itself")
    if cache.positions != "original" and compare is None:
        described = replace(described, context=None)  # nothing ends with the context window
    input_ids = encode_prompt(described, text, system if is_chat else None)
    cache, note = with_least_entries(cache, input_ids.shape[1])
    loaded = model.load(described)
    ends = end_tokens(loaded, described.tokenizer if is_chat else None)
    job = Job(loaded, described, input_ids, params, tuple(ends), compile)
    comparison = (run_alone if compare is None else run_beside_full)(job, cache, quiet=json)
    if json:
        write_text(to_json(_settings(job, cache, is_chat), comparison) + "\n")
    else:
        report(cache.label, comparison, note)
    return exit_code(comparison)


@model_options()
def demo(
    model: ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
) -> int:
    """Compare H2O at 20 % with the full cache and with a recent window of the same size.

    A model with a chat template summarizes an article, any other continues a novel.

    Example:

        h2okv demo --model smollm2
    """
    from h2okv.assets import sample_article
    from h2okv.chat.generation import Job, end_tokens

    options: dict[str, Any] = {"max_tokens": max_new_tokens, "seed": 0, "temperature": 0}
    described = model.describe()
    is_chat = described.tokenizer.chat_template is not None
    if is_chat:
        options["repetition_penalty"] = 1.1  # without it a small model's greedy text loops
        input_ids = encode_prompt(described, f"{sample_article()}\n{_QUESTION}", "")
        what = f"an article on a tidal power station, then: {_QUESTION}"
    else:
        input_ids = _long_prompt(described, max_new_tokens)
        text = described.tokenizer.decode(input_ids[0], skip_special_tokens=True)
        what = f"a novel that it was not trained on, ending in\n\n...{text[-_SHOWN_CHARACTERS:]}"
    write_text(f"{described.name}, {input_ids.shape[1]} tokens of {what}\n\n")
    loaded = model.load(described)
    ends = end_tokens(loaded, described.tokenizer if is_chat else None)
    job = Job(loaded, described, input_ids, SamplingOptions(options).params(), tuple(ends))
    cache = CacheConfig()
    comparison = run_beside_full(job, cache, False, CacheConfig(policy="recent"))
    report(cache.label, comparison)
    return exit_code(comparison)


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


def _settings(job: Job, cache: CacheConfig, is_chat: bool) -> dict[str, Any]:
    from h2okv.chat.session import sampling_fields

    return {
        "model": job.described.name,
        **cache.to_dict(),
        **sampling_fields(job.params),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "device": str(job.model.device),
        "chat_template": is_chat,
        "prompt_tokens": job.input_ids.shape[1],
    }


@dataclass(frozen=True)
class Comparison:
    """A generation, and the full cache's where it was asked for.

    Attributes:
        run: With the chosen cache.
        full: With transformers' own cache; None if not asked for, or after Ctrl-C before it.
        agreement: How far both agree; None without `full`.
        cut_short: Whether Ctrl-C came after both, while their agreement was looked into.
        baselines: Further caches by label, generations and agreements with the full cache's.
    """

    run: Generation
    full: Generation | None = None
    agreement: Agreement | None = None
    cut_short: bool = False
    baselines: tuple[tuple[str, Generation, Agreement], ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended any part of it."""
        runs = (self.run, self.full, *(run for _, run, _ in self.baselines))
        return self.cut_short or any(run is not None and run.interrupted for run in runs)


def run_alone(job: Job, cache: CacheConfig, quiet: bool) -> Comparison:
    """Generates with the chosen cache only."""
    from h2okv.cache import H2OCache
    from h2okv.chat.generation import generate_once

    made = H2OCache.from_config(job.model.config, cache)
    run = generate_once(job, made, discard if quiet else write_text, show_progress=not quiet)
    if not quiet:
        write_text("\n")
    return Comparison(run)


def run_beside_full(
    job: Job, cache: CacheConfig, quiet: bool, *baselines: CacheConfig
) -> Comparison:
    """Generates with the chosen cache, then with the full one, then with further baselines."""
    from transformers import DynamicCache

    from h2okv.cache import H2OCache
    from h2okv.chat.generation import Agreement, count_same_choices, generate_once, warm_up

    config = job.model.config

    def make(chosen: CacheConfig) -> Cache:
        return H2OCache.from_config(config, chosen)

    def generate(label: str, made: Cache) -> Generation:
        if not quiet:
            write_text(f"--- {label} ---\n")
        run = generate_once(job, made, discard if quiet else write_text, show_progress=not quiet)
        if not quiet:
            write_text("\n\n")
        return run

    def compare(chosen: CacheConfig, run: Generation) -> Agreement:
        # With sampling the full cache's text is not its likeliest one, so there is nothing to ask.
        same = None
        if job.params.is_greedy and not full.interrupted:
            same = count_same_choices(job, make(chosen), full.token_ids)
        return Agreement.of(run.token_ids, full.token_ids, same)

    warm_up(job, [lambda: make(cache), lambda: DynamicCache(config=config)])
    run = generate(cache.label, make(cache))
    if run.interrupted:
        return Comparison(run)
    full = generate("full cache", DynamicCache(config=config))
    others: list[tuple[str, Generation, Agreement]] = []
    try:
        agreement = compare(cache, run)
        for baseline in baselines:
            other = generate(baseline.label, make(baseline))
            others.append((baseline.label, other, compare(baseline, other)))
    except KeyboardInterrupt:
        agreement = Agreement.of(run.token_ids, full.token_ids, None)
        return Comparison(run, full, agreement, True, tuple(others))
    return Comparison(run, full, agreement, False, tuple(others))


def with_least_entries(cache: CacheConfig, length: int) -> tuple[CacheConfig, str | None]:
    """Raises a fraction of a short prompt to entries that a text can be written with.

    Args:
        cache: The user's.
        length: Tokens of the prompt.

    Returns:
        The cache, and what to tell the user if it was changed.
    """
    parts = {"heavy": cache.heavy, "recent": cache.recent}
    raised: dict[str, Any] = {
        name: _LEAST_ENTRIES
        for name, part in parts.items()
        if isinstance(part, float) and 0 < part * length < _LEAST_ENTRIES
    }
    if cache.is_full or not raised:
        return cache, None
    changed = replace(cache, **raised)
    note = (
        f"note: {cache.budget_label} of {length} tokens is too little for good text, so"
        f" {' + '.join(f'{count} {name}' for name, count in raised.items())} entries are kept;"
        " for fewer give tokens, such as --budget 32"
    )
    return changed, note


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Reads the prompt from the one place where the user put it."""
    if argument not in (None, "-") and file is not None:
        raise ValueError("the prompt is given twice, as an argument and by --file; leave one out")
    if file is not None:
        return read_text("file", file, "prompt")
    if argument not in (None, "-"):
        return checked_text(_check_argument(argument), "prompt")
    if argument is None and sys.stdin.isatty():
        raise ValueError("there is no prompt; give it as an argument, by --file, or on stdin")
    return checked_text(decode("the prompt on stdin", sys.stdin.buffer.read()), "prompt")


def encode_prompt(described: Described, prompt: str, system: str | None = None) -> torch.Tensor:
    """Tokenizes the prompt: as a chat with this system message, or as it is with None."""
    from h2okv.chat.generation import check_vocabulary
    from h2okv.integration.chat_template import chat_text

    if system is not None:
        messages = [{"role": "system", "content": system}] if system else []
        prompt = chat_text(described.tokenizer, [*messages, {"role": "user", "content": prompt}])
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
    check_vocabulary(described, int(input_ids.max()))
    return input_ids


def _check_argument(argument: str) -> str:
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("the prompt argument is not UTF-8 text; convert it to UTF-8") from error
    return argument


def summary_line(run: Generation) -> str:
    """Puts a generation's measurements in one line."""
    parts = [
        f"{len(run.token_ids)} tokens ({run.finish_reason})",
        f"first after {_seconds(run.time_to_first_token)}",
        f"{_speed(run.tokens_per_second)} tokens/s",
        _memory(run),
        f"{run.num_seen_tokens} tokens seen, {run.num_cached_tokens} kept",
    ]
    return " | ".join(parts)


def report(label: str, comparison: Comparison, note: str | None = None) -> None:
    """Tells people what a generation cost, and how it compares to the full cache's.

    The table goes to stdout, for it is the result of a comparison; remarks go to stderr.
    """
    run = comparison.run
    if comparison.full is not None and comparison.agreement is not None:
        columns = ((label, run, comparison.agreement), *comparison.baselines)
        write_text(comparison_table(comparison.full, *columns))
    else:
        write_remark(summary_line(run))
    for line in (note or few_entries_note(run), _context_note(comparison)):
        if line is not None:
            write_remark(line)


def few_entries_note(run: Generation) -> str | None:
    """Warns of a budget that hardly keeps anything."""
    kept = run.num_cached_tokens
    if kept >= _FEW_TOKENS or kept >= run.num_seen_tokens:
        return None
    return (
        f"note: only {kept} tokens were kept, too few for good text; give a larger budget, such"
        " as --budget 128"
    )


def _context_note(comparison: Comparison) -> str | None:
    if comparison.run.finish_reason != "context":
        return None
    return (
        "note: the text ends with the model's context window; --positions rolling goes on beyond it"
    )


def comparison_table(full: Generation, *columns: tuple[str, Generation, Agreement]) -> str:
    """Sets generations, each with its label and agreement, beside that of the full cache."""
    cells: dict[str, Callable[[Generation], str]] = {
        "tokens generated": lambda r: str(len(r.token_ids)),
        "time to first token": lambda r: _seconds(r.time_to_first_token),
        "tokens per second": lambda r: _speed(r.tokens_per_second),
        "KV cache held": lambda r: format_bytes(r.kv_bytes),
        "of a full one": _share,
        "tokens seen": lambda r: str(r.num_seen_tokens),
        "tokens kept": lambda r: str(r.num_cached_tokens),
    }
    runs = (full, *(run for _, run, _ in columns))
    rows = [(name, *map(cell, runs)) for name, cell in cells.items()]
    agreements = [agreement for _, _, agreement in columns]
    rows.append(("tokens that agree", "", *map(agreement_text, agreements)))
    if any(agreement.same_next_token is not None for agreement in agreements):
        same = [f"{agreement.same_next_token} of {len(full.token_ids)}" for agreement in agreements]
        rows.append(("same next token after the full cache's text", "", *same))
    return format_table(("", "full cache", *(label for label, _, _ in columns)), rows, left=("",))


def agreement_text(agreement: Agreement) -> str:
    """Says in words how far two runs agree."""
    text = f"{agreement.equal} of {agreement.compared}"
    if agreement.first_difference is None:
        return text
    return f"{text} (first difference at token {agreement.first_difference + 1})"


def to_json(settings: dict[str, Any], comparison: Comparison) -> str:
    """Makes the object that `--json` prints."""
    result = {**settings, **_fields(comparison.run)}
    if comparison.full is not None and comparison.agreement is not None:
        result["full"] = _fields(comparison.full)
        result["agreement"] = asdict(comparison.agreement)
    return json.dumps(result, allow_nan=False)


def exit_code(comparison: Comparison) -> int:
    """Returns 0 if all came to its end, 130 (as shells do for SIGINT) if Ctrl-C ended it."""
    return INTERRUPTED if comparison.interrupted else 0


def _fields(run: Generation) -> dict[str, Any]:
    return {
        "text": run.shown,
        "token_ids": run.token_ids,
        "finish_reason": run.finish_reason,
        "time_to_first_token_s": run.time_to_first_token,
        "tokens_per_second": run.tokens_per_second,
        "kv_bytes": run.kv_bytes,
        "kv_bytes_full": run.kv_bytes_full,
        "num_seen_tokens": run.num_seen_tokens,
        "num_cached_tokens": run.num_cached_tokens,
    }


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f} s"


def _speed(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _memory(run: Generation) -> str:
    held, full = format_bytes(run.kv_bytes), format_bytes(run.kv_bytes_full)
    if run.kv_bytes > run.kv_bytes_full:  # slots are reserved at once, a full cache grows
        return f"KV {held} reserved, full cache {full}"
    return f"KV {held} of {full} ({_share(run)})"


def _share(run: Generation) -> str:
    return f"{100 * run.kv_bytes / run.kv_bytes_full:.0f} %" if run.kv_bytes_full else _NONE
