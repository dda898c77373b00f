"""GGUF files become ordinary checkpoints, once, whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    pytest.skip("needs transformers 5.24", allow_module_level=True)

import h2okv
from h2okv.cli.app import run
from h2okv.models import gguf as conversion
from h2okv.models.gguf import RECORD, converted
from h2okv.models.names import PACKAGED, SMOLLM2, cache_folder, find_gguf

TEXT = "the cat sat on the mat and the dog sat on the log, "
TEMPLATE = "{% for message in messages %}<turn>{{ message.content }}<end>{% endfor %}"
SPECIAL = ["<bos>", "<eos>", "<turn>", "<end>"]
WIDTH, LAYERS, VOCABULARY = 64, 2, 300
# As a machine that runs these tests has it, before they turn to folders of their own.
REAL = PACKAGED[SMOLLM2].find()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("models")


def add_tokenizer(writer):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet,
            show_progress=False,
        ),
    )  # fmt: skip
    learned = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(learned["vocab"], key=learned["vocab"].get)
    tokens += [f"unused{number}" for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in learned["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(3)
    writer.add_chat_template(TEMPLATE)


def write_gguf(path, kind=Kind.F32, architecture="llama", without=(), split=0, **metadata):
    """Write a tiny random Llama with tied embeddings; `split` is the tensors per file."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        block = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        block |= dict.fromkeys(("attn_k", "attn_v"), (WIDTH // 2, WIDTH))
        names = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        block |= dict.fromkeys(names, (WIDTH, WIDTH))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name in without:
            continue
        values = generator.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", 1 + values)
        elif kind is Kind.Q8_K:  # which nothing writes to a file, and gguf does not undo
            packed = np.zeros((VOCABULARY, 292), dtype=np.uint8)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    return tokenizer.decode(output[0])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Kind.F32, torch.float32), (Kind.F16, torch.float16), (Kind.Q4_1, torch.bfloat16)],
    ids=lambda value: getattr(value, "name", None),
)
def test_converted_weights_equal_those_of_transformers(tmp_path, kind, dtype):
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    folder = converted(path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"gguf_file": path.name}
    own_tokenizer = AutoTokenizer.from_pretrained(tmp_path, **options)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **options).eval()

    assert model.dtype == dtype
    own_weights = reference.state_dict()
    assert all(torch.equal(value, own_weights[name]) for name, value in model.state_dict().items())
    assert greedy(model, tokenizer) == greedy(reference, own_tokenizer)
    assert tokenizer(TEXT + "<turn>").input_ids == own_tokenizer(TEXT + "<turn>").input_ids
    assert tokenizer.chat_template == TEMPLATE
    assert model.config.max_position_embeddings == 256
    # The end of a text, and the end of a turn.
    assert model.generation_config.eos_token_id == [1, 3]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_converting_tables_in_chunks_gives_the_same_weights(tmp_path, monkeypatch):
    """Tables by rows, several files, a vocabulary that is not read for the config."""
    path = write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    monkeypatch.setattr(conversion, "_NUMBERS_AT_ONCE", 2000)
    monkeypatch.setattr(conversion, "_FILE_BYTES", 30000)
    monkeypatch.setattr(conversion, "_LONG", 16)
    undo, rows = gguf.dequantize, []

    def dequantize(data, kind):
        rows.append(len(data))
        return undo(data, kind)

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    folder = converted(path)
    monkeypatch.undo()
    assert max(rows) <= WIDTH < VOCABULARY
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 60000 for file in files)  # one tensor may be larger
    options = {"dtype": torch.bfloat16, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info.values())
    reference, _ = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, **options)
    weights = reference.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    ignored = {"_name_or_path", "architectures", "quantization_config"}
    config, expected_config = model.config.to_dict(), reference.config.to_dict()
    assert {
        name for name in expected_config if expected_config[name] != config.get(name)
    } <= ignored


def test_end_tokens_of_the_metadata(tmp_path):
    more = {"eom_token_id": 7, "fim_pad_token_id": 8, "fim_sep_token_id": VOCABULARY}
    folder = converted(write_gguf(tmp_path / "tiny.gguf", **more))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        1,
        3,
        7,
        8,
    ]


def test_split_gguf_files(tmp_path, cache, monkeypatch, capsys):
    single = converted(write_gguf(tmp_path / "whole" / "tiny.gguf"))
    (folder := tmp_path / "split").mkdir()
    write_gguf(folder / "tiny.gguf", split=7)
    shards = sorted(folder.iterdir())
    assert len(shards) == 3
    assert find_gguf(str(folder)) == shards[0]
    joined = {converted(find_gguf(str(shard))) for shard in shards}
    (joined,) = joined
    assert {entry.name for entry in cache.iterdir()} == {single.name, joined.name}
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (joined / name).read_bytes() == (single / name).read_bytes()
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    shutil.rmtree(joined)
    with pytest.raises(ValueError, match="make room there"):
        converted(shards[0])
    shards[1].rename(tmp_path / "other.gguf")
    for path in (folder, shards[0], shards[2]):
        assert run(["generate", "--model", str(path), "a"]) == 2
        stderr = capsys.readouterr().err
        assert "one of 3 parts" in stderr
        assert "'tiny-00002-of-00003.gguf' is not in its folder" in stderr
    with pytest.raises(ValueError, match="is part 2 of 3 of a model.*-00001-of-00003.gguf"):
        converted(tmp_path / "other.gguf")


