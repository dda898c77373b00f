"""A cache in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from h2okv.cache.layer import CacheLayer
from h2okv.cache.validation import check_loaded, config_of, unwrap
from h2okv.config import CacheConfig, TokenBudget
from h2okv.policy import Policy, get_policy
from h2okv.records import atomic_write

if TYPE_CHECKING:
    from h2okv.cache.h2o_cache import H2OCache


CONTRACT = 1
"""Counts up when entries written by an older version would be evicted by another rule."""
FORMAT = 2
"""Counts up when the file is laid out differently; 1 had no number."""
_KEY = "h2okv"
_NOTES = "h2okv.notes"
_VOLATILE = (
    "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "return_dict",
    "id2label", "label2id", "problem_type", "initializer_range", "attention_dropout",
    "chunk_size_feed_forward",
)  # fmt: skip
"""Parts of a config that say nothing about what the keys are."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def save_cache(cache: H2OCache, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
    """Writes a cache to a safetensors file, at once or not at all."""
    cache.check_integrity()
    if cache.num_seen_tokens == 0:
        raise ValueError("the cache is empty, so there is nothing to save; read a text first.")
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        held, rest = _layer_state(layer) if isinstance(layer, CacheLayer) else _foreign_state(layer)
        tensors |= {f"{index}.{name}": t.detach().contiguous() for name, t in held.items()}
        layers.append({"tensors": sorted(held), "values": rest})
    head = {
        "format": FORMAT,
        "contract": CONTRACT,
        "config": config_identity(cache.config),
        "cache_config": cache.cache_config.to_dict(),
        "simulate": cache.simulate,
        "policy": {"name": cache.policy.name, "settings": vars(cache.policy)},
        "layers": layers,
    }
    try:
        metadata = {_KEY: json.dumps(head), _NOTES: json.dumps(dict(notes or {}))}
    except TypeError as error:
        raise ValueError(
            f"policy={cache.policy.name!r} or the notes hold something that is no JSON ({error}); "
            "keep plain numbers and texts in them, or this cache in memory."
        ) from error
    try:
        with atomic_write(Path(path), "wb") as file:
            save_file(tensors, file.name, metadata=metadata)
    except SafetensorError as error:
        raise ValueError(
            f"the cache cannot be written to '{path}' ({error}); give a file in a folder that "
            "exists and is writable."
        ) from error


