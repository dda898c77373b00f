"""A rule of a paper that is not in the package, in one class: what an extension needs."""

import subprocess
import sys

import pytest
import torch
from oracle import cache_of
from transformers import Gemma2Config, Gemma2ForCausalLM

import h2okv
from h2okv.policy import Inputs
from h2okv_lab.masking import ValueExtremes


class SmallKeys(h2okv.Rule):
    """Keeps the keys with the smallest L2 norm (arXiv 2406.11430, section 3)."""

    name = "small_keys"
    inputs = Inputs.KEYS

    def key_priority(self, keys, positions):
        return -keys.float().norm(dim=-1)


class Largest(h2okv.Rule):
    """Scores an entry by the largest probability that a query gives it, heads added up."""

    name = "largest"
    inputs = Inputs.QUERIES

    def score_block(self, block):
        return block.probabilities().amax(dim=-2).sum(dim=2)


RULES = [SmallKeys(), Largest(), ValueExtremes()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("chunk", [None, 7])
def test_dropping_equals_masking(make_llama, kept_sets, rule, chunk):
    model = make_llama()
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12}
    tokens, caches = [], []
    for masks in (False, True):
        cache = cache_of(model.config, 6, 4, policy=rule, evict_every=chunk, masks=masks)
        tokens.append(model.generate(ids, past_key_values=cache, do_sample=False, **options))
        caches.append(cache)
    assert torch.equal(*tokens)
    assert kept_sets(caches[0]) == kept_sets(caches[1])
    caches[0].check_integrity()


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_a_block_without_padding_has_the_probabilities_of_the_sums(make_llama, softcap):
    """`BlockView.probabilities` against the sums that the cache makes by tiles."""

    class Sums(h2okv.Rule):
        name = "sums"
        inputs = Inputs.QUERIES

        def score_block(self, block):
            return block.probabilities().sum(dim=(2, 3))

    model = make_llama()
    if softcap is not None:
        torch.manual_seed(3)
        config = Gemma2Config(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=97, head_dim=16, query_pre_attn_scalar=1,
            attn_logit_softcapping=softcap, attn_implementation="h2o", initializer_range=0.3,
        )  # fmt: skip
        model = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(2, 97, (1, 30), generator=torch.Generator().manual_seed(9))
    caches = [cache_of(model.config, 6, 4, policy=policy) for policy in ("h2o", Sums())]
    for cache in caches:
        h2okv.prefill(model, ids, cache)
    torch.testing.assert_close(caches[0].scores(1), caches[1].scores(1))


def test_a_command_takes_a_rule_by_module_and_class(tmp_path):
    (tmp_path / "my_rules.py").write_text(
        "import h2okv\n\n\nclass Oldest(h2okv.Rule):\n    name = 'oldest'\n\n"
        "    def priority(self, scores, positions, newest, layer_idx):\n"
        "        return -positions.float()\n",
        encoding="utf-8",
    )
    words = ["generate", "--model", "bundled", "--raw", "--budget", "16", "--max-new-tokens", "4"]
    words += ["Once upon a time there was", "--policy"]
    both = f"from h2okv.cli.app import run; words = {words}; run([*words, 'my_rules:Newest'])"
    both += "; raise SystemExit(run([*words, 'my_rules:Oldest']))"
    done = subprocess.run(
        [sys.executable, "-c", both], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    refused, *others = done.stderr.splitlines()
    assert refused.startswith("h2okv: ") and "my_rules:Oldest" in refused
    assert done.returncode == 0 and others, done.stderr
