"""`enable`: H2O attention on a loaded model; `prefill`: a long prompt in blocks."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from h2okv.budget import check_tokens
from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE, cache_in
from h2okv.cache.support import check_model, unwrap
from h2okv.cache.validation import check_ids
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.integration.graphs import DecodeGraphs, are_on, by_name, mask_and_positions
from h2okv.records import refusing


def check_compiler(device: torch.device) -> None:
    """Compile a trivial function; raise ValueError for any error, whatever its type."""
    problem = "compile=True: torch.compile does not work here"
    needed = "on a CPU it needs a C++ compiler such as g++. Install one, or leave out compile=True."
    with refusing(problem, needed, Exception):
        torch.compile(lambda numbers: numbers + 1)(torch.ones(2, device=device))


def with_compiled_steps(model: PreTrainedModel) -> Callable[..., Any]:
    """Wrap a model's forward so that steps of one token on an `H2OCache` run compiled.

    Longer blocks run as they are: their shapes change from one to the next.
    """
    plain = model.forward
    compiled = torch.compile(plain, fullgraph=True)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the caller compiles the whole
            return plain(*args, **kwargs)
        kwargs = by_name(plain, args, kwargs)
        cache, tokens = cache_in(kwargs), kwargs.get("input_ids")
        if tokens is None or tokens.shape[1] != 1 or not isinstance(cache, H2OCache):
            return plain(**kwargs)
        # A mask that grows would be recompiled each step.
        mask, position_ids = mask_and_positions(model, kwargs, cache)
        if position_ids is None or not cache.prepare_step():
            return plain(**kwargs)
        output = compiled(**{**kwargs, "attention_mask": mask})
        cache.end_step()
        return output

    return forward


class _Changes:
    """The changes that `enable` made to a model, shared by all calls on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = 0  # open with blocks
        self.stays = False  # until `disable`
        self._compiles = False
        self._may_record = are_on()
        # A strong reference would keep the model that a `WeakKeyDictionary` maps to this.
        self._hooked: WeakSet[torch.nn.Module] = WeakSet()
        self.undo = ExitStack()
        restore_attention(model, self.undo)

    def make(self, model: PreTrainedModel, outer: torch.nn.Module, compile: bool) -> None:
        """Change the model, if it is not yet changed; with `compile` its forward too."""
        model.set_attn_implementation(ATTENTION_NAME)
        if compile and not self._compiles:
            self.undo.callback(_restore_forward, ref(model), vars(model).get("forward"))
            vars(model)["forward"] = with_compiled_steps(model)
            self._compiles, self._may_record = True, False
        # A wrapper may call the model's forward without its hooks; ``generate`` bypasses the
        # wrapper's.
        for module in {model, outer} - set(self._hooked):
            for hook in (_check_padding, _replace_positions):
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self.undo.callback(handle.remove)
            self._hooked.add(module)

    def record(self, model: PreTrainedModel) -> None:
        """Let the steps that follow one on a GPU be replayed, unless they are compiled."""
        if self._may_record and "forward" not in vars(model):
            self.undo.callback(_restore_forward, ref(model), None)
            vars(model)["forward"] = DecodeGraphs(model)
        self._may_record = False


def _restore_forward(model: ref[PreTrainedModel], forward: Any) -> None:
    if (changed := model()) is not None:
        del vars(changed)["forward"]
        if forward is not None:
            vars(changed)["forward"] = forward


_LOCK = threading.Lock()
_CHANGES: WeakKeyDictionary[PreTrainedModel, _Changes] = WeakKeyDictionary()


