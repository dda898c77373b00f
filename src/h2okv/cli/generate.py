"""`h2okv generate` and `h2okv demo`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache

import h2okv
from h2okv.assets import sample_prompt
from h2okv.cli.args import (
    COMPILE_HELP,
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    POLICY_HELP,
    SCORING_HELP,
    CacheChoice,
    Model,
    Sampling,
    full_cache,
    parse_amount,
    parse_device,
    parse_dtype,
    parse_positions,
)
from h2okv.console import (
    INTERRUPTED,
    Progress,
    discard,
    format_bytes,
    format_table,
    write_remark,
    write_text,
)
from h2okv.engine.detokenizer import TextStream
from h2okv.engine.sampler import RefuseNaN
from h2okv.integration.loading import Described, describe, load_weights
from h2okv.integration.models import BUNDLED


@dataclass(frozen=True)
class Agreement:
    """Two runs of tokens, compared place by place.

    Attributes:
        compared: Places, as many as the longer run has.
        equal: Places where both have the same token.
        first_difference: The first place where they differ, from 0; None if they never do.
        same_next_token: Places of the full cache's text where the other cache, after that same
            text, would choose the same token; None if it was not asked.
    """

    compared: int
    equal: int
    first_difference: int | None
    same_next_token: int | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int], full: Sequence[int], same_next_token: int | None = None
    ) -> Agreement:
        """Compares two runs; a place that only one of them has counts as a difference."""
        compared = max(len(tokens), len(full))
        same = [a == b for a, b in zip(tokens, full, strict=False)]
        same += [False] * (compared - len(same))
        first = same.index(False) if False in same else None
        return cls(compared, sum(same), first, same_next_token)


_WARM_UP_PROMPT = 2048
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """What is to be generated, whatever cache it is done with.

    Attributes:
        model: From `load_weights`.
        described: From `describe`.
        input_ids: The prompt, int [1, T].
        sampling: How to choose the tokens, and how many.
        compiled: Whether an H2O cache's steps go through torch.compile.
    """

    model: PreTrainedModel
    described: Described
    input_ids: torch.Tensor
    sampling: Sampling
    compiled: bool = False

    @property
    def room(self) -> int:
        """How many tokens can be generated before the model's context is full."""
        if self.described.context is None:
            return self.sampling.max_new_tokens
        left = self.described.context - self.input_ids.shape[1]
        return min(self.sampling.max_new_tokens, left)


