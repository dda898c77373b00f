"""A request's body turned into one of the request models, or into an error that helps."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from h2okv.server.api_error import ApiError
from h2okv.server.prompt import off_the_loop

Body = TypeVar("Body", bound=BaseModel)
_SHOWN = 80
"""Characters of a wrong value that an error repeats."""


async def read_body(request: Request, model: type[Body]) -> Body:
    """Reads and checks a body.

    Args:
        request: With a JSON body.
        model: What it must be.

    Returns:
        The body.

    Raises:
        ApiError: If it is no JSON, or not what it must be.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page elsewhere cannot send this type without asking first, which no answer allows.
        raise ApiError(
            415,
            f"Content-Type {kind!r} is not JSON; send the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    raw = await request.body()
    return await off_the_loop(len(raw), lambda: parse(raw, model))


def parse(raw: bytes, model: type[Body]) -> Body:
    """Checks a body; see `read_body`."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=True)
        # An unknown field explains more than what follows from it.
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        raise _explained(first, model) from error


def _explained(problem: Mapping[str, Any], model: type[BaseModel]) -> ApiError:
    """Says what is wrong with a body in one sentence."""
    field, kind, value = _path(problem["loc"]), problem["type"], problem["input"]
    if kind == "json_invalid":
        reason = problem["ctx"]["error"]
        return ApiError(
            400,
            f"the body is not JSON in UTF-8 ({reason}); send one JSON object.",
            code="invalid_json",
        )
    if kind == "extra_forbidden":
        message, code = f"{field} is not known; {_hint(problem['loc'], model)}.", "unknown_field"
    elif kind == "missing":
        message, code = f"{field} is missing; give it.", "missing_field"
    elif kind == "value_error":
        message, code = str(problem["ctx"]["error"]), "invalid_value"
        field = getattr(problem["ctx"]["error"], "field", field)
        if len(problem["loc"]) > 1:
            message = f"{field}: {message}"
    elif not field:
        message, code = "the body is not a JSON object; send one.", "invalid_value"
    else:
        should = problem["msg"].removeprefix("Input should be ").rstrip(".")
        message = f"{field}={_short(value)} does not fit; give {should}."
        code = "invalid_value"
    return ApiError(400, message, param=field or None, code=code)


def _path(location: tuple[str | int, ...]) -> str:
    """A place in a body, as ``messages[0].content``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _hint(location: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """What may be meant by an unknown field."""
    near = []
    if len(location) == 1:
        near = difflib.get_close_matches(str(location[0]), model.model_fields, n=1)
    return f"did you mean {near[0]}" if near else "leave it out"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
