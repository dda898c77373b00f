"""A cache in a safetensors file."""

from __future__ import annotations

import hashlib
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
from transformers.cache_utils import CacheLayerMixin

from h2okv.budget import TokenBudget
from h2okv.cache.base_layer import BaseLayer
from h2okv.cache.layer import CacheLayer
from h2okv.cache.slot_state import ordinary_tensors
from h2okv.cache.support import config_of, unwrap
from h2okv.config import CacheConfig
from h2okv.policy import Rule, get_rule
from h2okv.records import atomic_write, refusing

CONTRACT = 2  # counts up when older entries would be evicted by another rule
FORMAT = 3  # counts up when the file is laid out differently; 2 had no digest, 1 no number
_KEY, _NOTES, _DIGEST = "h2okv", "h2okv.notes", "h2okv.digest"
# Parts of a config that say nothing about what the keys are.
_VOLATILE = (
    "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "return_dict",
    "id2label", "label2id", "problem_type", "initializer_range", "attention_dropout",
    "chunk_size_feed_forward",
)  # fmt: skip


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
    metadata[_DIGEST] = _digest(metadata, tensors)
    writable = "give a file in a folder that exists and is writable."
    written = refusing(f"the cache cannot be written to '{path}'", writable, SafetensorError)
    with written, atomic_write(Path(path), "wb") as file:
        save_file(tensors, file.name, metadata=metadata)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of all that a file says, so that a reader knows it is as it was written."""
    digest = hashlib.sha256("".join(metadata[key] for key in (_KEY, _NOTES)).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        numbers: Any = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
        digest.update(numbers)
    return digest.hexdigest()


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
    base = None if model is None or isinstance(model, PreTrainedConfig) else unwrap(model)
    # An offloaded model has no device of its own; the cache follows the keys when they come.
    offloaded = base is None or base.device.type == "meta"
    device = "cpu" if offloaded else str(base.device)
    with (
        _naming_damage(path),
        ordinary_tensors(),
        safe_open(str(path), framework="pt", device=device) as file,
    ):
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get(_DIGEST) != _digest(metadata, tensors):
            raise ValueError("it is not as it was written")
        config = AutoConfig.for_model(**head["config"]) if model is None else config_of(model)
    if model is not None:
        check_same_model(path, head["config"], config)
    if policy is None:
        policy = _saved_policy(**head["policy"])
    with _naming_damage(path):
        options = CacheConfig.from_dict(head["cache_config"]).to_dict() | {"policy": policy}
        cache = cache_class(model or config, **options)
        for index, (layer, header) in enumerate(zip(cache.layers, head["layers"], strict=True)):
            fill: Any = _fill_layer if isinstance(layer, CacheLayer) else _fill_foreign
            of_layer = {name: tensors[f"{index}.{name}"] for name in header["tensors"]}
            fill(layer, of_layer, header["values"])
        cache.check_integrity()
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


def _saved_policy(name: str, settings: dict[str, Any]) -> Rule:
    fresh = get_rule(name)
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


def _fill_layer(layer: CacheLayer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    seen, dtype = tensors.pop("cumulative_length"), getattr(torch, values["dtype"])
    batch, heads, _ = tensors["positions"].shape
    by_head = len(layer.head_budgets or range(heads))
    key, value = (
        torch.empty(batch, by_head, 1, size, dtype=dtype, device="meta") for size in values["sizes"]
    )
    state = layer.empty_state(key[:, :heads], value[:, :heads])
    state.key_center = state.key_scale = None  # the file says how its keys are transformed
    names = {kind.file_name: name for name, kind in state.kinds.items()}
    state.set_tensors({names.get(n, n): tensor.contiguous() for n, tensor in tensors.items()})
    for name, kind in state.kinds.items():
        has_one, is_of = getattr(state, name) is not None, kind.is_of(layer)
        if (has_one and not is_of) or (kind.iff and is_of and not has_one):
            needed = "be there" if is_of else "be absent"
            problem = f"{kind.file_name or name} must {needed}, by the cache's options"
            raise ValueError(f"layer {layer.layer_idx}: {problem}")
    state.budgets = [TokenBudget(*amounts) for amounts in values["budgets"]]
    state.span_starts = tuple(values["span_starts"]) if "span_starts" in values else None
    state.has_gaps = "has_gaps" in values
    layer.lazy_initialization(key, value)
    layer.load_state(state, seen, values["weights"])
    layer.counts_padding = values["counts_padding"]


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
    for name, value in {**values, **tensors}.items():
        attribute, _, index = name.partition(".")
        if index:
            vars(layer)[attribute][int(index)] = value
        else:
            vars(layer)[attribute] = value
    for tensor in tensors.values():
        if tensor.is_floating_point():
            layer.dtype, layer.device = tensor.dtype, tensor.device
