"""The size of both packages, and what the product knows of the laboratory."""

from pathlib import Path

import pytest

import h2okv

SOURCE = Path(h2okv.__file__).parents[1]
LIMITS = {"h2okv": (33_600, 135), "h2okv_lab": (8_100, 40)}
"""Lines, in fifties, and files of Python in each package; lower them when code goes."""


def read(package):
    return {path: path.read_text("utf-8") for path in (SOURCE / package).rglob("*.py")}


@pytest.mark.parametrize("package", LIMITS)
def test_a_package_does_not_grow(package):
    texts = read(package)
    sizes = sum(text.count("\n") for text in texts.values()), len(texts)
    for size, limit, unit in zip(sizes, LIMITS[package], ("lines", "files"), strict=True):
        assert size <= limit, (
            f"src/{package} has {size} {unit}, {size - limit} above its limit. Let the change"
            " remove as many elsewhere: merge it with what does nearly the same, or delete what"
            f" nothing uses. If it must grow, raise LIMITS in {Path(__file__).name}, and say in the"
            " commit what the change replaces and why it needs more."
        )


def test_only_the_table_of_commands_names_the_laboratory():
    """A name in a string is an import that `make lint` does not see."""
    paths = [path for path, text in read("h2okv").items() if "h2okv_lab" in text]
    assert paths == [SOURCE / "h2okv" / "cli" / "commands.py"]