def enable(model: PreTrainedModel, *, compile: bool = False) -> EnabledModel:
    """Give a loaded model H2O attention: until `disable`, or inside a ``with`` block.

        h2okv.enable(model)  # from here on
        with h2okv.enable(model):  # here, and then as before
            model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache

    The model's attention implementation is changed at once. The end of a block restores it, also
    after an error. Blocks may be nested and overlap in threads: the last one to end restores the
    model, unless a call without a block has enabled it. While it is enabled, a forward of a padded
    batch without an attention mask is refused (``generate`` makes a mask itself), and a cache with
    ``positions="clamped"`` replaces the positions that are passed to the model.

    Args:
        model: a loaded model, plain, compiled by ``torch.compile`` or with PEFT adapters (not
            prompt learning); its configs' attention implementation, and with ``compile`` its
            ``forward``, are mutated.
        compile: run steps of a single token through ``torch.compile``. The first step takes some
            tens of seconds; after that the small operations of a layer are fused. Every layer must
            hold H2O entries; other models run uncompiled.

    Returns:
        An `EnabledModel`, which a ``with`` statement takes and which calls the model.

    Raises:
        ValueError: if the model is not supported, or the compiler does not work here.
    """
    base = unwrap(model)
    check_model(base)
    if compile:
        check_compiler(input_device(base))
    return EnabledModel(base, model, compile)


def disable(model: PreTrainedModel) -> None:
    """Restore the attention that a model had before `enable`; open ``with`` blocks keep theirs.

    Args:
        model: the model; without effect if it is not enabled.
    """
    base = unwrap(model)
    with _LOCK:
        if (changes := _CHANGES.get(base)) is not None:
            changes.stays = False
            _restore_unused(base, changes)


def _restore_unused(model: PreTrainedModel, changes: _Changes) -> None:
    if not changes.blocks and not changes.stays:
        _CHANGES.pop(model, None)
        changes.undo.close()