@dataclass(frozen=True)
class Generation:
    """What one run gave, and what it cost.

    Attributes:
        text: The new text.
        token_ids: The new tokens.
        finish_reason: `length`, `context` (the model's context is full), `eos` or `interrupted`.
        time_to_first_token: Seconds; None if no token came.
        tokens_per_second: While decoding, the first token not counted; None below two tokens.
        kv_bytes: Bytes that the cache held at the end, the scores and positions included.
        kv_bytes_full: Key and value bytes that a full cache would have held.
        num_seen_tokens: Tokens that went through the cache.
        num_cached_tokens: Tokens of which it still held the key and value, for each head.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    time_to_first_token: float | None
    tokens_per_second: float | None
    kv_bytes: int
    kv_bytes_full: int
    num_seen_tokens: int
    num_cached_tokens: int

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.finish_reason == "interrupted"


def generate_once(
    job: Job,
    cache: Cache,
    write: Callable[[str], None],
    show_progress: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> Generation:
    """Generates from a prompt and measures it; Ctrl-C ends it with what there is."""
    model = job.model
    attention: AbstractContextManager[Any] = nullcontext()
    if isinstance(cache, h2okv.H2OCache):
        attention = h2okv.enable(model, compile=job.compiled)
    interrupted = False
    chunk = _chunk(cache)
    length = job.input_ids.shape[1]
    with attention, prefill_progress(model, length, show_progress, chunk) as end_progress:
        stream = TextStream(job.described.tokenizer, job.input_ids, write, end_progress)
        torch.manual_seed(job.sampling.seed)
        start = time.perf_counter()
        try:
            _generate(job, cache, stream, processors)
        except KeyboardInterrupt:
            interrupted = True
            end_progress()
            stream.end()
    reason = "interrupted" if interrupted else _finish_reason(job, stream)
    return _measured(stream, start, cache, reason)


LONG_PROMPT = 512
"""A prompt of so many tokens gets a progress bar while it is read."""


@contextmanager
def prefill_progress(
    model: PreTrainedModel, prompt_tokens: int, wanted: bool, chunk: int | None = None
) -> Iterator[Callable[[], None]]:
    """Shows how many layers have read the prompt; gives the function that ends it early."""
    layers = decoder_layers(model)
    steps = len(layers) * math.ceil(prompt_tokens / (chunk or prompt_tokens))
    shown = wanted and prompt_tokens >= LONG_PROMPT and bool(layers)
    with ExitStack() as stack:
        bar = Progress(f"reading {prompt_tokens:,} tokens", steps, shown=shown)
        stack.enter_context(bar)
        for layer in layers if bar.is_drawn else ():
            stack.callback(layer.register_forward_hook(lambda *_: bar.advance()).remove)
        yield stack.close


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Finds a model's decoder layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def warm_up(job: Job, make_caches: Sequence[Callable[[], Cache]]) -> None:
    """Runs a few tokens with each cache, so that none of them pays for what happens only once."""
    short = replace(
        job,
        input_ids=job.input_ids[:, :_WARM_UP_PROMPT],
        sampling=Sampling(max_new_tokens=_WARM_UP_TOKENS),
    )
    for make_cache in make_caches:
        if generate_once(short, make_cache(), lambda _: None).interrupted:
            raise KeyboardInterrupt


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Says in the words of `generate` how the tokens are chosen."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }


def _generate(
    job: Job, cache: Cache, stream: TextStream, processors: Sequence[LogitsProcessor]
) -> None:
    input_ids = job.input_ids.to(job.model.device)
    options = sampling_options(job.sampling)
    if isinstance(cache, h2okv.H2OCache) and cache.prefill_chunk is not None:
        # Blocks of the cache, and no more than one of them in the model at a time.
        cache.expect(input_ids.shape[1])
        options["prefill_chunk_size"] = cache.prefill_chunk
    generate: Any = job.model.generate  # its type gets lost on the way through torch's Module
    generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        max_new_tokens=job.room,
        use_cache=True,
        num_beams=1,
        logits_processor=[RefuseNaN(), *processors],
        streamer=stream,
        **options,
    )


def _chunk(cache: Cache) -> int | None:
    """The most tokens that are read at once."""
    return cache.prefill_chunk if isinstance(cache, h2okv.H2OCache) else None


def _finish_reason(job: Job, stream: TextStream) -> str:
    if len(stream.token_ids) < job.room:
        return "eos"
    return "length" if job.room == job.sampling.max_new_tokens else "context"


def _measured(stream: TextStream, start: float, cache: Cache, finish_reason: str) -> Generation:
    times = stream.arrival_times
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    if isinstance(cache, h2okv.H2OCache):
        held, full = cache.nbytes, cache.full_nbytes
        seen, cached = cache.num_seen_tokens, cache.num_cached_tokens
    else:
        held = full = _nbytes(cache)
        seen = cached = int(cache.get_seq_length())
    return Generation(
        text=stream.text,
        token_ids=stream.token_ids,
        finish_reason=finish_reason,
        time_to_first_token=times[0] - start if times else None,
        tokens_per_second=speed,
        kv_bytes=int(held),
        kv_bytes_full=int(full),
        num_seen_tokens=int(seen),
        num_cached_tokens=int(cached),
    )


def _nbytes(cache: Cache) -> int:
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _Follow(LogitsProcessor):
    """Notes which token would be the next, and then takes the given one."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.choices: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        given = self._token_ids[len(self.choices)]
        self.choices.append(int(scores.argmax()))
        scores.fill_(-torch.inf)
        scores[:, given] = 0.0
        return scores