def _layer_state(layer: CacheLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file must hold of a layer to go on from there: tensors, and values for the header."""
    tensors = layer.state.tensors() | {"cumulative_length": layer.cumulative_length}
    return tensors, {
        "budgets": [astuple(own) for own in layer.state.budgets],
        "weights": layer.weights(),
        # What packed entries do not tell.
        "dtype": str(layer.dtype).removeprefix("torch."),
        "sizes": [layer.key_size, layer.value_size],
    }


def read_head(path: str | Path) -> dict[str, Any]:
    """Reads what a file says about its cache, without the tensors."""
    head = _json_of(path, _KEY)
    known = {"format": (FORMAT, "file format"), "contract": (CONTRACT, "eviction contract")}
    for name, (own, what) in known.items():
        version = head.get(name, 1)
        if version != own:
            raise ValueError(
                f"'{path}' was saved under version {version} of the {what} and this h2okv has "
                f"version {own}; read the text again with this version."
            )
    return head


def read_notes(path: str | Path) -> dict[str, str]:
    """The notes that were saved with a cache."""
    return _json_of(path, _NOTES)


def load_cache(
    cache_class: type[H2OCache],
    path: str | Path,
    model: PreTrainedModel | PreTrainedConfig | None,
    policy: Policy | None,
) -> H2OCache:
    """Reads what `save_cache` wrote; see `H2OCache.load`."""
    head = read_head(path)
    parts = {"config": dict, "cache_config": dict, "simulate": bool, "policy": dict, "layers": list}
    for name, kind in parts.items():
        if type(head.get(name)) is not kind:
            _refuse(path, f"its header has no {name}")
    config = _saved_config(path, head["config"]) if model is None else config_of(model)
    if model is not None:
        check_same_model(path, head["config"], config)
    if policy is None:
        policy = _saved_policy(path, head["policy"])
    try:
        options = CacheConfig.from_dict(head["cache_config"]).to_dict() | {"policy": policy}
        cache = cache_class(config, simulate=head["simulate"], **options)
    except (TypeError, ValueError, OverflowError) as error:
        _refuse(path, error)
    base = None if model is None or isinstance(model, PreTrainedConfig) else unwrap(model)
    # An offloaded model has no device of its own; the cache follows the keys when they come.
    offloaded = base is None or base.device.type == "meta"
    _fill(cache, path, head, torch.device("cpu") if offloaded else base.device)
    dtype = next(layer.dtype for layer in cache.layers if isinstance(layer, CacheLayer))
    if base is not None and base.dtype != dtype:
        raise ValueError(
            f"'{path}' was saved in {dtype} and the model is in {base.dtype}; load the model "
            f"with dtype={dtype}."
        )
    return cache


def _saved_config(path: str | Path, saved: dict[str, Any]) -> PreTrainedConfig:
    rest = {name: value for name, value in saved.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(saved["model_type"], **rest)
    except Exception as error:  # whatever a config makes of values that nobody gave it
        _refuse(path, f"{type(error).__name__} in the model's config: {error}")


def _saved_policy(path: str | Path, saved: dict[str, Any]) -> Policy:
    name, settings = saved.get("name"), saved.get("settings")
    if not isinstance(name, str) or not isinstance(settings, dict):
        _refuse(path, "its header does not name a policy")
    fresh = get_policy(name)
    kinds = {key: type(value) for key, value in vars(fresh).items()}
    if kinds != {key: type(value) for key, value in settings.items()}:
        _refuse(path, f"policy={name!r} has no settings {settings}")
    try:
        return get_policy(type(fresh)(**settings), settings.get("seed", 0))
    except TypeError:  # settings that its constructor does not take
        vars(fresh).update(settings)
        return fresh
    except ValueError as error:
        _refuse(path, error)


def config_identity(config: PreTrainedConfig) -> dict[str, Any]:
    """The parts of a model's config that its keys depend on, as JSON values."""
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
    own = config_identity(config)
    # Names that only one side knows come and go with versions of transformers.
    for name in ("model_type", *sorted(own.keys() & saved.keys())):
        if saved.get(name) != own.get(name):
            raise ValueError(
                f"'{path}' was saved with another model: its {name} is {saved.get(name)!r} and "
                f"this model's is {own.get(name)!r}; load it with the model that wrote it."
            )


def _fill(cache: H2OCache, path: str | Path, head: dict[str, Any], device: torch.device) -> None:
    """Fills an empty cache, made with the file's options; mutates it."""
    held: list[dict[str, Tensor]] = [{} for _ in cache.layers]
    if len(head["layers"]) != len(held):
        _refuse(path, f"it tells of {len(head['layers'])} layers, and the model has {len(held)}")
    try:
        # Ordinary tensors even under torch.inference_mode, so that a later step outside may write.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            safe_open(str(path), framework="pt", device=str(device)) as file,
        ):
            for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
                index, _, part = name.partition(".")
                if not index.isdecimal() or int(index) >= len(held):
                    raise ValueError(f"{name} belongs to no layer")
                held[int(index)][part] = file.get_tensor(name)
            for layer, tensors, told in zip(cache.layers, held, head["layers"], strict=True):
                odd = set(told["tensors"]) ^ tensors.keys()
                if odd:
                    raise ValueError(f"{min(odd)} is missing, or too much")
                if isinstance(layer, CacheLayer):
                    _fill_layer(layer, tensors, told["values"])
                else:
                    _fill_foreign(layer, tensors, told["values"])
            cache.check_integrity()
    except (
        SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError,
        OverflowError,
    ) as error:  # fmt: skip
        _refuse(path, error)


