"""The prompt: where it comes from, and whether it fits the model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from h2okv.integration.loading import Described


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Reads the prompt from the one place where the user put it.

    Args:
        argument: The prompt on the command line; `-` for stdin.
        file: A text file.

    Returns:
        The prompt, without the line end of a file's last line.

    Raises:
        ValueError: If there is none, more than one, or it is empty or not text.
    """
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
    """Turns the prompt into tokens.

    Args:
        described: The model's description.
        prompt: The text.

    Returns:
        int [1, T].

    Raises:
        ValueError: If it has no tokens, or more than the model's context holds.
    """
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
    """Refuses a token that the model has no embedding for.

    Args:
        described: The model's description.
        largest: The largest token of a text.

    Raises:
        ValueError: If the tokenizer is another model's.
    """
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