def count_same_choices(job: Job, cache: Cache, token_ids: Sequence[int]) -> int | None:
    """Counts how often the likeliest next token is the given one, the text before it given too.

    Two texts that part at one token have little in common from there on, however good both are.
    This asks at every token anew, so it tells how much the cache lost.
    """
    if not token_ids:
        return None
    follow = _Follow(token_ids)
    forced = replace(job, sampling=Sampling(max_new_tokens=len(token_ids)))
    run = generate_once(forced, cache, discard, processors=[follow])
    if run.interrupted:
        raise KeyboardInterrupt
    return sum(a == b for a, b in zip(follow.choices, token_ids, strict=True))


@dataclass(frozen=True)
class Comparison:
    """A generation, and the full cache's where it was asked for.

    Attributes:
        run: With the chosen cache.
        full: With transformers' own cache; None if not asked for, or after Ctrl-C before it.
        agreement: How far both agree; None without `full`.
        cut_short: Whether Ctrl-C came after both, while their agreement was looked into.
    """

    run: Generation
    full: Generation | None = None
    agreement: Agreement | None = None
    cut_short: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended any part of it."""
        runs = (self.run, self.full)
        return self.cut_short or any(run is not None and run.interrupted for run in runs)


def run_alone(job: Job, choice: CacheChoice, quiet: bool) -> Comparison:
    """Generates with the chosen cache only."""
    cache = choice.make(job.model.config, job.sampling.seed)
    run = generate_once(job, cache, discard if quiet else write_text, show_progress=not quiet)
    if not quiet:
        write_text("\n")
    return Comparison(run)


def run_beside_full(job: Job, choice: CacheChoice, quiet: bool) -> Comparison:
    """Generates with the chosen cache and then with the full one."""
    config, seed = job.model.config, job.sampling.seed
    warm_up(job, [lambda: choice.make(config, seed), lambda: full_cache(config)])

    def generate(label: str, cache: Cache) -> Generation:
        if not quiet:
            write_text(f"--- {label} ---\n")
        run = generate_once(job, cache, discard if quiet else write_text, show_progress=not quiet)
        if not quiet:
            write_text("\n\n")
        return run

    run = generate(choice.label, choice.make(config, seed))
    if run.interrupted:
        return Comparison(run)
    full = generate("full cache", full_cache(config))
    same_next_token, cut_short = None, False
    # With sampling the full cache's text is not its likeliest one, so there is nothing to ask.
    if job.sampling.temperature == 0 and not full.interrupted:
        try:
            same_next_token = count_same_choices(job, choice.make(config, seed), full.token_ids)
        except KeyboardInterrupt:
            cut_short = True
    agreement = Agreement.of(run.token_ids, full.token_ids, same_next_token)
    return Comparison(run, full, agreement, cut_short)


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Reads the prompt from the one place where the user put it."""
    if argument not in (None, "-") and file is not None:
        raise ValueError("the prompt is given twice, as an argument and by --file; leave one out")
    if file is not None:
        prompt = _decode(f"--file '{file}'", _read_file(file))
    elif argument not in (None, "-"):
        prompt = _check_argument(argument)
    elif argument is None and sys.stdin.isatty():
        raise ValueError("there is no prompt; give it as an argument, by --file, or on stdin")
    else:
        prompt = _decode("the prompt on stdin", sys.stdin.buffer.read())
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text to go on from")
    return prompt


def encode_prompt(described: Described, prompt: str) -> torch.Tensor:
    """Turns the prompt into tokens."""
    input_ids = described.tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    length = input_ids.shape[1]
    if length == 0:
        raise ValueError("the prompt has no tokens for this model; give some text to go on from")
    if described.context is not None and length >= described.context:
        raise ValueError(
            f"the prompt has {length} tokens, but the context of --model {described.name!r} is"
            f" {described.context}; shorten it to {described.context - 1} or fewer"
        )
    check_vocabulary(described, int(input_ids.max()))
    return input_ids


def check_vocabulary(described: Described, largest: int) -> None:
    """Refuses a token that the model has no embedding for."""
    vocab_size = described.config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of --model {described.name!r} gives token {largest}, but the model"
            f" knows only {vocab_size}; get the model again, with its own tokenizer"
        )


