"""A cache in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from h2okv.budget import TokenBudget
from h2okv.cache.base_layer import BaseLayer
from h2okv.cache.layer import CacheLayer
from h2okv.cache.slot_state import SlotState, ordinary_tensors
from h2okv.cache.support import config_of, unwrap
from h2okv.cache.validation import check_loaded
from h2okv.config import CacheConfig
from h2okv.policy import Rule, get_rule
from h2okv.records import atomic_write, refusing

CONTRACT = 2  # counts up when older entries would be evicted by another rule
FORMAT = 2  # counts up when the file is laid out differently; 1 had no number
_KEY = "h2okv"
_NOTES = "h2okv.notes"
# Parts of a config that say nothing about what the keys are.
_VOLATILE = (
    "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "return_dict",
    "id2label", "label2id", "problem_type", "initializer_range", "attention_dropout",
    "chunk_size_feed_forward",
)  # fmt: skip
_Tensors = dict[str, Tensor]
_DTYPES = {"float32", "bfloat16", "float16", "float64"}


def save_cache(cache: Any, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
    """Write a cache to a safetensors file, at once or not at all."""
    cache.check_integrity()
    if cache.num_seen_tokens == 0:
        raise ValueError("the cache is empty, so there is nothing to save; read a text first.")
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        state, header = _layer_state(layer)
        tensors |= {f"{index}.{name}": t.detach().contiguous() for name, t in state.items()}
        layers.append({"tensors": sorted(state), "values": header})
    head = {
        "format": FORMAT,
        "contract": CONTRACT,
        "config": config_identity(cache.config),
        "cache_config": cache.cache_config.to_dict(),
        "policy": {"name": cache.cache_config.policy, "settings": _settings(cache.rule)},
        "layers": layers,
    }
    problem = f"policy={cache.rule.name!r} or the notes hold something that is no JSON"
    remedy = "keep plain numbers and texts in them, or this cache in memory."
    with refusing(problem, remedy, TypeError):
        metadata = {_KEY: json.dumps(head), _NOTES: json.dumps(dict(notes or {}))}
    writable = "give a file in a folder that exists and is writable."
    written = refusing(f"the cache cannot be written to '{path}'", writable, SafetensorError)
    with written, atomic_write(Path(path), "wb") as file:
        save_file(tensors, file.name, metadata=metadata)


def _layer_state(layer: CacheLayerMixin) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a file stores of a layer: tensors, and values for the header."""
    if isinstance(layer, BaseLayer):
        # The queries of a span that has ended are not needed again.
        has_queries = layer.state.queries is not None and any(layer.state.phases(layer.span))
        tensors = {"cumulative_length": layer.cumulative_length}
        for name, tensor in layer.state.tensors().items():
            kind = layer.state.kind_of(name)
            if kind.per != "span" or has_queries:
                tensors[kind.file_name or name] = tensor
        return tensors, {
            "budgets": [astuple(budget) for budget in layer.state.budgets],
            **({"span_starts": starts} if (starts := layer.state.span_starts) else {}),
            **({"has_gaps": True} if layer.state.has_gaps else {}),
            "counts_padding": layer.counts_padding,
            "weights": layer.weights(),
            # What packed entries do not tell.
            "dtype": str(layer.dtype).removeprefix("torch."),
            "sizes": [layer.key_size, layer.value_size],
        }
    # Of transformers' own; linear attention has dicts by a number, whose parts are ``name.number``.
    attributes: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            attributes |= {f"{name}.{index}": entry for index, entry in value.items()}
        else:
            attributes[name] = value
    tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    scalars = {}
    for name, value in attributes.items():
        if value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        elif not isinstance(value, Tensor | torch.dtype | torch.device):
            raise ValueError(
                f"a {type(layer).__name__} with {name} of type {type(value).__name__} cannot be "
                "saved; this model's cache can only be kept in memory."
            )
    return tensors, scalars


def read_head(path: str | Path) -> dict[str, Any]:
    """Read what a file says about its cache, without the tensors."""
    head = _json_of(path, _KEY)
    versions = {"format": (FORMAT, "file format"), "contract": (CONTRACT, "eviction contract")}
    for name, (supported, subject) in versions.items():
        version = head.get(name, 1)
        if version != supported:
            raise ValueError(
                f"'{path}' was saved under version {version} of the {subject} and this h2okv has "
                f"version {supported}; read the text again with this version."
            )
    return head


def read_notes(path: str | Path) -> dict[str, str]:
    """Return the notes that were saved with a cache."""
    return _json_of(path, _NOTES)