class EnabledModel:
    """A model with H2O attention, as `enable` returns it.

    ``with`` restores the model at the end of its block; `disable` restores it otherwise. Calls and
    attributes are the model's, so ``h2okv.enable(model).generate(...)`` works too.
    """

    def __init__(self, model: PreTrainedModel, outer: Any, compile: bool) -> None:
        self._model, self._outer, self._compile = model, outer, compile
        with _LOCK:
            changes = self._make()
            self._began = not changes.stays  # a block takes over what this call began
            changes.stays = True

    def _make(self) -> _Changes:
        changes = _CHANGES.setdefault(self._model, _Changes(self._model))
        try:
            changes.make(self._model, self._outer, self._compile)
        except BaseException:
            _restore_unused(self._model, changes)
            raise
        return changes

    def __enter__(self) -> PreTrainedModel:
        with _LOCK:
            changes = self._make()
            changes.blocks += 1
            changes.stays = changes.stays and not self._began
            self._began = False
        return self._outer

    def __exit__(self, *exception: object) -> None:
        with _LOCK:
            if (changes := _CHANGES.get(self._model)) is not None:
                changes.blocks -= 1
                _restore_unused(self._model, changes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__
            raise AttributeError(name)
        return getattr(self._outer, name)

    def get_base_model(self) -> PreTrainedModel:
        """Return the model itself; PEFT's wrappers have the same method."""
        return self._model


def restore_attention(model: PreTrainedModel, undo: ExitStack) -> None:
    """Let `undo` give a model the attention back that it has now."""
    for config in _configs(model):
        # Not through the property, which would also set the submodels of a composite model.
        name = "_attn_implementation_internal"
        undo.callback(setattr, config, name, config._attn_implementation)


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    configs: dict[int, PreTrainedConfig] = {}
    pending = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in pending:
        if id(config) not in configs:
            configs[id(config)] = config
            subconfigs = (getattr(config, name, None) for name in config.sub_configs)
            pending += [subconfig for subconfig in subconfigs if subconfig is not None]
    return list(configs.values())


def _check_padding(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a batch that looks padded and has no mask; an explicit mask is trusted."""
    arguments = by_name(getattr(module, "_orig_mod", module).forward, args, kwargs)
    input_ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    pad = getattr(module.config, "pad_token_id", None)
    if input_ids is None or pad is None or 1 in input_ids.shape or input_ids.is_meta:
        return
    # ``generate`` drops a mask of ones, or makes one, and always passes positions.
    if mask is not None or arguments.get("position_ids") is not None:
        return
    for side, column in (("left", 0), ("right", -1)):
        rows = input_ids[:, column] == pad
        if bool(rows.any()) and not bool(rows.all()):
            row = int(rows.nonzero()[0])
            raise ValueError(
                f"row {row} of the batch is padded on the {side} with token {pad} and there is no "
                "attention mask; pass attention_mask with 0 for padding and 1 for text."
            )


def _replace_positions(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the model's positions by those of a cache that rewrites them."""
    arguments = by_name(getattr(module, "_orig_mod", module).forward, args, kwargs)
    cache, position_ids = cache_in(arguments), arguments.get("position_ids")
    if not isinstance(cache, H2OCache):
        return None
    _begin_recording(module, arguments, cache)
    if not cache.needs_enabling:
        return None
    if position_ids is None:
        tokens, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        tokens = arguments["inputs_embeds"] if tokens is None else tokens
        length, seen = tokens.shape[1], cache.num_seen_tokens
        if mask is not None and mask.dim() == 2:
            position_ids = positions_of(mask)[:, seen : seen + length]
        else:
            position_ids = torch.arange(seen, seen + length, device=tokens.device).unsqueeze(0)
    return (), {**arguments, "position_ids": cache.place(position_ids)}


def _begin_recording(module: torch.nn.Module, arguments: dict[str, Any], cache: H2OCache) -> None:
    """Replace the forward of a model that reads on a GPU, from the next one on.

    Of one that takes a step, or reads a span of a prompt.
    """
    tokens = arguments.get("input_ids")
    if tokens is None or not tokens.is_cuda:
        return
    span = max((layer.span for layer in cache.span_layers), default=math.inf)
    if 1 < tokens.shape[1] < span:
        return
    if not torch.compiler.is_compiling():
        model = unwrap(module)
        with _LOCK:
            if (changes := _CHANGES.get(model)) is not None:
                changes.record(model)


def positions_of(attention_mask: Tensor) -> Tensor:
    """Return each token's position, padding not counted, as in `generate`; int64 ``[B, N]``."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def input_device(model: Any) -> torch.device:
    """Return the device of a model's input tokens: where its embedding runs.

    ``model.device`` is that of the first parameter: meta if accelerate has offloaded it, and not
    always the embedding's if a model is spread over devices.
    """
    base = unwrap(model)
    embedding: Any = base.get_input_embeddings()
    for module in (embedding, *base.modules()):
        hook: Any = getattr(module, "_hf_hook", None)
        for entry in getattr(hook, "hooks", (hook,)):
            if getattr(entry, "execution_device", None) is not None:
                return torch.device(entry.execution_device)
        if module is embedding and embedding.weight.device.type != "meta":
            break
    device: torch.device = embedding.weight.device
    return device


def recipe_path() -> Path:
    """Return the folder for ``model.generate(custom_generate=...)``.

    It can be uploaded to the Hub unchanged, or used locally with ``trust_remote_code=True``.
    """
    return Path(__file__).with_name("hub_recipe")


# --- a prompt in blocks -------------------------------------------------------------------------


def read_blocks(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: H2OCache,
    chunk: int | None = None,
    *,
    all_logits: bool = False,
    attention_mask: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Read tokens ``[B, T]`` without padding into a cache in blocks, with the memory of one block.

    The cache continues after the tokens that it has seen. If it is empty, a budget in fractions
    refers to all of ``input_ids``. Blocks are of `chunk` tokens, by default ``cache.read_chunk``,
    else all at once. ``attention_mask``, ones ``[B, tokens seen + T]``, marks tokens equal to the
    padding token as text; without it a batch that looks padded is refused. Yields the number of
    tokens read and logits, ``[B, c, V]`` with `all_logits`, else ``[B, 1, V]``.
    """
    length = input_ids.shape[1]
    if length == 0:
        raise ValueError("input_ids has no tokens; give at least one.")
    chunk = chunk if chunk is not None else cache.read_chunk or length
    check_tokens("chunk", chunk, 1)
    seen = cache.num_seen_tokens
    inner: Any = getattr(unwrap(model), "model", None)
    if not seen and getattr(inner, "rope_deltas", None) is not None:
        inner.rope_deltas = None  # of an earlier prompt with images, which a block would take
    cache.expect(length)
    try:
        with _attending(model, cache):
            for start in range(0, length, chunk):
                block = input_ids[:, start : start + chunk].to(input_device(model))
                num_read = start + block.shape[1]
                mask = None if attention_mask is None else attention_mask[:, : seen + num_read]
                with torch.no_grad():
                    logits = model(
                        block,
                        attention_mask=mask,
                        **{CACHE: cache},
                        logits_to_keep=0 if all_logits else 1,
                    ).logits
                yield num_read, logits
    finally:
        cache.expect(None)


def _attending(model: PreTrainedModel, cache: H2OCache) -> AbstractContextManager[Any]:
    enabled = model.config._attn_implementation == ATTENTION_NAME and not cache.needs_enabling
    return nullcontext() if enabled else enable(model)


def _inferred_mask(model: PreTrainedModel, input_ids: Tensor, cache: H2OCache) -> Tensor:
    """Return the mask ``[B, tokens seen + T]`` that ``generate`` infers from the padding token."""
    mask = cache.next_turn(input_ids)["attention_mask"]
    config = getattr(model, "generation_config", None)
    pad, ends = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    if pad is not None and pad not in (ends if isinstance(ends, list) else [ends]):
        mask[:, mask.shape[1] - input_ids.shape[1] :] *= input_ids != pad
    return mask


def prefill(
    model: PreTrainedModel, input_ids: Tensor, cache: H2OCache, attention_mask: Tensor | None = None
) -> Tensor:
    """Read a prompt, or a further turn, into a cache in blocks of ``cache.read_chunk``.

    Then generate with the full text; transformers reads only the tokens that the cache has not:

        h2okv.prefill(model, input_ids[:, :-1], cache)
        model.generate(input_ids, cache=cache)  # before transformers 5.24: past_key_values=cache

    Args:
        model: a loaded model, with H2O attention or without.
        input_ids: int ``[B, T]``.
        cache: mutated.
        attention_mask: ``[B, tokens seen + T]``, 0 for padding; with ``None`` tokens equal to the
            padding token are padding where ``generate`` takes them for it. A padded batch is read
            in one forward and split into blocks inside each layer, because the blocks of its rows
            begin at different columns.

    Returns:
        Logits of each sequence's last token, ``[B, V]``.

    Raises:
        ValueError: if there is nothing to read, or the mask is of another shape.
    """
    if not isinstance(cache, H2OCache):
        raise ValueError(
            f"cache must be an H2OCache, got {type(cache).__name__}; give H2OCache(model)."
        )
    check_ids(input_ids)
    length, needed = input_ids.shape[1], cache.num_seen_tokens + input_ids.shape[1]
    mask = _inferred_mask(model, input_ids, cache) if attention_mask is None else attention_mask
    if tuple(mask.shape) != (input_ids.shape[0], needed):
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} must be [{input_ids.shape[0]}, {needed}]:"
            f" a column for each of the {needed - length} tokens seen, padding included, and the"
            f" {length} of input_ids, 0 for padding and 1 for text."
        )
    if mask.is_meta or bool(mask.to(torch.bool).all()):
        for _, logits in read_blocks(model, input_ids, cache, attention_mask=attention_mask):
            last = logits[:, -1]
        return last
    device = input_device(model)
    # With padding behind the text, the last token is further left.
    after = mask[:, -length:].long().flip(1).argmax(dim=1)
    with _attending(model, cache), torch.no_grad():
        logits = model(
            input_ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions_of(mask)[:, -length:].to(device),
            logits_to_keep=int(after.max()) + 1,
            **{CACHE: cache},
        ).logits
    return logits[torch.arange(len(after)), logits.shape[1] - 1 - after.to(logits.device)]
