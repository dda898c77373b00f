"""Weights from the disk give what weights in memory give, for every family, to the last bit."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv
from h2okv.offload import checkpoint
from h2okv.offload.batch_runner import ForwardScheduler, Limits
from h2okv.offload.checkpoint import (
    CheckpointFiles,
    convert,
    map_weights,
    open_checkpoint,
    open_converted,
)
from h2okv.offload.meta_model import make_meta_model
from h2okv.offload.planner import place_by_fractions
from h2okv.offload.tiers import materialise

sys.path.insert(0, str(Path(__file__).parent.parent / "families"))
from family_table import FAMILIES, config_options  # noqa: E402

CPU = torch.device("cpu")
NAMES = (
    "OPT", "LLaMA 1, LLaMA 2", "Llama 4 (text)", "GPT-NeoX, Pythia", "Mistral", "Mixtral",
    "Qwen2-MoE", "Qwen3", "Qwen3-Next", "Gemma 2", "Gemma 3 (text)", "Phi-3, Phi-4", "GPT-2",
    "GPT-BigCode, StarCoder", "LFM2",
)  # fmt: skip
LENGTHS = (17, 5, 26, 9, 30, 1, 12)


def save_family(family, folder):
    heads = (family.kv_heads or (None,))[-1]
    config = AutoConfig.for_model(family.model_type, **config_options(family, heads))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)


def stream(folder, placement, converted=None, dtype=torch.float64):
    """Open the model in the folder with some of its weights on the disk."""
    meta, files = open_checkpoint(AutoConfig.from_pretrained(folder), folder, dtype)
    if not files.parameters:
        files = open_converted(meta, files, converted or folder / "converted")
    stream, embedding = materialise(meta, files, placement(len(meta.units)), CPU)
    scheduler = ForwardScheduler(meta.units, stream, embedding=embedding)
    return SimpleNamespace(meta=meta, scheduler=scheduler, close=scheduler.close)


def everything_on_disk(count):
    return place_by_fractions({"disk": 1.0}, count)


def mixed(count):
    return (*place_by_fractions({"device": 0.5, "disk": 0.5}, count)[:-1], "device")


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_streamed_families_equal_loaded_ones(name, tmp_path, make_sequences, run_engine):
    (family,) = [candidate for candidate in FAMILIES if candidate.name == name]
    save_family(family, tmp_path)
    limits = Limits(batch_size=7, micro_batch_tokens=60, decode_batch=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = run_engine(model, make_sequences(LENGTHS), limits)
    unlimited = Limits(batch_size=7, micro_batch_tokens=1000, decode_batch=7)
    for placement, setting in ((everything_on_disk, limits), (mixed, unlimited)):
        offloaded = stream(tmp_path, placement, dtype=torch.float32)
        output = run_engine(
            offloaded.meta.model, make_sequences(LENGTHS), setting, offloaded.scheduler
        )
        offloaded.close()
        assert output == expected


@pytest.fixture(scope="module")
def llama_folder(make_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_llama(layers=4).save_pretrained(folder)
    return folder


def logits_of(model, scheduler, sequences):
    """Return every logit of every pass."""
    from h2okv.offload.batch_runner import MicroBatch

    batches = [
        MicroBatch(group, h2okv.H2OCache(model.config, heavy=4, recent=4), CPU)
        for group in (sequences[:3], sequences[3:])
    ]
    all_logits = []
    with h2okv.enable(model), torch.inference_mode():
        for _ in range(5):
            for batch, logits in scheduler.run(model, batches):
                all_logits.append(logits.clone())
                batch.take(logits.argmax(dim=-1).tolist())
    return torch.cat(all_logits)


def test_streamed_logits_are_bitwise_equal(llama_folder, make_sequences):
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    expected = logits_of(model, ForwardScheduler(), make_sequences(LENGTHS))
    for placement in (everything_on_disk, mixed):
        offloaded = stream(llama_folder, placement)
        output = logits_of(offloaded.meta.model, offloaded.scheduler, make_sequences(LENGTHS))
        offloaded.close()
        assert torch.equal(output, expected)


def test_each_byte_is_read_once_in_a_pass(llama_folder, make_sequences, run_engine):
    offloaded = stream(llama_folder, everything_on_disk)
    sizes = [unit.nbytes for unit in offloaded.meta.units]
    run_engine(offloaded.meta.model, make_sequences((9, 8), 20), scheduler=offloaded.scheduler)
    offloaded.close()
    resident = [p for p in offloaded.meta.model.parameters() if p.device.type != "meta"]
    assert sum(p.nbytes for p in resident) < min(sizes)
    # 20 passes, and up to two units that were read ahead of one that did not come.
    assert 0 <= offloaded.scheduler.stream.bytes_read - 20 * sum(sizes) <= sum(sizes[:2])


def test_weights_are_used_in_turn_only(llama_folder):
    offloaded = stream(llama_folder, everything_on_disk)
    with pytest.raises(RuntimeError, match="meta"):
        offloaded.meta.model(torch.tensor([[1, 2]]))
    offloaded.close()


def test_scattered_and_half_precision_checkpoints_are_converted_once(
    llama_folder, tmp_path, make_sequences, run_engine
):
    folder = tmp_path / "scattered"
    shutil.copytree(llama_folder, folder)
    weights = load_file(folder / "model.safetensors")
    # In half precision, so that the model's dtype is another one than that of the file.
    save_file({n: w.to(torch.float16) for n, w in weights.items()}, folder / "model.safetensors")
    expected = run_engine(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), make_sequences(LENGTHS)
    )
    copies = tmp_path / "kept"
    for _ in range(2):
        offloaded = stream(folder, everything_on_disk, copies)
        output = run_engine(
            offloaded.meta.model, make_sequences(LENGTHS), scheduler=offloaded.scheduler
        )
        offloaded.close()
        assert output == expected
        assert len(list(copies.iterdir())) == 1


def converted_texts(folder, dtype, make_sequences, run_engine, copies):
    """Return the texts of a checkpoint in a dtype, equal when streamed and when loaded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected = run_engine(model, make_sequences(LENGTHS))
    for placement in (everything_on_disk, mixed):
        offloaded = stream(folder, placement, copies, dtype)
        model = offloaded.meta.model
        output = run_engine(model, make_sequences(LENGTHS), scheduler=offloaded.scheduler)
        offloaded.close()
        assert output == expected
    return expected


DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("stored", "run"), DTYPES, ids=["to fp32", "to bf16"])
def test_streaming_in_another_dtype(
    make_llama, tmp_path, make_sequences, run_engine, tied, stored, run
):
    make_llama(tie_word_embeddings=tied).to(stored).save_pretrained(tmp_path)
    converted_texts(tmp_path, run, make_sequences, run_engine, tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) is not tied


@pytest.mark.slow
def test_buffers_of_the_checkpoint_are_converted_too(tmp_path, make_sequences, run_engine):
    (family,) = [candidate for candidate in FAMILIES if candidate.name == "Apertus"]
    save_family(family, tmp_path)
    texts = []
    for factor in (1, 20):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for name, buffer in model.named_buffers():
            if name.endswith("act_fn.beta"):
                buffer *= factor
        folder = tmp_path / str(factor)
        model.save_pretrained(folder)
        texts.append(
            converted_texts(folder, torch.float32, make_sequences, run_engine, folder / "kept")
        )
    assert texts[0] != texts[1]


def test_nothing_is_left_in_the_model_after_it_was_converted(make_llama, tmp_path):
    make_llama(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path)
    meta = make_meta_model(AutoConfig.from_pretrained(tmp_path), torch.float32, str(tmp_path))
    convert(meta, CheckpointFiles.in_folder(tmp_path), tmp_path / "new")
    assert {p.device.type for p in meta.model.parameters()} == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize("run", [torch.float64, torch.bfloat16], ids=["as it is", "converted"])
