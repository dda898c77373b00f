"""Where the ``custom_generate`` recipe lies."""

from pathlib import Path


def recipe_path() -> Path:
    """Returns the folder for ``model.generate(custom_generate=...)``.

    It can be uploaded to the Hub as it is, or used from here with ``trust_remote_code=True``.
    """
    return Path(__file__).with_name("hub_recipe")
