"""What `h2okv batch --ray` and `h2okv serve --ray` are told alike."""

from __future__ import annotations

RAY_DEVICES = ("auto", "cpu", "cuda")


def check_copies(option: str, copies: int | None, ray: bool, device: str) -> None:
    """Refuses a number of copies of the model, or a device for them, that makes no sense.

    Args:
        option: The option's name.
        copies: Its value; None if it was not given.
        ray: Whether `--ray` was given.
        device: The value of `--device`.

    Raises:
        ValueError: If one of them is at fault.
    """
    if not ray:
        if copies is not None:
            raise ValueError(f"{option} {copies} is for --ray; give --ray too")
        return
    if copies is not None and copies < 1:
        raise ValueError(f"{option} {copies} is too few; give 1 or more")
    if device not in RAY_DEVICES:
        raise ValueError(
            f"--device {device!r} cannot be chosen with --ray, which gives each copy of the model"
            f" a GPU of its own; give {', '.join(RAY_DEVICES)}"
        )