def test_tied_weights_that_are_stored_as_the_heads(
    make_llama, tmp_path, make_sequences, run_engine, run
):
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    converted_texts(tmp_path, run, make_sequences, run_engine, tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("run", [torch.float64, torch.bfloat16], ids=["as it is", "converted"])
def test_a_head_that_is_stored_apart_although_the_config_ties_it(
    make_llama, tmp_path, make_sequences, run_engine, run
):
    texts = []
    for same in (True, False):
        folder = tmp_path / str(same)
        make_llama(tie_word_embeddings=True).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        table = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = table.clone() if same else table.flip(0).contiguous()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        copies = folder / "kept"
        texts.append(converted_texts(folder, run, make_sequences, run_engine, copies))
    assert texts[0] != texts[1]


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_is_stored_twice_is_held_once(make_llama, tmp_path, same):
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    head[-1, -1] += not same
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    streamed = stream(tmp_path, mixed)
    assert streamed.meta.is_tied is same
    streamed.close()


@pytest.mark.slow
def test_other_weights_of_the_same_size_are_converted_again(
    make_llama, tmp_path, make_sequences, run_engine
):
    texts, copies = [], tmp_path / "kept"
    make_llama(seed=2).save_pretrained(tmp_path / "other" / tmp_path.name)
    stream(tmp_path / "other" / tmp_path.name, everything_on_disk, copies, torch.bfloat16).close()
    (other,) = copies.iterdir()
    for seed in (0, 1):
        make_llama(seed=seed).save_pretrained(tmp_path)
        texts.append(converted_texts(tmp_path, torch.bfloat16, make_sequences, run_engine, copies))
        # The copy of what the checkpoint held before is gone; that of another one is not.
        assert len([path for path in copies.iterdir() if path.name != other.name]) == 1
    assert texts[0] != texts[1]
    assert other.exists()


def test_folders_of_a_killed_process_are_deleted(llama_folder, tmp_path):
    files = CheckpointFiles.in_folder(llama_folder)
    config = AutoConfig.from_pretrained(llama_folder)
    meta = make_meta_model(config, torch.bfloat16, str(llama_folder))
    stale, fresh = tmp_path / ".rewriting-a", tmp_path / ".rewriting-b"
    for folder in (stale, fresh):
        folder.mkdir()
    os.utime(stale, (0, 0))
    convert(meta, files, tmp_path / "copy")
    assert sorted(tmp_path.iterdir()) == [fresh, tmp_path / "copy"]
    assert map_weights(meta, CheckpointFiles.in_folder(tmp_path / "copy"))


def test_another_process_was_first(llama_folder, tmp_path):
    files = CheckpointFiles.in_folder(llama_folder)
    config = AutoConfig.from_pretrained(llama_folder)
    meta = make_meta_model(config, torch.bfloat16, str(llama_folder))
    first = tmp_path / "copy" / "first"
    first.parent.mkdir()
    first.write_bytes(b"the first one's")
    convert(meta, files, first.parent)
    assert [*tmp_path.rglob("*")] == [first.parent, first]


def test_a_disk_without_room_is_seen_before_anything_is_written(
    llama_folder, tmp_path, monkeypatch
):
    files = CheckpointFiles.in_folder(llama_folder)
    meta = make_meta_model(
        AutoConfig.from_pretrained(llama_folder), torch.bfloat16, str(llama_folder)
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match="No space left on device.*give XDG_CACHE_HOME another"):
        convert(meta, files, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_damaged_copy_is_not_blamed_on_the_model(make_llama, tmp_path):
    make_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    copies = tmp_path / "kept"
    stream(tmp_path, everything_on_disk, copies).close()
    (path,) = copies.iterdir()
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 9)
    with pytest.raises(ValueError, match=f"'{path}', a copy of the weights.*delete it"):
        stream(tmp_path, everything_on_disk, copies)


def test_a_failed_conversion_is_not_blamed_on_the_model(make_llama, tmp_path, monkeypatch):
    make_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    load = checkpoint.convert_and_load_state_dict_in_model

    def fail(model, tensors, config):
        info, other_info = load(model, {}, config)
        info.missing_keys.clear()
        return info, other_info

    monkeypatch.setattr(checkpoint, "convert_and_load_state_dict_in_model", fail)
    with pytest.raises(ValueError, match="is in the weights, but.*give --weights device"):
        stream(tmp_path, everything_on_disk)


@pytest.mark.parametrize("change", ["cut off", "overwritten"])
def test_a_file_that_changes_while_it_is_read(
    llama_folder, tmp_path, make_sequences, run_engine, change
):
    folder = tmp_path / "changing"
    shutil.copytree(llama_folder, folder)
    offloaded = stream(folder, everything_on_disk)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    with path.open("r+b") as file:
        if change == "cut off":
            file.truncate(len(data) // 2)
        else:  # other bytes, as many as before
            file.seek(len(data) // 2)
            file.write(bytes(len(data) - len(data) // 2))
    with pytest.raises(ValueError, match="has changed while the model ran from it"):
        run_engine(offloaded.meta.model, make_sequences((9,), 20), scheduler=offloaded.scheduler)
    offloaded.close()


def shard(folder, target):
    """Saves a model in several files."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(target, max_shard_size="100KB")
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 2
    return shards


def test_shards_are_one_checkpoint(llama_folder, tmp_path, make_sequences, run_engine):
    shard(llama_folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    expected = run_engine(model, make_sequences(LENGTHS))
    offloaded = stream(tmp_path, everything_on_disk)
    model = offloaded.meta.model
    assert run_engine(model, make_sequences(LENGTHS), scheduler=offloaded.scheduler) == expected
    offloaded.close()


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("kind", ["cut off", "gone", "the index"])
def test_a_damaged_shard_is_named(llama_folder, tmp_path, kind, number):
    path = shard(llama_folder, tmp_path)[number]
    if kind == "gone":
        path.unlink()
        words = f"{path.name}' cannot be read .No such file"
    elif kind == "cut off":
        path.write_bytes(path.read_bytes()[:-7])
        words = f"{path.name}' is damaged or cut off .*not fully covered"
    else:
        (tmp_path / "model.safetensors.index.json").write_text("{")
        words = "index.json' is damaged"
    with pytest.raises(ValueError, match=f"{words}.*get the model again"):
        stream(tmp_path, everything_on_disk)


def damage(folder, kind):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    if kind == "cut off":
        path.write_bytes(data[:-100])
    elif kind == "no header":
        path.write_bytes(data[:5])
    elif kind == "noise":
        path.write_bytes(b"\xff" * len(data))
    elif kind == "gone":
        path.unlink()
    else:
        weights = load_file(path)
        weights.pop("model.layers.2.mlp.up_proj.weight")
        save_file(weights, path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cut off", "is damaged or cut off .*not fully covered"),
        ("no header", "is damaged or cut off .*header too small"),
        ("noise", "is damaged or cut off .*header too large"),
        ("gone", "has no weights in safetensors files"),
        ("incomplete", "incomplete: 1 parameters.*layers.2.mlp.up_proj"),
    ],
)
def test_damaged_checkpoints(llama_folder, tmp_path, kind, words):
    folder = tmp_path / "damaged"
    shutil.copytree(llama_folder, folder)
    damage(folder, kind)
    with pytest.raises(ValueError, match=words):
        stream(folder, everything_on_disk)
