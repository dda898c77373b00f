"""What the plug-in declares to vLLM, with stand-ins for vLLM's classes."""

import enum
import importlib
import sys
import types
from importlib.machinery import ModuleSpec

import pytest


class _Base:
    """Stands for any class of vLLM."""

    def __init__(self, *args, **options):
        pass

    def __class_getitem__(cls, item):
        return cls


class _Module(types.ModuleType):
    """Stands for any module of vLLM: has every class that is imported from it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (_Base,), {}))
        return getattr(self, name)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        is_wanted = name.partition(".")[0] == "vllm"
        return ModuleSpec(name, self, is_package=True) if is_wanted else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture
def layer(monkeypatch):
    """Yield the module of layers, imported with the stand-ins."""
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] == "vllm" or name == "h2okv.vllm_plugin.layer":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Finder(), *sys.meta_path])
    backend = importlib.import_module("vllm.v1.attention.backend")
    support = enum.Enum("AttentionCGSupport", "NEVER UNIFORM_SINGLE_TOKEN_DECODE")
    backend.AttentionCGSupport = support
    yield importlib.import_module("h2okv.vllm_plugin.layer")
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


@pytest.mark.parametrize(
    "evict_every, expected",
    [(None, "UNIFORM_SINGLE_TOKEN_DECODE"), (1, "UNIFORM_SINGLE_TOKEN_DECODE"), (64, "NEVER")],
)
def test_a_whole_step_is_a_graph_only_without_spans(layer, evict_every, expected):
    setting = {"heavy": 16, "recent": 16, "evict_every": evict_every}
    vllm_config = types.SimpleNamespace(additional_config={"h2okv": setting})
    support = layer.MetadataBuilder.get_cudagraph_support(vllm_config, None)
    assert support.name == expected
