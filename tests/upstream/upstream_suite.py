"""Runs transformers' own model tests, and what its generation tests hold, against H2OCache.

`make test-upstream`; families may be named. The tests of models are `tests/test_modeling_common.py`
of the sdist of the installed transformers, which pip downloads and which is never built. Its
generation tests are not in the sdist; `GenerationFacts` states what they check. Every test runs
twice: as transformers ships (its default attention, DynamicCache), and with attention "h2o" and, in
place of every DynamicCache, an H2OCache that evicts nothing. A test applies if it passes as shipped
and, with H2O, attends at all.
"""

import copy
import multiprocessing
import sys
import tarfile
import types
import unittest
import unittest.mock
from functools import partialmethod
from pathlib import Path
from subprocess import run

import torch
import transformers
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)

import h2okv
from h2okv.integration.attention import h2o_attention
from h2okv.records import unknown_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "upstream" / transformers.__version__
sys.path.insert(0, str(ROOT / "tests" / "families"))
import family_table  # noqa: E402

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral")
FAMILIES += ("gpt_neox", "opt", "phi3", "mixtral", "gpt2")
BY_DESIGN = {
    "cache_shapes": "a layer's keys are its slots, not one entry a token",
    "right_padding": "outputs at padding are not full attention's, and generate goes on from one",
    "can_set_attention_dynamically": 'asks for the name "sdpa", where this suite puts "h2o"',
    "sdpa_can_dispatch_non_composite_models": 'asks for the name "sdpa" too',
    "bc_cache_name_forward": "leaves out whatever is not a DynamicCache",
}
LENGTH, NEW, TOLERANCE = 12, 8, {"atol": 2e-4, "rtol": 1e-4}
# What generate must give with either cache; `rows`, `pad`, `embeds` and `assistant` are ours.
SAME = {
    "greedy": {},
    "sample": {"do_sample": True},
    "sample_several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "beams_several": {"num_beams": 4, "num_return_sequences": 2},
    "beams_sample": {"num_beams": 3, "do_sample": True},
    "repetition_penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "guidance": {"guidance_scale": 1.5},
    **{f"evict_everys_of_{size}": {"prefill_chunk_size": size} for size in (2, 3, 7, 50)},
    "left_padding": {"pad": slice(0, 5)},
    "left_padding_with_beams": {"pad": slice(0, 5), "num_beams": 3},
    "right_padding": {"pad": slice(7, LENGTH)},
    "from_embeddings": {"embeds": True},
    "from_embeddings_with_beams": {"embeds": True, "num_beams": 2},
    "dynamic_cache_by_name": {"cache_implementation": "dynamic"},
    "static_cache": {"cache_implementation": "static"},
    "static_cache_from_embeddings": {"embeds": True, "cache_implementation": "static"},
    "assisted": {"rows": 1, "assistant": True},
    "early_exit": {"rows": 1, "assistant_early_exit": 1},
    "prompt_lookup": {"rows": 1, "prompt_lookup_num_tokens": 2},
}


class Recorder(unittest.TestResult):
    """Which tests passed, which of them without attention "h2o", and what the others said."""

    h2o = False
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.passed: set[str] = set()
        self.idle: set[str] = set()
        self.failed: dict[str, str] = {}

    def startTest(self, test) -> None:
        self.name = test.id().rsplit(".", 1)[1].removeprefix("test_")
        Recorder.calls = 0

    def addSuccess(self, test) -> None:
        (self.passed if Recorder.calls or not Recorder.h2o else self.idle).add(self.name)

    def addFailure(self, test, error) -> None:
        self.failed[self.name] = f"{error[0].__name__}: {error[1]}"[:200]

    addError = addFailure

    def addSubTest(self, test, subtest, error) -> None:
        if error is not None:
            self.addFailure(test, error)


def put_in_place() -> None:
    """H2O where transformers would take SDPA and DynamicCache, while `Recorder.h2o` is set."""
    choose = PreTrainedModel.get_correct_attn_implementation

    def chosen(self, requested, *args, **options):
        stands_in = Recorder.h2o and requested in (None, "sdpa")
        return "h2o" if stands_in else choose(self, requested, *args, **options)

    def new_cache(cls, *args, config=None, **options):
        if Recorder.h2o and config is not None and config._attn_implementation == "h2o":
            try:
                with unittest.mock.patch.object(Recorder, "h2o", False):  # it makes one itself
                    return h2okv.H2OCache(config, heavy=256, recent=256)
            except ValueError as error:  # a test made every layer a sliding window
                assert "no full-attention layer" in str(error)
        return object.__new__(cls)

    def attention(*args, **options):
        Recorder.calls += 1
        return h2o_attention(*args, **options)

    AttentionInterface.register("h2o", attention)
    PreTrainedModel.get_correct_attn_implementation = chosen
    DynamicCache.__new__ = staticmethod(new_cache)