def test_parts_that_transformers_itself_reads_are_refused(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", split=7)
    architectures = "transformers.integrations.gguf.utils.GGUF_ARCHS"
    monkeypatch.setattr(architectures, {"llama": None})
    with pytest.raises(ValueError, match="has 3 parts.*join them with llama-gguf-split"):
        converted(sorted(tmp_path.glob("*.gguf"))[0])


def test_an_earlier_transformers_is_refused(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(ValueError, match="needs transformers 5.24 or later.*5.17.0 is installed"):
        converted(path)


def test_conversion_is_reported_on_stderr(tmp_path, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    folder = converted(path)
    stderr = capsys.readouterr().err
    assert f"converting '{path}' (" in stderr
    assert f"of bfloat16 weights to '{folder}'" in stderr
    assert "converted in " in stderr
    converted(path)
    assert not capsys.readouterr().err


def test_checkpoints_of_an_earlier_version_are_converted_again(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = converted(path)
    record = json.loads((folder / RECORD).read_text())
    del record["version"]
    (folder / RECORD).write_text(json.dumps(record))
    (folder / "old").touch()
    assert converted(path) == folder
    assert not (folder / "old").exists()
    assert json.loads((folder / RECORD).read_text()) == record | {"version": 2}


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ12", "Ġdon", "'t", "Ċ", "Ċ", "b"]),
        ("smollm", ["a", "ĠĠ", "1", "2", "Ġdon", "'t", "Ċ", "Ċ", "b"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "Ġdon", "'t", "ĊĊ", "b"]),
        ("stablelm2", ["a", "Ġ", "Ġ", "1", "2", "Ġdon", "'t", "ĊĊ", "b"]),
        ("glm4", ["a", "Ġ", "Ġ", "12", "Ġdon", "'t", "ĊĊ", "b"]),
    ],
)
def test_pre_tokenizer_of_the_file(tmp_path, split, pieces):
    folder = converted(write_gguf(tmp_path / "tiny.gguf", pre=split))
    pre_tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    text = "a  12 don't\n\nb"
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_an_unknown_pre_tokenizer_is_refused(tmp_path, cache, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", pre="foo-bpe")
    with pytest.raises(ValueError, match="tokenizer.ggml.pre is 'foo-bpe'.*get the model as"):
        converted(path)
    assert not cache.exists()
    capsys.readouterr()
    converted(write_gguf(path))
    assert "does not say how its tokenizer splits text" in capsys.readouterr().err


def test_converts_once(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = converted(path)
    assert [entry.name for entry in cache.iterdir()] == [folder.name]

    def fail(*_, **__):
        raise AssertionError("it is converted already")

    monkeypatch.setattr(conversion, "_write", fail)
    copy = tmp_path / "elsewhere" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_json", mock.Mock(side_effect=PermissionError))
        assert converted(copy) == folder  # in a folder that is read-only
    assert converted(copy) == folder  # by its digest
    monkeypatch.setattr(conversion, "sha256", fail)
    assert converted(path) == folder  # by its size and time, which is faster
    assert converted(copy) == folder
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    write_gguf(path, Kind.Q4_1)
    assert converted(path) != folder


def test_another_process_was_first(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    convert, others = conversion._convert, []

    def convert_late(*args):
        if not others:
            others.append(None)
            others.append(converted(path))
        convert(*args)

    monkeypatch.setattr(conversion, "_convert", convert_late)
    assert converted(path) == others[1]
    assert [entry.name for entry in cache.iterdir()] == [others[1].name]


def test_unfinished_folders_are_ignored(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = converted(path)
    unfinished = cache / ".converting-other"
    folder.rename(unfinished)
    assert converted(path) == folder
    assert unfinished.is_dir()


def test_commands_take_a_folder_with_a_gguf_file(tmp_path, capsys):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)  # converted to bfloat16, with tied embeddings
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": TEXT}) + "\n")
    options = ["--model", str(tmp_path), "--max-new-tokens", "8", "--budget", "8+8"]
    options += ["--policy", "h2o"]  # best measures only weights in memory
    assert run(["generate", *options, "--json", TEXT]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    files = ["--input", str(prompts), "--output", str(results)]
    assert run(["batch", *options, "--weights", "disk", *files]) == 0
    assert json.loads(results.read_text())["text"] == text


def test_folders_of_a_killed_process_are_removed(tmp_path, cache, monkeypatch):
    left, young = cache / ".converting-left", cache / ".converting-young"
    for folder in (left, young):
        folder.mkdir(parents=True)
    later = left.stat().st_mtime + 90000
    monkeypatch.setattr(conversion.time, "time", lambda: later)
    os.utime(young, (later, later))
    converted(write_gguf(tmp_path / "tiny.gguf"))
    assert not left.exists()
    assert young.exists()


def patched_kind(path):
    """Write a weight of a kind that no GGUF library knows."""
    data = bytearray(write_gguf(path).read_bytes())
    name = b"blk.0.attn_q.weight"
    offset = data.index(name) + len(name) + 4 + 2 * 8
    assert data[offset : offset + 4] == bytes(4)
    data[offset] = 200
    path.write_bytes(data)


def cut(keep):
    def write(path):
        data = write_gguf(path).read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])

    return write


BAD_FILES = {
    "text": (lambda path: path.write_text("not a model"), ("not a GGUF",)),
    "empty": (lambda path: path.write_bytes(b""), ("not a GGUF",)),
    "cut in the header": (lambda path: path.write_bytes(b"GGUF\3\0\0\0"), ("truncated",)),
    "cut in the vocabulary": (cut(0.005), ("truncated", "get it again")),
    "cut in the weights": (cut(0.9), ("truncated", "get it again")),
    "architecture": (lambda path: write_gguf(path, architecture="warp"), ("warp", "safetensors")),
    "encoder and decoder": (lambda path: write_gguf(path, architecture="t5"), ("t5",)),
    "quantization unknown": (patched_kind, ("200", "safetensors")),
    "quantization not undone": (lambda path: write_gguf(path, Kind.Q8_K), ("Q8_K", "Q4_K_M")),
    "missing weights": (
        lambda path: write_gguf(path, without=("blk.1.ffn_up",)),
        ("incomplete", "layers.1.mlp.up_proj"),
    ),
}


@pytest.mark.parametrize(("write", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_damaged_gguf_files_are_refused(tmp_path, cache, capsys, write, words):
    path = tmp_path / "bad.gguf"
    write(path)
    capsys.readouterr()
    with pytest.raises(ValueError) as caught:
        converted(path)
    assert "\n" not in str(caught.value)
    for word in (*words,):
        assert word in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="has 1,000 bytes free.*XDG_CACHE_HOME"):
        converted(path)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))

    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_while_saving(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    for failing in (fill, fill_while_saving):
        monkeypatch.setattr(conversion, "_convert", failing)
        with pytest.raises(ValueError, match="No space left.*XDG_CACHE_HOME"):
            converted(path)
        assert not list(cache.iterdir())


def test_cache_folder(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("models") == tmp_path / "home" / ".cache" / "h2okv" / "models"
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ValueError, match="no home folder.*XDG_CACHE_HOME"):
        converted(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # under a file no folder can be made
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\)"):
        converted(path)


def test_folders_with_gguf_files(tmp_path):
    assert find_gguf("owner/name") is None
    assert find_gguf(str(tmp_path)) is None
    file = tmp_path / "a.gguf"
    file.touch()
    assert find_gguf(str(tmp_path)) == find_gguf(str(file)) == file
    (tmp_path / "b.GGUF").touch()
    with pytest.raises(ValueError, match=r"2 GGUF files; give one of them, such as '.*a\.gguf'"):
        find_gguf(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(str(tmp_path)) is None
    with pytest.raises(ValueError, match=r"c\.gguf' does not exist"):
        find_gguf(str(tmp_path / "c.gguf"))


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(conversion, "sha256", refuse)
    with pytest.raises(ValueError, match=r"tiny.gguf' cannot be read \(Permission denied\)"):
        converted(path)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[gguf\]'"):
        converted(path)


@pytest.mark.slow  # transformers takes a minute to undo its quantization
@pytest.mark.skipif(REAL is None, reason="SmolLM2 is not here; h2okv models pull smollm2 gets it")
def test_smollm2_is_as_transformers_reads_it_and_answers():
    folder = converted(REAL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reference = AutoModelForCausalLM.from_pretrained(
        REAL.parent, gguf_file=REAL.name, dtype=torch.bfloat16
    )
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert stored.keys() == reference.state_dict().keys()
    assert all(torch.equal(stored[name], weight) for name, weight in reference.state_dict().items())
    # In bf16 the two likeliest first tokens are so near that each CPU chooses for itself.
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="h2o", dtype=torch.float32
    )
    cache = h2okv.H2OCache(model.config, heavy=64, recent=64)
    answer = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")  # the template's end of a turn ends the text
    assert folder.joinpath(RECORD).is_file()


_PEAK = """
import sys, torch
from pathlib import Path
from h2okv.models import gguf, loading
if sys.argv[1] == "convert":
    gguf.converted(Path(sys.argv[2]))
else:
    described = loading.describe(sys.argv[2])
    model = loading.load_weights(described, torch.bfloat16, torch.device("cpu"), packed=True)
key = "VmHWM:" if sys.argv[1] == "convert" else "VmRSS:"  # the most until now; now
print(Path("/proc/self/status").read_text().partition(key)[2].split()[0])
"""


@pytest.mark.slow  # two processes of their own
@pytest.mark.skipif(REAL is None or sys.platform != "linux", reason="needs SmolLM2, and /proc")
def test_converting_needs_little_more_than_the_model():
    def kib(action):
        command = [sys.executable, "-c", _PEAK, action, str(REAL)]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    peak = kib("convert")
    assert peak <= 1.3 * kib("load")