def load_cache(
    cache_class: Any,
    path: str | Path,
    model: PreTrainedModel | PreTrainedConfig | None,
    policy: Rule | None,
) -> Any:
    """Read what `save_cache` wrote; see `H2OCache.load`."""
    head = read_head(path)
    kinds = {"config": dict, "cache_config": dict, "policy": dict, "layers": list}
    with _naming_damage(path):
        for name, kind in kinds.items():
            if type(head.get(name)) is not kind:
                raise ValueError(f"its header has no {name}")
        if head.get("simulate"):
            raise ValueError("it was saved by a cache that masks, which is not read")
        if model is None:
            config = AutoConfig.for_model(**head["config"])
    if model is not None:
        config = config_of(model)
        check_same_model(path, head["config"], config)
    if policy is None:
        policy = _saved_policy(path, head["policy"])
    with _naming_damage(path):
        options = CacheConfig.from_dict(head["cache_config"]).to_dict() | {"policy": policy}
        cache = cache_class(model or config, **options)
    base = None if model is None or isinstance(model, PreTrainedConfig) else unwrap(model)
    # An offloaded model has no device of its own; the cache follows the keys when they come.
    offloaded = base is None or base.device.type == "meta"
    with _naming_damage(path):
        _fill(cache, path, head["layers"], torch.device("cpu") if offloaded else base.device)
    dtype = next(layer.dtype for layer in cache.layers if isinstance(layer, BaseLayer))
    if base is not None and base.dtype != dtype:
        raise ValueError(
            f"'{path}' was saved in {dtype} and the model is in {base.dtype}; load the model "
            f"with dtype={dtype}."
        )
    return cache


@contextmanager
def _naming_damage(path: str | Path) -> Iterator[None]:
    """Turn every failure to read a file into a message that says it is damaged."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except FileNotFoundError as error:
        raise ValueError(
            f"'{path}' does not exist; give a file that a cache was saved to."
        ) from error
    except Exception as error:  # of any type that a library raises for damaged values
        raise ValueError(
            f"'{path}' is no whole saved cache, or damaged; save it again or give another file "
            f"({error})."
        ) from error


def _settings(rule: Rule) -> dict[str, Any]:
    """Return a rule's parameters, without what the cache config has."""
    return {name: value for name, value in vars(rule).items() if name not in ("scoring", "grows")}


def _saved_policy(path: str | Path, saved: dict[str, Any]) -> Rule:
    name, settings = saved.get("name"), saved.get("settings")
    with _naming_damage(path):
        if not isinstance(name, str) or not isinstance(settings, dict):
            raise ValueError("its header does not name a policy")
    fresh = get_rule(name)
    with _naming_damage(path):
        kinds = {key: type(value) for key, value in _settings(fresh).items()}
        if kinds != {key: type(value) for key, value in settings.items()}:
            raise ValueError(f"policy={name!r} has no settings {settings}")
        try:
            return get_rule(type(fresh)(**settings), settings.get("seed", 0))
        except TypeError:  # settings that its constructor does not take
            vars(fresh).update(settings)
    return fresh