class Tester:
    """What test_modeling_common asks of a family: a tiny config and a batch."""

    batch_size, seq_length, is_training = 2, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, pad_token_id = 32, 2, 4, 0

    def __init__(self, family: str) -> None:
        entry = next(
            candidate for candidate in family_table.FAMILIES if candidate.model_type == family
        )
        self.options = family_table.config_options(entry, entry.kv_heads and entry.kv_heads[-1])
        self.family = family

    def get_config(self):
        return AutoConfig.for_model(self.family, **self.options)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, family_table.VOCABULARY, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class GenerationFacts:
    """What transformers' generation tests hold, compared with the full cache."""

    def setUp(self):
        self.ids = torch.randint(
            3, family_table.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)
        )
        self.model = self.make(Recorder.h2o)

    def make(self, h2o: bool, dtype: torch.dtype = torch.float32):
        """Make the same weights with H2O or, as the reference, with the family's own attention."""
        config = self.model_tester.get_config()
        capped = getattr(config, "attn_logit_softcapping", None)  # which SDPA leaves out
        torch.manual_seed(0)
        with unittest.mock.patch.object(Recorder, "h2o", h2o):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            model.set_attn_implementation("eager" if capped and not h2o else "sdpa")
        return model

    def generate(self, model, ids, new=NEW, pad=None, embeds=False, assistant=False, **options):
        h2o = model.config._attn_implementation == "h2o"
        mask = None if ids is None else torch.ones_like(ids)
        if pad is not None:
            ids, mask = ids.clone(), mask.clone()
            ids[0, pad] = mask[0, pad] = 0
        if embeds:
            ids, options["inputs_embeds"] = None, model.get_input_embeddings()(ids).detach()
        if assistant:
            options["assistant_model"] = self.make(False)
        torch.manual_seed(3)
        with unittest.mock.patch.object(Recorder, "h2o", h2o):
            return model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                **{"do_sample": False, "disable_compile": True, **options},
                output_scores=True,
                return_dict_in_generate=True,
            )

    def same(self, rows=2, **options):
        outputs = [
            self.generate(model, self.ids[:rows], **options)
            for model in (self.model, self.make(False))
        ]
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        for scores, expected in zip(outputs[0].scores, outputs[1].scores, strict=True):
            torch.testing.assert_close(scores, expected, **TOLERANCE)

    def goes_on(self, first, start):
        """Generate twice from a cache, and from its copy, the rest of the same text."""
        expected = self.generate(self.model, self.ids).sequences
        ids = torch.cat([start, first.sequences], 1)
        assert torch.equal(ids, expected[:, : LENGTH + 3])
        for cache in (copy.deepcopy(first.past_key_values), first.past_key_values):
            more = self.generate(self.model, ids, NEW - 3, past_key_values=cache)
            assert torch.equal(more.sequences, expected)

    def test_goes_on_with_a_cache(self):
        self.goes_on(self.generate(self.model, self.ids, 3), self.ids[:, :0])

    def test_goes_on_from_embeddings(self):
        self.goes_on(self.generate(self.model, self.ids, 3, embeds=True), self.ids)

    def test_padded_row_is_what_it_is_alone(self):
        batch = self.generate(self.model, self.ids, pad=slice(0, 5)).sequences
        alone = self.generate(self.model, self.ids[:1, 5:]).sequences
        assert torch.equal(batch[0, 5:], alone[0])

    def test_cache_shapes(self):
        layers = self.generate(self.model, self.ids).past_key_values.layers
        assert layers[-1].keys.shape[2] == LENGTH + NEW - 1

    @torch.no_grad()
    def test_logits_to_keep(self):
        last = self.model(self.ids, logits_to_keep=1).logits
        torch.testing.assert_close(last, self.model(self.ids).logits[:, -1:], **TOLERANCE)

    @torch.no_grad()
    def equals_eager(self, dtype: torch.dtype, atol: float):
        eager = self.make(False, dtype)
        eager.set_attn_implementation("eager")
        expected = eager(self.ids).logits.float()
        logits = self.make(Recorder.h2o, dtype)(self.ids).logits.float()
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=atol * float(expected.abs().max())
        )

    test_equals_eager_fp32 = partialmethod(equals_eager, torch.float32, 1e-5)
    test_equals_eager_fp16 = partialmethod(equals_eager, torch.float16, 1e-2)
    test_equals_eager_bf16 = partialmethod(equals_eager, torch.bfloat16, 8e-2)


