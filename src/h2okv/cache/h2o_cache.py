"""The object that a user passes as ``cache``."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from h2okv.budget import Budget, check_tokens
from h2okv.cache import support, validation
from h2okv.cache.base_layer import BaseLayer, check_new_tokens
from h2okv.cache.checkpoint import load_cache, save_cache
from h2okv.cache.drafting import Drafting, end_recording
from h2okv.cache.explanation import Departures, Explanation
from h2okv.cache.forward import Forward
from h2okv.cache.layer import CacheLayer
from h2okv.cache.linear_states import continues_prompts, held_bytes
from h2okv.cache.rope import PositionRule, Rotation
from h2okv.cache.slot_layer import SlotLayer
from h2okv.cache.slot_state import SlotBytes, SlotState, ordinary_tensors, slots_for
from h2okv.cache.spans import Spans, to_device
from h2okv.cache_spec import parse
from h2okv.config import MEASURED, CacheConfig
from h2okv.console import warn
from h2okv.ops.attention import num_means
from h2okv.policy import Rule, get_rule
from h2okv.records import check_arguments, short_repr

_FEW_ENTRIES = 12
_WITHOUT_WINDOW = ("heavy", "keydiff")  # policies whose papers have no recent window


class H2OCache(Cache):
    """A KV cache that keeps heavy hitters and recent tokens (H2O, arXiv 2306.14048, Algorithm 1).

    For each layer, sequence and KV head on its own it holds ``K = sink + heavy + recent`` entries.
    Every block of new tokens attends to what is kept and to itself, adds its attention to the
    scores (fp32, summed over the query heads of a KV head), and then the cache is evicted down to
    ``K``. Layers that are not full attention (sliding window, linear) keep transformers' own cache.

    Use it with a model that has attention ``"h2o"``:

        model, tokenizer = h2okv.load("smollm2")  # or h2okv.enable(model)
        cache = h2okv.H2OCache(model, "best", budget=0.2)
        model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache

    Args:
        model: the model, which ``policy="best"`` measures once, or its config.
        *amounts: by position ``policy`` and ``budget``, or both and options in one text, such as
            ``"best:20%,bits=8"`` (`CacheConfig.from_spec`); one number is ``budget``, and several
            are ``heavy``, ``recent`` and ``sink``.
        **options: ``policy``, which may be a `Rule` object; ``budget``: a fraction of the prompt
            (0.2 or ``"20%"``), tokens (512) or ``"full"``, which the policy divides; or its parts
            ``heavy``, ``recent`` and ``sink``; and the other fields of `CacheConfig`, which
            explains all of them.

    Raises:
        ValueError: if the budget or the policy makes no sense, or the model is not supported.
    """

    layer_class: type[CacheLayer] = SlotLayer
    num_rows = 0  # of the pool, if its sequences are the first rows of one

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig | None = None,
        *amounts: str | Rule | int | float,
        **options: Any,
    ) -> None:
        options = _named(amounts, options)
        config: Any = _checked_model(model)
        policy = options.get("policy")
        if isinstance(policy, Rule):
            options["policy"] = policy.name
        self._build(config, CacheConfig(**options), policy)
        self.warn_of_few_entries()

    def _build(self, config: Any, cache: CacheConfig, policy: Any) -> None:
        """Make the layers; `policy` is the user's: a `Rule`, a name, or ``None``."""
        model = config
        rule = policy if isinstance(policy, Rule) else cache.policy
        self.rule = self.make_rule(rule, cache)
        if cache.layer_budgets == MEASURED:
            cache = support.measured_budgets(config, cache)
        name = cache.policy if ":" in cache.policy else self.rule.name
        self.cache_config = cache = replace(cache, policy=name, decay=self.rule.scoring.decay)
        self.budget = cache.budget
        self.evict_every = self.cuts(cache)
        self.kv_bits = cache.kv_bits
        config = support.config_of(config)
        self.config = config
        support.check_model(config)
        support.check_compiled(model)
        window = support.context_window(config)
        self.position_rule = PositionRule(
            cache.positions, self.evict_every, window, cache.whole_prompts
        )
        support.check_positions(config, cache.positions, self.rule)
        support.check_rule(self.rule, self.position_rule)
        # transformers' own cache knows each layer's kind, in every version of transformers.
        layers: list[Any] = DynamicCache(config=config).layers
        full_layers = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        support.check_layer_budgets(cache, self.rule, config, len(full_layers))
        transforms = support.measured_keys(model, cache)
        self._lacks_model = model is config and support.transforms_keys(cache, config)
        alike = self.rule, self.position_rule, cache.kv_bits
        # A rule that looks at each query or block by itself is cut into blocks, and no more.
        has_spans = (self.evict_every or 1) > 1 and self.rule.scores_spans
        spans = Spans(self.evict_every or 1, cache.whole_prompts) if has_spans else None
        for number, index in enumerate(full_layers):
            budget, head_budgets = cache.layer_budget(number), cache.head_budgets(number)
            layers[index] = self.layer_class(index, budget, *alike, head_budgets, spans)
            layers[index].latent = support.latent_sizes(config)
            layers[index].key_transform = transforms.get(index)
            # Also where nothing is evicted; at every token (1) blocks are as long as one.
            layers[index].rounds_blocks = (cache.chunk or 1) > 1
        self._scored = [layer for layer in layers if isinstance(layer, BaseLayer)]
        support.check_layers(config, layers, len(self._scored), self.position_rule)
        self._last_updated: BaseLayer | None = None
        self._expects_turn = False
        self._drafting: Drafting | None = None  # the call that records
        is_limited = cache.positions == "original" and not support.window_by_length(config)
        self._window: int | None = window if is_limited else None  # until a text was longer
        self._connect_layers()
        super().__init__(layers=layers)

    def make_rule(self, policy: str | Rule, cache: CacheConfig) -> Rule:
        """Make the rule that evicts."""
        rule, grows = get_rule(policy, cache.seed, cache.scoring, cache.decay), cache.grows
        if rule.grows != (grows and not cache.is_full):  # a rule of the user may have other caches
            rule = copy.copy(rule)
            rule.grows = not rule.grows
        return rule

    def cuts(self, cache: CacheConfig) -> int | None:
        """Return the tokens between two cuts; ``None`` if blocks are not cut."""
        return cache.evict_every if self.rule.evicts else None

    @classmethod
    def from_spec(
        cls, model: PreTrainedModel | PreTrainedConfig, text: str, **options: Any
    ) -> H2OCache:
        """Make the empty cache of a text such as ``"best:20%"``, as the constructor does."""
        return cls(model, text, **options)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig | PreTrainedModel, cache_config: CacheConfig
    ) -> H2OCache:
        """Make the empty cache that a `CacheConfig` describes.

        Args:
            config: the model's config, or the model.
            cache_config: the arguments of this class by name.

        Raises:
            ValueError: as the constructor does.
        """
        cache = cls.__new__(cls)
        cache._build(_checked_model(config), cache_config, None)
        return cache

    def __repr__(self) -> str:
        return f"H2OCache({self.cache_config.label!r}, layers={len(self.layers)})"

    def warn_of_few_entries(self) -> None:
        """Warn of a budget that ruins any text: no recent tokens, or a few entries."""
        budget = self.budget
        if not self.rule.evicts:
            return
        entries = self.rule.allocate_budget(budget.resolve(0))
        if budget.recent == entries.recent == 0 and self.rule.name not in _WITHOUT_WINDOW:
            warn(
                f"{self!r} keeps no recent tokens, and text decays without them; give"
                " budget=0.2, or recent=64 too."
            )
        elif entries.total < _FEW_ENTRIES and not budget.is_relative:
            warn(
                f"{self!r} keeps {entries.total} entries, too few for good text; give more, such as"
                " budget=256, or a fraction such as budget=0.2."
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; called by the model.

        Args:
            key_states: ``[B, H, T, D]``.
            value_states: ``[B, H, T, Dv]``.
            layer_idx: the layer's index.
            *args: passed on to the layer, as ``kwargs`` are.
            **kwargs: see above.

        Raises:
            ValueError: if the model's attention is not ``"h2o"``, or the batch, dtype or model
                differs from that of the cached entries.
        """
        # The layer before must have been attended to by now; asking here, not at the next
        # forward, stops a model without H2O attention before it has made a single token.
        if self._last_updated is not None and self._last_updated.awaits_attention:
            self._last_updated.require_attention()
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"H2OCache was made for a model of {len(self.layers)} layers, and this one has"
                " more; make it as H2OCache(model, ...) of the model that runs."
            )
        layer = self.layers[layer_idx]
        is_device_only = torch.compiler.is_compiling() or self._scored[0].forward.leaves_host
        if layer is self._scored[0]:
            layer.forward.begin()
            if not is_device_only:
                self._begin_forward(key_states.shape[2])
                if self._lacks_model and not layer.is_initialized:
                    support.warn_of_untransformed_keys()
            for rotation in layer.rotations.shared_rotations:
                rotation.begin_forward()
        elif not is_device_only and layer in self._scored[1:2]:
            self._warn_past_window()  # now the first layer knows what is padding
        self._last_updated = layer if isinstance(layer, BaseLayer) else None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the tokens seen, padding included (not the tokens cached)."""
        self._end_drafting()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, Any]:
        """Return the length and the offset of a block's mask; called by the model."""
        self._end_drafting()
        if not torch.compiler.is_compiling():
            # The model hands over no mask. Here no layer has read any of the block yet.
            arguments = sys._getframe(1).f_locals
            mask, position_ids = arguments.get("attention_mask"), arguments.get("position_ids")
            self.check_block(query_length, mask, position_ids)
        return super().get_mask_sizes(query_length, layer_idx)

    def check_block(
        self, length: int, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        """Refuse a block that takes padding seen for text, before any layer reads it.

        Args:
            length: T.
            attention_mask: ``[B, tokens seen + T]``, 0 for padding; ``None`` without padding.
            position_ids: where the model puts the tokens, ``[B or 1, T]``, if it is known.

        Raises:
            ValueError: if the mask, or the positions, contradict those of the tokens seen.
        """
        first, real = self._scored[0], None
        # A step on a GPU must not wait for what it would read.
        is_first = not (first.is_initialized and first.holds_budgets)
        if is_first or first.forward.sums is not None:  # what is recorded asks nothing
            return
        if length == 1 and first.device.type != "cpu":
            return
        end = self.num_seen_tokens + length
        # A mask that ends before the block does is refused where the model's is made.
        is_flat = attention_mask is not None and attention_mask.dim() == 2
        if attention_mask is not None and is_flat and attention_mask.shape[1] >= end:
            validation.check_mask(first, attention_mask)
            real = attention_mask[:, end - length : end].to(torch.bool)
        if first.counts_padding is not None and not self.needs_enabling:
            validation.check_follows(first, position_ids, real, length)

    def _begin_forward(self, length: int) -> None:
        """Refuse a forward of T tokens that cannot follow; mutates the cache."""
        self._end_drafting()
        support.check_callers()
        self._check_goes_on(length)

    def _warn_past_window(self) -> None:
        """Warn once of tokens behind the last position that the model was trained on."""
        window, first = self._window, self._scored[0]
        # What the host does not know waits for the device.
        if window is None or (first.num_columns or 0) <= window or not first.holds_entries:
            return
        num_tokens = max(first.state.lengths())  # without padding
        if num_tokens > window:
            self._window = None
            warn(
                f"the text has {num_tokens:,} tokens, more than the model's context window of"
                f" {window:,}, and decays from there on; give H2OCache(model, positions='rolling'),"
                " or a shorter text."
            )

    @property
    def transforms_keys(self) -> bool:
        """Whether keys are transformed before they are packed (`h2okv.ops.quant.KeyTransform`)."""
        layer = self._scored[0]
        holder = layer.state if layer.is_initialized else layer
        return holder.key_transform is not None

    @property
    def read_chunk(self) -> int | None:
        """Tokens of a prompt that a forward may bring; ``None`` for all."""
        return self.cache_config.chunk if continues_prompts(self) else None

    def _check_goes_on(self, length: int) -> None:
        """Refuse to go on after half a forward; warn of fractions of a first part alone."""
        first, last = self._scored[0], self._scored[-1]
        self._check_alike("numbers of forwards", {first.num_forwards, last.num_forwards})
        if length > 1 and first.num_forwards and not continues_prompts(self):
            raise ValueError(
                f"{length} tokens in one forward after the {self.num_seen_tokens} that this cache"
                f" has seen: linear layers of model type {self.config.model_type!r} forget their"
                " states in transformers when several tokens follow; give the whole text to a new"
                " cache, or one token at a time."
            )
        if length == 1 or first.num_forwards != 1 or first.prompt.expected_length is not None:
            return
        seen = self.num_seen_tokens
        follows_at_once = length <= seen and not (self._expects_turn or self.rule.grows)
        if self.rule.evicts and self.budget.is_relative and follows_at_once:
            warnings.warn(
                f"{self!r}: fractions were taken of the first forward's "
                f"{seen} tokens, and {length} more follow it at once. If "
                "they belong to one prompt (prefill_chunk_size), call cache.expect(its length) "
                "first, or use H2OCache(evict_every=...) or a budget in tokens.",
                stacklevel=2,
            )

    def next_turn(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Make the inputs of a further turn out of its new tokens alone.

        For example (``past_key_values=cache`` before transformers 5.24):

            model.generate(**cache.next_turn(new_ids), cache=cache)

        The last token that a ``generate`` returned has not been read by the model yet, so a turn
        begins with it. The same goes without this method by giving ``generate`` the whole text.

        Args:
            input_ids: int ``[B, T]``, what the cache has not seen; without padding.

        Returns:
            ``input_ids`` and an ``attention_mask`` ``[B, tokens seen + T]`` by which ``generate``
            knows what was there before: zeros for each sequence's padding, which is taken to be on
            the left of the first turn, and ones.

        Raises:
            ValueError: for no tensor of tokens, or padding behind text of a model that slides.
        """
        validation.check_ids(input_ids)
        if self._scored[-1].has_inner_padding and len(self._scored) < len(self.layers):
            raise ValueError(
                "padding came behind text, and layers of this model that slide must know where: in"
                " place of next_turn(), give attention_mask [batch, tokens seen + new tokens] with"
                " the same zeros as before."
            )
        seen = self.num_seen_tokens
        mask = input_ids.new_ones(input_ids.shape[0], seen + input_ids.shape[1])
        self._expects_turn = seen > 0
        if seen and self._scored[0].batch_size == mask.shape[0]:
            real = self._scored[0].state.num_real_tokens
            padding = (seen - real).unsqueeze(1).to(mask.device)
            mask.masked_fill_(torch.arange(mask.shape[1], device=mask.device) < padding, 0)
        return {"input_ids": input_ids, "attention_mask": mask}

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Write the cache to a safetensors file, at once or not at all.

        Args:
            path: the file; an older one is replaced.
            notes: texts to keep with it; `h2okv.cache.checkpoint.read_notes` reads them.

        Raises:
            ValueError: if the cache is empty or a forward was interrupted, or the file cannot be
                written.
        """
        self._end_drafting()
        save_cache(self, path, notes)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel | PreTrainedConfig | None = None,
        policy: Rule | None = None,
    ) -> H2OCache:
        """Read a cache that `save` wrote.

        The layers' weights are compared when a model first continues it, its config already
        here if ``model`` is given.

        Args:
            path: the file.
            model: the model that shall go on, or its config; without it the config in the file is
                taken.
            policy: the policy, if it is one of your own that is not registered by name.

        Returns:
            The cache; on the model's device, else on the CPU until a model continues it.

        Raises:
            ValueError: if the file is damaged, or of another model, dtype, contract or policy.
        """
        return load_cache(cls, path, model, policy)

    def fork(self, copies: int) -> H2OCache:
        """Make an independent cache in which every sequence is there several times.

        Args:
            copies: of each sequence, next to each other; for a batch of prompts that shares what
                was read.

        Raises:
            ValueError: if ``copies`` is below 1.
        """
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise ValueError(f"copies={copies!r} makes no batch; give an int of 1 or more.")
        duplicate = copy.deepcopy(self)
        if copies > 1 and self.num_seen_tokens:
            indices: Any = torch.arange(self._scored[0].batch_size).repeat_interleave(copies)
            for layer in duplicate.layers:
                # Unlike batch_repeat_interleave, every kind of layer has it.
                layer.reorder_cache(indices.to(self._scored[0].device))
        return duplicate

    def reset(self) -> None:
        """Forget everything; the next forward is a prompt, of a batch of any size."""
        super().reset()
        self._drafting = None
        # Linear layers of transformers keep the shapes of their states over a reset.
        for index, layer in enumerate(DynamicCache(config=self.config).layers):
            if not isinstance(self.layers[index], CacheLayer):
                self.layers[index] = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OCache:
        """Copy the entries; the model's config and what was learned of it are shared."""
        duplicate = memo[id(self)] = self.__class__.__new__(self.__class__)
        self._end_drafting()
        shared = (self.config, self.rule, self.position_rule, self._drafting)
        memo.update({id(item): item for item in shared})
        with ordinary_tensors():
            for name, value in vars(self).items():
                setattr(duplicate, name, copy.deepcopy(value, memo))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        self._end_drafting()
        return vars(self) | {"_drafting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect_layers()

    def _connect_layers(self) -> None:
        """Let layers share what is learned of a model, and one look at their numbers."""
        rotations: list[Rotation] = []
        forward = Forward()
        for layer in self._scored:
            layer.share_forward(forward)
            layer.rotations.shared_rotations = rotations
        self._scored[0].begins_forward = self._scored[-1].ends_forward = True

    @property
    def _slot_layers(self) -> list[SlotLayer]:
        # Of all layers: a pool has slots for those that slide too.
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def entries_for(
        self, length: int, seen: int | None = None, budget: Budget | None = None
    ) -> int:
        """Return the entries of a KV head after a prompt, or when a growing budget has `seen`."""
        return self.rule.allocate_budget((budget or self.budget).resolve(length, seen)).total

    def layer_entries_for(
        self, length: int, of_heads: Callable[[Iterable[int]], float] = mean
    ) -> tuple[float, ...]:
        """Return `entries_for` of each layer with H2O entries, by the layer's budget.

        The mean over its heads, or ``max``, if they have different budgets.
        """
        return tuple(
            of_heads(
                self.entries_for(length, None, budget)
                for budget in layer.head_budgets or (layer.budget,)
            )
            for layer in self._scored
        )

    def slots_for(self, prompt: int, new: int) -> int:
        """Return the slots of a sequence in each layer, at most: the budget and the free slot.

        Where nothing is evicted, an upper bound for the prompt and the new tokens after it.
        """
        if self.rule.is_bounded:
            return self.entries_for(prompt) + (self.evict_every or 1)
        seen = prompt + new
        if self.rule.grows:
            seen = min(seen, self.entries_for(prompt, seen) + (self.evict_every or 1))
        return slots_for(seen)

    def slot_bytes(self, num_heads: int, head_size: int, dtype: torch.dtype) -> SlotBytes:
        """Return the bytes that slots of these KV heads take, before anything is allocated."""
        first = self._scored[0]
        return SlotBytes(
            num_heads,
            first.storage.entry_bytes(head_size, dtype, first.latent is not None),
            SlotState.metadata_bytes(first),
            has_static_mask=self.rule.has_pattern,
            is_by_head=self.cache_config.is_by_head,
            key_transform=8 * head_size * support.transforms_keys(self.cache_config, self.config),
            queries=self._query_bytes(head_size, dtype),
        )

    def _query_bytes(self, head_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of the queries that a layer keeps of a sequence until a span ends."""
        layer = self._scored[0]
        if not layer.scores_spans:
            return 0
        num_heads = support.num_kv_heads(self.config)
        groups = self.config.get_text_config(decoder=True).num_attention_heads // num_heads
        size = num_heads * num_means(groups) * head_size * dtype.itemsize
        return int(layer.span * (size + 8))

    @property
    def windows(self) -> list[int | None]:
        """Sliding windows of the layers that have no H2O entries; ``None`` for other kinds."""
        return [
            layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            for layer in self.layers
            if not isinstance(layer, BaseLayer)
        ]

    @property
    def needs_enabling(self) -> bool:
        """Whether the model must get other positions, which `h2okv.enable` does."""
        return self.position_rule.rewrites

    def place(self, position_ids: Tensor) -> Tensor:
        """Say where the model shall put tokens ``[B or 1, T]`` of the text; for `h2okv.enable`."""
        for layer in self._scored:
            layer.is_placed = True
        return position_ids.clamp(max=self.position_rule.window - 1)

    def expect(self, length: int | None) -> None:
        """Announce a prompt that comes in several forwards, for budgets in fractions.

        Ignored when the cache holds something, or knows its length already. ``None`` withdraws
        an announcement, if nothing was read yet.

        Raises:
            ValueError: if the length is no int of 1 or more.
        """
        self._end_drafting()
        if length is not None:
            check_tokens("length", length, 1)
        for layer in self._scored:
            prompt = layer.prompt
            if not layer.holds_budgets and (prompt.expected_length is None or length is None):
                prompt.expected_length = length

    def activate_past_recording(self) -> None:
        """Record what each token changes, so that `crop` can take back those of a forward.

        transformers calls it before it verifies drafts (``assistant_model``,
        ``prompt_lookup_num_tokens``). Tokens after the prompt are then read one by one within each
        layer, as steps read them, until that ``generate`` returns or raises; if your code calls it,
        until `end_past_recording`.

        Raises:
            ValueError: if the text that drafts are to follow has no token that is new.
        """
        self._end_drafting()
        drafting, seen = Drafting.of_caller(), self.num_seen_tokens
        is_again = drafting is not None and drafting.gives_whole_text and seen > 0
        if is_again and drafting is not None and drafting.columns is not None:
            check_new_tokens(seen, drafting.columns - seen)
        super().activate_past_recording()
        self._drafting = drafting
        if drafting is None or drafting.columns is None:
            return
        if not any(layer.holds_budgets or layer.prompt.expected_length for layer in self._scored):
            drafting.announced = True
            self.expect(drafting.length)
        for layer in self._scored:
            assert layer.log is not None
            layer.log.prompt_columns = drafting.columns - seen
        if is_again:
            drafting.skip(self, seen)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens, of which `activate_past_recording` tells.

        Args:
            tokens_to_remove: 0, or minus the number of tokens.

        Raises:
            ValueError: if fewer tokens were recorded since the last crop.
        """
        self._end_drafting()
        super().crop(tokens_to_remove)

    def end_past_recording(self) -> None:
        """Record nothing from now on; tokens that were read stay."""
        self._drafting = None
        for layer in self.layers:
            if isinstance(layer, BaseLayer):
                layer.end_recording()
            else:
                end_recording(layer)

    def _end_drafting(self) -> None:
        """End the recording of a ``generate`` that is over, which transformers does not.

        Drafts that it has left unverified, because it was interrupted, are taken back.
        """
        drafting = self._drafting
        if drafting is None or torch.compiler.is_compiling() or drafting.is_running:
            return
        first = self._scored[0]
        is_whole = len({layer.num_forwards for layer in self._scored}) == 1
        is_whole &= not any(layer.awaits_attention for layer in self._scored)
        if is_whole and first.log is not None:
            super().crop(-first.log.num_drafts)
        self.end_past_recording()
        drafting.end()
        if drafting.announced:  # for a prompt that was not read
            self.expect(None)

    def pin(self, spans: Iterable[Sequence[int]], length: int | None = None) -> None:
        """Protect tokens of the prompt that is read next: they are never evicted.

        They take their room of the heavy part, so that the budget does not change. ``cache.scores``
        is infinite for them.

        Args:
            spans: ``(start, stop)`` for each, in tokens of the prompt, padding not counted; the
                same for all sequences of a batch. An empty list withdraws earlier pins.
            length: tokens of that prompt, if they are known, to be refused now and not then.

        Raises:
            ValueError: if a span is invalid or overlaps another, or the cache has entries. Spans
                that are outside the prompt or too large are refused when it is read.
        """
        pins = validation.parse_pins(spans)
        if pins and self.num_seen_tokens:
            raise ValueError("H2OCache has read its prompt already; pin before, or reset() first.")
        for layer in self._scored:
            layer.prompt.pins = pins
        if length is not None:
            for layer in self._scored:
                validation.check_pins(layer, [length])

    def most_pinned(self, length: int) -> int:
        """Return how many tokens of a prompt of ``length`` tokens `pin` can protect."""
        budgets = (layer.budget.resolve(length) for layer in self._scored)
        return min(self.rule.allocate_budget(budget).heavy for budget in budgets)

    def forget(self, spans: Iterable[Sequence[int]]) -> None:
        """Take tokens out of the cache, such as a model's thoughts when its turn ends.

        Exactly the entries at these positions leave, from every head of every layer with H2O
        entries, pinned or not; their room is free for later tokens. All else stays as it is: the
        positions of other entries, `num_seen_tokens`, and scores, with the attention that the
        tokens have paid; the queries of an unfinished span still count at its end. Keys and values
        behind them were computed while they were there, so this is not the cache of a text without
        them. Sliding and linear layers keep what they hold.

        Args:
            spans: ``(start, stop)`` for each, positions of the text, padding not counted; the same
                for all sequences of a batch.

        Raises:
            ValueError: if the cache is empty or its positions roll, drafts are recorded, or a span
                is invalid, overlaps another, is out of range or begins in the sink.
        """
        self._end_drafting()
        parsed = validation.parse_pins(spans, "span")
        layers = [layer for layer in self._scored if isinstance(layer, SlotLayer)]
        if len(layers) < len(self._scored):
            raise ValueError(
                "H2OCache.forget: entries are masked here, and stay; use an H2OCache of slots."
            )
        for layer in layers:
            validation.check_forget(layer, parsed)
        for layer in layers if parsed else ():
            layer.drop(parsed)

    def allow_non_finite(self) -> None:
        """Read blocks whatever comes of them; one rank alone must not stop in the middle."""
        for layer in self._slot_layers:
            layer.checks_numbers = False

    def prepare_step(self) -> bool:
        """Return whether the next token can go through a compiled step, and prepare for it.

        All layers must hold entries in slots, and all that is learned from the model at its first
        forward must be known. Waits for the device only when a layer becomes full.
        """
        self._end_drafting()
        layers = self._slot_layers
        if len(layers) < len(self.layers) or not all(layer.is_ready for layer in layers):
            return False
        for layer in layers:
            layer.slots.count_down(layer.state, layer.dtype)
            layer.slots.make_static(layer.state, layer.dtype)
        return True

    def begin_step(self, is_padded: bool) -> None:
        """Do what the host does before a step of layers that are `on_device_alone`; mutates.

        Args:
            is_padded: whether the step has a mask.
        """
        self._begin_forward(1)
        first = self._scored[0]
        for rotation in first.rotations.shared_rotations:
            rotation.begin_forward()
        first.num_forwards += 1  # the others' follow, unless the step is interrupted
        for layer in self._slot_layers:
            layer.begin_step(is_padded)

    @contextmanager
    def on_device_alone(self, live: Tensor | None = None) -> Iterator[None]:
        """Let steps run without what the host counts: a recorded step replays nothing of it.

        Args:
            live: which rows of a pool have a sequence, bool ``[B', 1]``, for steps through more
                rows than there are sequences; ``None`` for others.
        """
        layers = self._slot_layers
        states = [] if live is None else [(layer, layer.state) for layer in layers]
        for layer in layers:
            layer.forward.leaves_host, layer.forward.live = True, live
        for layer, state in states:
            layer.state = state.with_rows(len(live))
        try:
            yield
        finally:
            for layer in layers:
                layer.forward.leaves_host, layer.forward.live = False, None
            for layer, state in states:
                layer.state = state

    def end_step(
        self, counts: Sequence[int] | None = None, replay: Callable[[Any], bool] | None = None
    ) -> None:
        """Do what the host does after a step that was compiled or replayed, and cut; mutates.

        Args:
            counts: real tokens of each sequence; ``None`` if only the device knows.
            replay: does the work of `cut`, if it can, and returns whether it did.
        """
        due = [layer for layer in self._slot_layers if layer.note_step(counts)]
        ended = due[0].ended() if due else ()  # one look at the lengths for all layers
        for layer in due[1:]:
            layer.state.known_lengths = due[0].state.known_lengths
        is_replayed = bool(ended) and replay is not None and replay(ended)
        if ended and not is_replayed:
            self.cut(ended)
        for layer in due:
            layer.note_cut(ended, due[0] if is_replayed and layer is not due[0] else None)
        for scored in self._scored[1:]:
            scored.num_forwards = self._scored[0].num_forwards
        self._warn_past_window()

    @property
    def span_layers(self) -> list[SlotLayer]:
        """The layers in slots that evict at the ends of spans."""
        return [layer for layer in self._slot_layers if layer.span > 1]

    def cut(
        self, ended: tuple[int, ...], numbers: Tensor | None = None, stores: bool = True
    ) -> list[SlotState]:
        """Evict from the sequences whose spans have ended, on the device alone; mutates the layers.

        Args:
            ended: their rows.
            numbers: the inputs of a recorded cut, int64 ``[2, n]``, as `cut_inputs` returns them.
            stores: whether the layers get the result; else it is returned.
        """
        layers: list[SlotLayer] = self.span_layers
        read: tuple[Tensor | None, int] = (None, 0)
        first, forward = layers[0], layers[0].forward
        forward.forget_shared()
        if numbers is not None:
            read, written = (numbers[0], self.num_rows), first.state.written()
            key = "written", first.device, tuple(written[row] for row in ended)
            forward.shared(key, lambda: numbers[1])
        states = (layer.cut(ended, *read, stores) for layer in layers)
        return [state for state in states if not stores]  # else none outlives its layer's cut

    def cut_inputs(self, ended: tuple[int, ...]) -> Any:
        """Return the key of a recorded cut, and its inputs: rows and tokens written, ``[2, n]``.

        ``None`` for a cut that runs launch by launch.
        """
        keys, state = [layer.cut_key() for layer in self.span_layers], self.span_layers[0].state
        if None in keys:
            return None
        written = [state.written()[row] for row in ended]
        are_all = not self.num_rows and len(ended) == state.batch_size
        key = len(ended), are_all, any(written), self.num_rows, *keys
        return key, to_device([ended, written], state)

    def step_key(self, is_padded: bool) -> tuple[Any, ...]:
        """Return what a recorded step has of the cache; `begin_step` has been called."""
        return tuple(layer.step_key(is_padded) for layer in self._slot_layers)

    @property
    def num_seen_tokens(self) -> int:
        """Tokens that went through, padding included. Waits for the device."""
        self._end_drafting()
        return int(self._scored[0].get_seq_length())

    @property
    def num_cached_tokens(self) -> int:
        """Entries held for one KV head, of the sequence that holds most. Waits for the device."""
        self._end_drafting()
        counts = [layer.state.counts() for layer in self._scored if layer.holds_entries]
        return max((int(count.max()) for count in counts), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers: keys, values, states, and H2O's scores and positions."""
        return sum(layer.nbytes for layer in self._scored) + self._other_nbytes()

    @property
    def full_nbytes(self) -> int:
        """Bytes of keys and values that transformers' own cache would hold for the same tokens."""
        return sum(layer.full_nbytes for layer in self._scored) + self._other_nbytes()

    def _other_nbytes(self) -> int:
        return sum(held_bytes(layer) for layer in self.layers if not isinstance(layer, BaseLayer))

    def kept_positions(self, layer_idx: int) -> Tensor:
        """Return which tokens a layer holds.

        Args:
            layer_idx: the layer's index.

        Returns:
            int ``[B, H, S]``, original positions (padding not counted), -1 for an empty slot; the
            order of the slots means nothing.

        Raises:
            ValueError: if the layer has no scores or nothing was read yet.
        """
        return self._layer(layer_idx).state.by_head("positions")[0].clone()

    def scores(self, layer_idx: int) -> Tensor:
        """Return the scores of what a layer holds: the attention received, as `scoring` counts it.

        Args:
            layer_idx: the layer's index.

        Returns:
            fp32 ``[B, H, S]``, in the order of `kept_positions`; 0 in an empty slot.

        Raises:
            ValueError: if the layer has no scores or nothing was read yet.
        """
        return self._layer(layer_idx).eviction_scores()

    def explain(self, layer_idx: int, head: int, position: int, sequence: int = 0) -> Explanation:
        """Explain why a token stays in a layer's cache, or when it left.

        Args:
            layer_idx: the layer's index.
            head: KV head.
            position: position of the token in its sequence, padding not counted.
            sequence: row of the batch.

        Returns:
            Its score, its place among the entries that compete, and the lowest score that would
            stay at a cut now; when it left, if `record_evictions` was called. With
            ``evict_every``, tokens since the last cut have no score yet where ``scoring`` is that
            of `best`. ``print`` gives a sentence.

        Raises:
            ValueError: if there is no such layer, head, sequence or token.
        """
        return self._layer(layer_idx).explain(sequence, head, position)

    def record_evictions(self) -> None:
        """Record from now on when tokens leave, for `explain`; mutates the cache.

        Costs a copy of the positions to the CPU in each step and layer; steps are not compiled.
        """
        for layer in self._scored:
            layer.departures = Departures()

    def _layer(self, layer_idx: int) -> CacheLayer:
        self._end_drafting()
        layers = {la.layer_idx: la for la in self._scored if isinstance(la, CacheLayer)}
        if layer_idx not in layers:
            raise ValueError(
                f"layer_idx must be that of a full-attention layer, one of {[*layers]}, got"
                f" {layer_idx!r}."
            )
        if not layers[layer_idx].holds_entries:
            raise ValueError("the cache is empty; run the model with it first.")
        return layers[layer_idx]

    def check_integrity(self) -> None:
        """Check what must hold between any two forwards; for tests and after an interruption.

        Raises:
            ValueError: if a layer breaks the contract, naming the layer and what it breaks.
        """
        self._end_drafting()
        lengths = {int(layer.get_seq_length()) for layer in self._scored}
        self._check_alike("numbers of tokens", lengths)
        filled_layers = [layer for layer in self._scored if layer.holds_entries]
        real = {tuple(layer.state.num_real_tokens.tolist()) for layer in filled_layers}
        self._check_alike("numbers of real tokens", real)
        for layer in filled_layers:
            validation.check_integrity(layer)

    @staticmethod
    def _check_alike(counted: str, counts: set[Any]) -> None:
        """Refuse layers that differ in what they have seen, after half a forward."""
        if len(counts) > 1:
            raise ValueError(
                f"H2OCache: layers have seen different {counted} ({sorted(counts)}), because a"
                " forward was interrupted, or the model has fewer layers than the cache; call"
                " cache.reset() and read the prompt again, or make the cache of this model."
            )


def _named(amounts: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `H2OCache` by name; refuse unknown ones and those given twice."""
    names: tuple[str, ...] = ("policy", "budget")
    spec: dict[str, Any] = {}
    if amounts and isinstance(amounts[0], str):
        spec, amounts, names = parse(amounts[0]), amounts[1:], ("budget",)
    elif amounts and not isinstance(amounts[0], Rule):
        names = ("budget",) if len(amounts) == 1 else ("heavy", "recent", "sink")
    if len(amounts) > len(names):
        raise ValueError(
            f"H2OCache: {short_repr(amounts[len(names)])} must be given by name, as in"
            " H2OCache(model, 'best', budget=0.2)."
        )
    check_arguments("H2OCache", options, _PARAMETERS)
    named = dict(zip(names, amounts, strict=False))
    for name in [*(named.keys() & options.keys()), *(spec.keys() & (named | dict(options)).keys())]:
        raise ValueError(f"H2OCache: {name} is given twice; leave one of them out.")
    return spec | named | dict(options)


def _checked_model(model: Any) -> Any:
    """Return a model or config; refuse what people write instead of one."""
    if model is None or isinstance(model, str | Path | int | float):
        name = repr(str(model)) if isinstance(model, str | Path) else "'smollm2'"
        problem = "needs a model" if model is None else f"needs a loaded model, got {model!r}"
        raise ValueError(
            f"H2OCache {problem}; give H2OCache(model, budget=0.2), with model, tokenizer ="
            f" h2okv.load({name})."
        )
    return model


def _signature() -> inspect.Signature:
    """Return the signature of `H2OCache`: the model, and by name the fields of `CacheConfig`."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    init = inspect.signature(H2OCache.__init__)
    first = [p for name, p in init.parameters.items() if name in ("self", "model")]
    fields = dict(inspect.signature(CacheConfig).parameters)
    policy = fields.pop("policy")
    budget = policy.replace(name="budget", default=None, annotation="float | int | str | None")
    last = [p.replace(kind=by_name) for p in fields.values()]
    return init.replace(parameters=[*first, policy, budget, *last])


_PARAMETERS = list(_signature().parameters)[1:]
H2OCache.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