def _read_file(file: Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"--file '{file}' cannot be read ({reason}); give a text file") from error


def _decode(source: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error
    return text.removeprefix("\ufeff").rstrip("\r\n")


def _check_argument(argument: str) -> str:
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("the prompt argument is not UTF-8 text; convert it to UTF-8") from error
    return argument


_NONE = "-"
_FEW_TOKENS = 32


def summary_line(run: Generation) -> str:
    """Puts a generation's measurements in one line."""
    parts = [
        f"{len(run.token_ids)} tokens ({run.finish_reason})",
        f"first after {_seconds(run.time_to_first_token)}",
        f"{_speed(run.tokens_per_second)} tokens/s",
        f"KV {format_bytes(run.kv_bytes)} of {format_bytes(run.kv_bytes_full)} ({_share(run)})",
        f"{run.num_seen_tokens} tokens seen, {run.num_cached_tokens} kept",
    ]
    return " | ".join(parts)


def report(label: str, comparison: Comparison) -> None:
    """Tells people what a generation cost, and how it compares to the full cache's.

    The table goes to stdout, for it is the result of a comparison; remarks go to stderr.
    """
    run = comparison.run
    if comparison.full is not None and comparison.agreement is not None:
        write_text(comparison_table(label, run, comparison.full, comparison.agreement))
    else:
        write_remark(summary_line(run))
    note = small_budget_note(run)
    if note is not None:
        write_remark(note)


def comparison_table(label: str, run: Generation, full: Generation, agreement: Agreement) -> str:
    """Sets a generation beside that of the full cache."""
    cells: dict[str, Callable[[Generation], str]] = {
        "tokens generated": lambda r: str(len(r.token_ids)),
        "time to first token": lambda r: _seconds(r.time_to_first_token),
        "tokens per second": lambda r: _speed(r.tokens_per_second),
        "KV cache held": lambda r: format_bytes(r.kv_bytes),
        "of a full one": _share,
        "tokens seen": lambda r: str(r.num_seen_tokens),
        "tokens kept": lambda r: str(r.num_cached_tokens),
    }
    rows = [(name, cell(full), cell(run)) for name, cell in cells.items()]
    rows.append(("tokens that agree", "", agreement_text(agreement)))
    if agreement.same_next_token is not None:
        same = f"{agreement.same_next_token} of {len(full.token_ids)}"
        rows.append(("same next token after the full cache's text", "", same))
    return format_table(("", "full cache", label), rows, left=("",))


def agreement_text(agreement: Agreement) -> str:
    """Says in words how far two runs agree."""
    text = f"{agreement.equal} of {agreement.compared}"
    if agreement.first_difference is None:
        return text
    return f"{text} (first difference at token {agreement.first_difference + 1})"


def small_budget_note(run: Generation) -> str | None:
    """Warns of a budget that is a share of a short prompt, and so hardly keeps anything."""
    kept = run.num_cached_tokens
    if kept >= _FEW_TOKENS or kept >= run.num_seen_tokens:
        return None
    return (
        f"note: only {kept} tokens were kept, too few for good text; after a short prompt give"
        " the budget in tokens, such as --heavy 64 --recent 64"
    )


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
        "text": run.text,
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


def _share(run: Generation) -> str:
    return f"{100 * run.kv_bytes / run.kv_bytes_full:.0f} %" if run.kv_bytes_full else _NONE


HELP = """Generate text with an H2O cache.

The text streams to stdout, the summary line goes to stderr.

Examples:

    h2okv generate --file chapter.txt --heavy 0.1 --recent 0.1

    h2okv generate "It was late when" --heavy 64 --recent 64

    cat chapter.txt | h2okv generate --model ./my-model --compare full

    h2okv generate --file book.txt --heavy 512 --recent 512 --positions rolling
"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads it from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a text file.")] = None,
    model: Model = BUNDLED,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "h2o",
    heavy: Annotated[
        str, typer.Option(help="Heavy hitters to keep: tokens (64) or a share of the prompt (0.1).")
    ] = "0.1",
    recent: Annotated[
        str, typer.Option(help="Newest tokens to keep: tokens (64) or a share (0.1).")
    ] = "0.1",
    sink: Annotated[int, typer.Option(help="First tokens to keep whatever their score.")] = 0,
    scoring: Annotated[str, typer.Option(help=SCORING_HELP)] = "sum",
    decay: Annotated[float | None, typer.Option(help=DECAY_HELP, show_default=False)] = None,
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    positions: Annotated[
        str,
        typer.Option(help="original, rolling (past the context window) or clamped (OPT)."),
    ] = "original",
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="The most tokens that are read at once; 1 is the paper's Algorithm 1.",
            show_default="all; with rolling positions 512, or a quarter of the window",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Where the random numbers start.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    compare: Annotated[
        str | None, typer.Option(help="full: run the full cache too and compare.")
    ] = None,
) -> int:
    """Generates text from a prompt, as `HELP` tells the user."""
    if compare not in (None, "full"):
        raise ValueError(f"--compare {compare!r} is not known; the one choice is --compare full")
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    choice = CacheChoice(
        policy,
        parse_amount("heavy", heavy),
        parse_amount("recent", recent),
        sink,
        parse_positions(positions),
        prefill_chunk,
        scoring,
        decay,
        kv_bits,
    )
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    text = read_prompt(prompt, file)
    described = describe(model)
    if choice.positions == "rolling" and prefill_chunk is None and described.context is not None:
        choice = replace(choice, prefill_chunk=max(1, min(512, described.context // 4)))
    if choice.positions != "original" and compare is None:
        described = replace(described, context=None)  # nothing ends at the context window
    choice.make(described.config, seed)  # a bad budget is heard about before the weights load
    input_ids = encode_prompt(described, text)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    job = Job(loaded, described, input_ids, sampling, compile)
    run = run_alone if compare is None else run_beside_full
    comparison = run(job, choice, quiet=json)
    if json:
        write_text(to_json(_settings(job, choice), comparison) + "\n")
    else:
        report(choice.label, comparison)
    return exit_code(comparison)


def _settings(job: Job, choice: CacheChoice) -> dict[str, Any]:
    return {
        "model": job.described.name,
        **asdict(choice),
        **asdict(job.sampling),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "device": str(job.model.device),
        "prompt_tokens": job.input_ids.shape[1],
    }


# What the prompt may use of a context that is longer than the sample text's first pages.
_MOST_PROMPT_TOKENS = 4096
_SHOWN_CHARACTERS = 300


def demo(
    model: Model = BUNDLED,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    dtype: Annotated[str, typer.Option(help="As for generate.")] = "auto",
    device: Annotated[str, typer.Option(help="As for generate.")] = "auto",
) -> int:
    """Shows what H2O at 20 % does to text, speed and memory, beside the full cache."""
    sampling = Sampling(max_new_tokens)
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    described = describe(model)
    input_ids = _long_prompt(described, max_new_tokens)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    prompt_end = described.tokenizer.decode(input_ids[0], skip_special_tokens=True)
    write_text(
        f"{described.name}, {input_ids.shape[1]} tokens of a novel that it was not trained on,"
        f" ending in\n\n...{prompt_end[-_SHOWN_CHARACTERS:]}\n\n"
    )
    job = Job(loaded, described, input_ids, sampling)
    choice = CacheChoice(policy="h2o", heavy=0.1, recent=0.1, sink=0)
    comparison = run_beside_full(job, choice, quiet=False)
    report(choice.label, comparison)
    return exit_code(comparison)


def _long_prompt(described: Described, max_new_tokens: int) -> torch.Tensor:
    """Takes as much of the sample text as leaves room for the new tokens."""
    context = described.context or _MOST_PROMPT_TOKENS
    room = min(context, _MOST_PROMPT_TOKENS) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the context of"
            f" {context}; give fewer"
        )
    encoded = described.tokenizer(sample_prompt(), return_tensors="pt", verbose=False)
    return encoded["input_ids"][:, :room]