for _name, _options in SAME.items():
    setattr(GenerationFacts, f"test_{_name}", partialmethod(GenerationFacts.same, **_options))


def upstream_mixin() -> type:
    """`ModelTesterMixin` of the sdist, which pip downloads the first time."""
    if not (FOLDER / "tests").is_dir():
        name = f"transformers=={transformers.__version__}"
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(FOLDER)]
        run([sys.executable, "-m", "pip", "download", "-q", *options, name], check=True)
        with tarfile.open(next(FOLDER.glob("*.tar.gz"))) as archive:
            top = archive.getnames()[0].split("/")[0]
            members = [
                member for member in archive.getmembers() if member.name.startswith(f"{top}/tests/")
            ]
            archive.extractall(FOLDER, members, filter="data")
        (FOLDER / top / "tests").rename(FOLDER / "tests")
    package = sys.modules["upstream"] = types.ModuleType("upstream")
    package.__path__ = [str(FOLDER / "tests")]
    # It imports two mixins from what the sdist has not.
    for folder, file, mixin in (
        ("exporters", "test_export", "ExportTesterMixin"),
        ("generation", "test_utils", "GenerationTesterMixin"),
    ):
        sys.modules[f"upstream.{folder}"] = types.ModuleType(folder)
        missing = sys.modules[f"upstream.{folder}.{file}"] = types.ModuleType(file)
        setattr(missing, mixin, type(mixin, (), {}))
    from upstream.test_modeling_common import ModelTesterMixin

    return ModelTesterMixin


def row_of(family: str, only: str = "") -> tuple[str, list[str]]:
    """Return a family's line of the table, and what failed without a reason."""
    put_in_place()
    torch.set_num_threads(1)
    config = Tester(family).get_config()
    kinds = [kind._model_mapping[type(config)] for kind in (AutoModel, AutoModelForCausalLM)]
    members = {"all_model_classes": tuple(kinds), "model_tester": Tester(family)}
    case = type(family, (GenerationFacts, upstream_mixin(), unittest.TestCase), members)
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if only in name]
    recorders = []
    for Recorder.h2o in (False, True):
        recorders.append(Recorder())
        unittest.TestSuite(map(case, names)).run(recorders[-1])
    Recorder.h2o = False
    passed = recorders[1].passed
    applicable = recorders[0].passed - recorders[1].idle
    facts = {name.removeprefix("test_") for name in dir(GenerationFacts)}
    cells = [
        f"{len(tests & passed)} / {len(tests)}"
        for tests in (applicable - facts, applicable & facts)
    ]
    failed = applicable - passed
    marks = [str(number) for number, name in enumerate(BY_DESIGN, 1) if name in failed]
    failures = [
        f"{family} {name}: {recorders[1].failed.get(name, 'skipped')}"
        for name in sorted(failed - BY_DESIGN.keys())
    ]
    if not applicable:
        failures.append(f"{family}: not a single test applies")
    return f"| {family} | {' | '.join(cells)} | {', '.join(marks) or '-'} |", failures


def main(families: list[str]) -> int:
    """Prints the table; returns 1 if a test fails that is not expected to, 2 for wrong names."""
    names = [entry.model_type for entry in family_table.FAMILIES]
    for family in families:
        if family not in names:
            print(unknown_name("family", family, names), file=sys.stderr)
            return 2
    upstream_mixin()
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        results = pool.map(row_of, families, chunksize=1)
    print("| family | tests of models | generation | not passed |\n|---|---|---|---|")
    print("\n".join(row for row, _ in results), end="\n\n")
    for number, (name, why) in enumerate(BY_DESIGN.items(), 1):
        print(f"{number}. `{name}`: {why}.")
    unknown = [line for _, failures in results for line in failures]
    print("\n".join(["", "Failed without a reason:", *unknown]) if unknown else "")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FAMILIES)))