def _fill_layer(layer: CacheLayer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Fills a layer of slots or of masked tokens with what has been checked."""
    dtype, seen = _DTYPES[values["dtype"]], tensors.pop("cumulative_length")
    batch, heads, num_slots = tensors["positions"].shape
    key, value = (
        torch.empty(batch, heads, 1, size, dtype=dtype, device="meta") for size in values["sizes"]
    )
    expected = layer.empty_state(key, value).like(batch, num_slots)
    optional = {
        "slot_mask": torch.bool, "ranks": torch.int32, "norms": torch.float32,
        "num_static": torch.int64,
    }  # fmt: skip
    for name in optional.keys() & tensors.keys():
        per_slot = expected.sink if name == "num_static" else expected.positions
        expected.set_tensors({name: torch.empty_like(per_slot, dtype=optional[name])})
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.tensors().items()}
    if shapes != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise ValueError(f"the tensors of layer {layer.layer_idx} do not fit each other")
    expected.set_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    expected.budgets = [TokenBudget(*parts) for parts in values["budgets"]]
    check_loaded(layer, expected, seen)
    weights = values["weights"]
    if weights is not None and not isinstance(weights, str):
        raise ValueError(f"layer {layer.layer_idx} has no fingerprint of weights")
    layer.lazy_initialization(key, value)
    layer.load_state(expected, seen, weights)


def _json_of(path: str | Path, key: str) -> dict[str, Any]:
    """An entry of the header, which is an object of JSON."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        reason = f"'{path}' does not exist; give a file that a cache was saved to."
        raise ValueError(reason) from error
    except (SafetensorError, OSError) as error:
        _refuse(path, error)
    if _KEY not in metadata:
        raise ValueError(
            f"'{path}' holds tensors but no H2OCache; give a file that a cache was saved to."
        )
    try:
        values = json.loads(metadata.get(key, ""))
    except (json.JSONDecodeError, RecursionError) as error:
        _refuse(path, f"its header is no JSON: {error}")
    if not isinstance(values, dict):
        _refuse(path, "its header is no JSON object")
    return values


def _refuse(path: str | Path, reason: object) -> NoReturn:
    cause = reason if isinstance(reason, Exception) else None
    raise ValueError(
        f"'{path}' is no whole saved cache, or damaged; save it again or give another file "
        f"({reason})."
    ) from cause


def _foreign_state(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of a layer of transformers' own: its tensors, and its values.

    Linear attention has dicts of them by a number; a part of one is called ``name.number``.
    """
    tensors, rest = {}, {}
    parts: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            parts |= {f"{name}.{index}": part for index, part in value.items()}
        else:
            parts[name] = value
    for name, value in parts.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is None or isinstance(value, bool | int | float | str):
            rest[name] = value
        elif not isinstance(value, torch.dtype | torch.device):
            raise ValueError(
                f"a {type(layer).__name__} with {name} of type {type(value).__name__} cannot be "
                "saved; this model's cache can only be kept in memory."
            )
    return tensors, rest


def _fill_foreign(layer: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Takes what `_foreign_state` gave, of attributes that a fresh layer has."""
    fresh = vars(layer)
    for name, value in {**values, **tensors}.items():
        whole, _, index = name.partition(".")
        if index:
            if not isinstance(fresh.get(whole), dict) or int(index) not in fresh[whole]:
                raise ValueError(f"a {type(layer).__name__} has no {name}")
            fresh[whole][int(index)] = value
        elif whole not in fresh or isinstance(fresh[whole], dict):
            raise ValueError(f"a {type(layer).__name__} has no {name}")
        else:
            fresh[whole] = value
    for tensor in tensors.values():
        if tensor.is_floating_point():
            layer.dtype, layer.device = tensor.dtype, tensor.device
