"""A cache in a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from h2okv.cache.layer import ScoredLayer
from h2okv.policy import Policy, get_policy

if TYPE_CHECKING:
    from h2okv.cache.h2o_cache import H2OCache


CONTRACT = 1
"""Counts up when entries written by an older version would be evicted by another rule."""
_KEY = "h2okv"
_NOTES = "h2okv.notes"
_VOLATILE = (
    "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "return_dict",
    "id2label", "label2id", "problem_type", "initializer_range", "attention_dropout",
    "chunk_size_feed_forward",
)  # fmt: skip
"""Parts of a config that say nothing about what the keys are."""


def save_cache(cache: H2OCache, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
    """Writes a cache to a safetensors file, at once or not at all."""
    cache.check_integrity()
    if cache.num_seen_tokens == 0:
        raise ValueError("the cache is empty, so there is nothing to save; read a text first.")
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        held, rest = layer.state() if isinstance(layer, ScoredLayer) else _foreign_state(layer)
        tensors |= {f"{index}.{name}": t.detach().contiguous() for name, t in held.items()}
        layers.append({"tensors": sorted(held), "numbers": rest})
    policy = {"name": cache.policy.name, "settings": vars(cache.policy)}
    head = {
        "contract": CONTRACT,
        "config": config_identity(cache.config),
        "options": cache.options,
        "policy": policy,
        "layers": layers,
    }
    try:
        metadata = {_KEY: json.dumps(head), _NOTES: json.dumps(dict(notes or {}))}
    except TypeError as error:
        raise ValueError(
            f"policy={cache.policy.name!r} or the notes hold something that is no JSON ({error}); "
            "keep plain numbers and texts in them, or this cache in memory."
        ) from error
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            save_file(tensors, temporary, metadata=metadata)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"the cache cannot be written to '{path}' ({reason}); give a file in a folder that "
            "exists and is writable."
        ) from error


def read_head(path: str | Path) -> dict[str, Any]:
    """Reads what a file says about its cache, without the tensors."""
    head = json.loads(_metadata(path)[_KEY])
    if head.get("contract") != CONTRACT:
        raise ValueError(
            f"'{path}' was saved under version {head.get('contract')} of the eviction contract and "
            f"this h2okv has version {CONTRACT}; read the text again with this version."
        )
    return head


def read_notes(path: str | Path) -> dict[str, str]:
    """Reads the notes that were saved with a cache."""
    return json.loads(_metadata(path)[_NOTES])


def load_cache(
    cache_class: type[H2OCache],
    path: str | Path,
    model: PreTrainedModel | PreTrainedConfig | None,
    policy: Policy | None,
) -> H2OCache:
    """Reads what `save_cache` wrote; see `H2OCache.load`."""
    head = read_head(path)
    if model is None:
        saved = dict(head["config"])
        config = AutoConfig.for_model(saved.pop("model_type"), **saved)
    else:
        config = model if isinstance(model, PreTrainedConfig) else model.config
        check_same_model(path, head["config"], config)
    if policy is None:
        policy = get_policy(head["policy"]["name"])
        vars(policy).update(head["policy"]["settings"])
    cache = cache_class(config, policy=policy, **head["options"])
    loaded = isinstance(model, PreTrainedModel)
    _fill(cache, path, head, model.device if loaded else torch.device("cpu"))
    dtype = next(layer.dtype for layer in cache.layers if isinstance(layer, ScoredLayer))
    if loaded and model.dtype != dtype:
        raise ValueError(
            f"'{path}' was saved in {dtype} and the model is in {model.dtype}; load the model "
            f"with dtype={dtype}."
        )
    return cache


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
    held: list[dict[str, torch.Tensor]] = [{} for _ in cache.layers]
    try:
        # Ordinary tensors even under torch.inference_mode, so that a later step outside may write.
        with (
            torch.inference_mode(False),
            safe_open(str(path), framework="pt", device=str(device)) as file,
        ):
            for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
                index, _, part = name.partition(".")
                held[int(index)][part] = file.get_tensor(name)
        for layer, tensors, told in zip(cache.layers, held, head["layers"], strict=True):
            missing = set(told["tensors"]) - set(tensors)
            if missing:
                raise LookupError(f"{min(missing)} is missing")
            if isinstance(layer, ScoredLayer):
                layer.restore(tensors, told["numbers"])
            else:
                _restore_foreign(layer, tensors, told["numbers"])
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{_damaged(path)} ({error}).") from error


def _metadata(path: str | Path) -> dict[str, str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise ValueError(f"'{path}' does not exist; give a file that a cache was saved to.") from (
            error
        )
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{_damaged(path)} ({error}).") from error
    if _KEY not in metadata:
        raise ValueError(
            f"'{path}' holds tensors but no H2OCache; give a file that a cache was saved to."
        )
    return metadata


def _damaged(path: str | Path) -> str:
    return f"'{path}' is no whole saved cache, or damaged; save it again or give another file"


def _foreign_state(layer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State of a layer of transformers' own: its tensors, and its numbers."""
    tensors, rest = {}, {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is None or isinstance(value, bool | int | float | str):
            rest[name] = value
        elif not isinstance(value, torch.dtype | torch.device):
            raise ValueError(
                f"a {type(layer).__name__} with {name}={value!r} cannot be saved; this model's "
                "cache can only be kept in memory."
            )
    return tensors, rest


def _restore_foreign(layer: Any, tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> None:
    vars(layer).update(rest)
    vars(layer).update(tensors)
    for name, held in (("dtype", tensors.get("keys")), ("device", tensors.get("keys"))):
        if held is not None:
            setattr(layer, name, getattr(held, name))