def config_identity(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a model's config that its keys depend on, as JSON values."""
    values = json.loads(config.get_text_config(decoder=True).to_json_string(use_diff=False))
    return {
        name: value
        for name, value in values.items()
        if name not in _VOLATILE
        and not name.startswith(("_", "output_"))
        and not name.endswith("_token_id")  # which users set for generate
    }


def check_same_model(path: str | Path, saved: dict[str, Any], config: PreTrainedConfig) -> None:
    """Refuses a file that another model's cache was saved to."""
    identity = config_identity(config)
    # Names that only one side knows come and go with versions of transformers.
    for name in ("model_type", *sorted(identity.keys() & saved.keys())):
        if saved.get(name) != identity.get(name):
            raise ValueError(
                f"'{path}' was saved with another model: its {name} is {saved.get(name)!r} and "
                f"this model's is {identity.get(name)!r}; load it with the model that wrote it."
            )


def _fill(
    cache: Any, path: str | Path, headers: list[dict[str, Any]], device: torch.device
) -> None:
    states: list[dict[str, Tensor]] = [{} for _ in cache.layers]
    if len(headers) != len(states):
        raise ValueError(f"it tells of {len(headers)} layers, and the model has {len(states)}")
    with ordinary_tensors(), safe_open(str(path), framework="pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
            index, _, field = name.partition(".")
            if not index.isdecimal() or int(index) >= len(states):
                raise ValueError(f"{name} belongs to no layer")
            states[int(index)][field] = file.get_tensor(name)
        for layer, tensors, header in zip(cache.layers, states, headers, strict=True):
            odd = set(header["tensors"]) ^ tensors.keys()
            if odd:
                raise ValueError(f"{min(odd)} is missing, or too much")
            fill: Any = _fill_layer if isinstance(layer, CacheLayer) else _fill_foreign
            fill(layer, tensors, header["values"])
        cache.check_integrity()
    first = next(layer for layer in cache.layers if isinstance(layer, BaseLayer))
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and not _follows(layer, first):
            raise ValueError(f"layer {index} holds other tokens than the layers that evict")


def _follows(layer: DynamicLayer, first: BaseLayer) -> bool:
    """Tell whether one of transformers' layers has read as many tokens as one of ours."""
    seen = length = int(first.get_seq_length())
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window > 1:
        length = min(seen, layer.sliding_window - 1)
    shapes = {(tensor.shape[0], tensor.shape[2]) for tensor in (layer.keys, layer.values)}
    return layer.get_seq_length() == seen and shapes == {(first.batch_size, length)}


def _fill_layer(layer: CacheLayer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    seen, dtype = tensors.pop("cumulative_length"), values["dtype"]
    if dtype not in _DTYPES:
        raise ValueError(f"layer {layer.layer_idx} is in {dtype}, which is no dtype of a cache")
    batch, heads, num_slots = tensors["positions"].shape
    by_head = layer.head_budgets
    key, value = (
        torch.empty(
            batch, len(by_head or range(heads)), 1, size, dtype=getattr(torch, dtype), device="meta"
        )
        for size in values["sizes"]
    )
    empty = layer.empty_state(key[:, :heads], value[:, :heads])
    empty.key_center = empty.key_scale = None  # the file says how its keys are transformed
    expected = empty.like(batch, num_slots)
    if by_head is not None:
        expected.total = expected.total.expand(-1, len(by_head), -1)
        expected.free_slot = expected.free_slot.expand(-1, -1, len(by_head))
    for name, kind in expected.kinds.items():
        if (file_name := kind.file_name or name) in tensors:
            tensors[name] = tensors.pop(file_name)
            if getattr(expected, name) is None and kind.per != "span":
                like = {"sequence": expected.sink, "head": key}.get(kind.per, expected.positions)
                setattr(expected, name, torch.empty_like(like, dtype=kind.dtype))
    _expect_queries(layer, expected, key, tensors)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.tensors().items()}
    if shapes != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise ValueError(f"the tensors of layer {layer.layer_idx} do not fit each other")
    expected.set_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    expected.budgets = [TokenBudget(*amounts) for amounts in values["budgets"]]
    if starts := values.get("span_starts"):
        expected.span_starts = tuple(starts)
    expected.has_gaps = bool(values.get("has_gaps"))
    check_loaded(layer, expected, seen)
    needs_queries = layer.scores_spans and any(expected.phases(layer.span))
    if needs_queries and expected.queries is None:
        raise ValueError(f"layer {layer.layer_idx} has no queries of the span that it reads")
    weights = values["weights"]
    if weights is not None and not isinstance(weights, str):
        raise ValueError(f"layer {layer.layer_idx} has no fingerprint of weights")
    layer.lazy_initialization(key, value)
    layer.load_state(expected, seen, weights)
    counts_padding = values.get("counts_padding")
    layer.counts_padding = counts_padding if isinstance(counts_padding, bool) else None


def _expect_queries(layer: CacheLayer, expected: SlotState, key: Tensor, tensors: _Tensors) -> None:
    """Expect the queries of a span that has not ended; mutates the expected state."""
    if "queries" not in tensors:
        return
    if not layer.scores_spans:
        raise ValueError(f"layer {layer.layer_idx} has queries against its options")
    batch, heads, _, size = key.shape
    groups, length = max(1, tensors["queries"].shape[1] // heads), layer.span
    expected.queries = key.new_empty(batch, groups * heads, length, size)
    expected.query_positions = key.new_empty(batch, length, dtype=torch.int64)


def _json_of(path: str | Path, key: str) -> dict[str, Any]:
    """Parse a JSON object of the file's header."""
    with _naming_damage(path), safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
    if _KEY not in metadata:
        raise ValueError(
            f"'{path}' holds tensors but no H2OCache; give a file that a cache was saved to."
        )
    with _naming_damage(path):
        values = json.loads(metadata.get(key, ""))
        if not isinstance(values, dict):
            raise ValueError("its header is no JSON object")
    return values


def _fill_foreign(layer: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Restore one of transformers' layers from what `_layer_state` returned."""
    fresh = vars(layer)
    for name, value in {**values, **tensors}.items():
        attribute, _, index = name.partition(".")
        attributes: Any = fresh.get(attribute)
        is_dict = isinstance(attributes, dict)
        is_missing = is_dict and (not index or int(index) not in attributes)
        if attribute not in fresh or is_missing or (index and not is_dict):
            raise ValueError(f"a {type(layer).__name__} has no {name}")
        if is_dict:
            attributes[int(index)] = value
        else:
            fresh[attribute] = value
    for tensor in tensors.values():
        if tensor.is_floating_point():
            layer.dtype, layer.device = tensor.dtype, tensor.device
