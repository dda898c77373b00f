"""Tensor parallelism on two processes gives the tokens of a single process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, OPTConfig

from h2okv.engine.model_runner import check_divides

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("tensor_parallel_worker.py")


def torchrun(request):
    torch_run = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, "-m", *torch_run, str(SCRIPT), json.dumps(request)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_two_ranks_equal_one_rank(
    make_llama, make_prompts, alone, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = make_llama(sharpness=3.0)
    model.resize_token_embeddings(98)  # which two ranks can divide
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts, settings = make_prompts([40, 3, 25, 61]), {"heavy": 0.2, "recent": 0.2}
    settings |= {"min_tokens": 0, "max_num_seqs": 3, "max_prefill_tokens": 16}
    calls, output = [prompts, prompts[:1]], tmp_path / "result.json"
    request = {"model": str(tmp_path / "model"), "settings": settings, "calls": calls}
    done = torchrun(request | {"output": str(output)})
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(output.read_text())
    expected = [alone(model, prompt, 12) for prompt in prompts]
    assert result == {"token_ids": [expected, expected[:1]], "heads": 1, "max_num_seqs": 3}


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 3, "start 1 or 2 of them"),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=1), 2, "start a single one"),
        (OPTConfig(), 2, "'opt' has no plan for tensor parallelism"),
    ],
)
def test_models_that_cannot_be_divided_raise(monkeypatch, config, count, message):
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(ValueError, match=message):
        check_divides(config)


def test_tensor_parallelism_needs_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node N .* --tensor-parallel$"):
        check_divides(LlamaConfig())
