"""A saved chat: the cache's own file, with the conversation in its notes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import h2okv
from h2okv.cache.persistence import read_notes
from h2okv.cli.chat_turns import Transcript
from h2okv.cli.options import Sampling

_NOTE = "chat"
_VERSION = 1


@dataclass(frozen=True)
class SavedChat:
    """What a file holds beside the cache.

    Attributes:
        transcript: The chat so far.
        system: What stood before everything.
        sampling: How its tokens were chosen.
    """

    transcript: Transcript
    system: str
    sampling: Sampling


def write_chat(path: Path, cache: h2okv.H2OCache, chat: SavedChat) -> None:
    """Writes a chat and its cache to one file, whole or not at all.

    Args:
        path: A new file, or a saved cache, which is replaced.
        cache: The cache that has read the chat.
        chat: The rest.

    Raises:
        ValueError: If the file is something else, or cannot be written.
    """
    path = path.expanduser()
    if path.exists():
        _require_saved_cache(path)
    note = json.dumps({"version": _VERSION, **asdict(chat)})
    cache.save(path, notes={_NOTE: note})


def read_chat(path: Path, model: PreTrainedModel) -> tuple[h2okv.H2OCache, SavedChat]:
    """Reads a saved chat.

    Args:
        path: A file that `write_chat` wrote.
        model: The model that it was written with.

    Returns:
        The cache and the rest.

    Raises:
        ValueError: If the file cannot be read, holds no chat, or one of another model.
    """
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"'{path}' is not a file; give one that /save wrote")
    note = read_notes(path).get(_NOTE)
    if note is None:
        raise ValueError(f"'{path}' holds a cache but no chat; give a file that /save wrote")
    try:
        chat = _parse(json.loads(note))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the chat in '{path}' is damaged ({error}); use another file") from error
    cache = h2okv.H2OCache.load(path, model)
    if len(chat.transcript.token_ids) < cache.num_seen_tokens:
        raise ValueError(
            f"the chat in '{path}' is damaged (its cache has read {cache.num_seen_tokens} tokens,"
            f" its text has {len(chat.transcript.token_ids)}); use another file"
        )
    return cache, chat


def _parse(fields: dict[str, Any]) -> SavedChat:
    if fields["version"] != _VERSION:
        raise ValueError(f"version {fields['version']} of the chat, not {_VERSION}")
    transcript = Transcript(**fields["transcript"])
    if not all(isinstance(token, int) for token in transcript.token_ids):
        raise ValueError("a token that is no number")
    if not all(set(message) == {"role", "content"} for message in transcript.messages):
        raise ValueError("a message without role or content")
    return SavedChat(transcript, str(fields["system"]), Sampling(**fields["sampling"]))


def _require_saved_cache(path: Path) -> None:
    """Refuses to write over a file that is not a saved cache."""
    try:
        read_notes(path)
    except ValueError as error:
        raise ValueError(
            f"'{path}' exists and is no saved chat; choose another file, so that it is not lost"
        ) from error
