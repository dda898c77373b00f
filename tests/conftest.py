"""Fixtures that several folders use: the data beside the checkout, and tiny models."""

import dataclasses
import importlib.util
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# Before transformers is imported, which imports Triton, which looks once: without a GPU its kernels
# run in Python.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

# Earlier runs must not decide which code a test runs; tests of other code set it themselves.
os.environ["H2OKV_OPS"] = "plain"

# A shell without job control starts what runs in the background with Ctrl-C ignored, which child
# processes inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items):
    # The longest file, which mostly waits: begun last, it would do so alone at the end.
    items.sort(key=lambda item: item.path.stem != "test_batch_ray")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # Tiny models are slower on several threads than on one.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter():
    """Let Triton's interpreter patch its language once, not at each call, and drop unread checks.

    It looks for overflows of every sum of integers, and reads the result in debug mode only.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    options, patch_language = interpreter.interpreter_builder.options, interpreter._patch_lang
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    restore_nothing, patched = SimpleNamespace(restore=lambda: None), set()

    def patch_once(function):
        here = {id(value) for value in function.__globals__.values()}
        names = {module.__name__ for module in (tl, tl.core) if id(module) in here}
        if not patched.issuperset(names):
            patch_language(function)
            patched.update(names)
        return restore_nothing

    interpreter._patch_lang = patch_once


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory):
    """Keep what commands measure out of the user's folder; pulled models are read from there."""
    real = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = tmp_path_factory.mktemp("cache")
    (folder / "h2okv" / "layer-budgets").mkdir(parents=True)
    for source in (real, real / "h2okv"):
        for path in source.iterdir() if source.is_dir() else ():
            link = folder / path.relative_to(real)
            if not link.exists():
                link.symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(autouse=True)
def _no_kernel_limits():
    """Remove the limits that loading a model sets, which later processes would inherit."""
    yield
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _exact_fractions(request, monkeypatch):
    """Let fractions of the short texts of exactness tests be exact; others test the floor."""
    exact = {
        "cache", "engine", "families", "integration", "lab", "offload", "policy", "vllm_plugin",
    }  # fmt: skip
    tests_floor = request.path.stem in ("test_constructor", "test_arguments")
    tests_floor = tests_floor or "floor" in request.node.keywords
    if request.path.parent.name in exact and not tests_floor:
        monkeypatch.setattr("h2okv.budget.MIN_ENTRIES", 0)


@pytest.fixture(scope="session")
def load_script():
    """Return a function that imports a script of the checkout; a test without one is skipped."""

    def load(path):
        file = Path(__file__).parents[1] / path
        if not file.is_file():
            pytest.skip(f"{path} is not beside these tests")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def replace_stderr(monkeypatch):
    """Return a function that replaces stderr; pytest would undo a replacement during set-up."""

    def replace(stream=None):
        stream = Terminal() if stream is None else stream
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return replace


@pytest.fixture
def start_command():
    """Return a function that starts h2okv in a child process, which ends with the test."""
    processes = []

    def call(*args):
        process = subprocess.Popen(
            [sys.executable, "-m", "h2okv", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the development data (../shared) is not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def make_llama():
    """Builds a tiny random Llama with attention far from uniform, so that evictions matter.

    In float64: products of other shapes round differently on every CPU, and a rounded number can
    move a code of `kv_bits` or a choice between tokens. Tests of other dtypes convert it.
    """

    def make(
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        seed: int = 0,
        attention: str = "h2o",
        sharpness: float = 6.0,
        **options,
    ) -> LlamaForCausalLM:
        config = LlamaConfig(
            hidden_size=16 * heads, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=97,
            max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
            **options,
        )  # fmt: skip
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval().double()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= sharpness
            layer.self_attn.k_proj.weight.data *= sharpness
        model.set_attn_implementation(attention)
        return model

    return make


@pytest.fixture(scope="session")
def kept_sets():
    """Lists what a cache holds: for each layer, row and head the set of positions."""

    def collect(cache) -> list[list[list[set[int]]]]:
        return [
            [
                [{p for p in head if p >= 0} for head in row]
                for row in cache.kept_positions(layer).tolist()
            ]
            for layer in range(len(cache.layers))
        ]

    return collect
