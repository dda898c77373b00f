"""`benchmarks/bfcl_chats.py`: calls run on a simulated class, and turns are judged by its state."""

import json
import re
import sys
from argparse import Namespace

import pytest

CLASS = """
class GorillaFileSystem:
    def __init__(self):
        self.files, self._reads = [], 0
    def _load_scenario(self, scenario, long_context=False):
        self.files = scenario["files"]
    def add(self, name, size):
        if size < 0:
            return {"error": "too small"}
        self.files.append([name, size])
        return {"added": name}
    def count(self):
        self._reads += 1
        return len(self.files)
    def erase(self):
        self.files = []
"""
KIND, FUNCTIONS = "GorillaFileSystem", {"add": ("name", "size"), "count": ()}
TRUTH = [["add('b', 2)"], ["count()"], ["add(name='c', size=3)", "add('d', 4)"], []]
CALLS = {
    "b": ("add", {"name": "b", "size": 2}), "c": ("add", {"name": "c", "size": 3}),
    "d": ("add", {"size": 4, "name": "d"}), "count": ("count", {}),
    "less": ("add", {"name": "b", "size": -2}), "odd": ("add", {"title": "b"}),
    "erase": ("erase", {}),
}  # fmt: skip


@pytest.fixture
def bfcl(import_benchmark):
    return import_benchmark("bfcl_chats")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Write a folder of data, and a class beside it as in the wheel."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "bfcl_eval" / "data"
    sources = folder.parent / "eval_checker" / "multi_turn_eval" / "func_source_code"
    for each in (sources, folder / "possible_answer", folder / "multi_turn_func_doc"):
        each.mkdir(parents=True)
    (sources / "gorilla_file_system.py").write_text(CLASS, encoding="utf-8")
    questions = [[{"role": "user", "content": text}] for text in ("One.", "Two.", "Three.", "")]
    name = "BFCL_v4_multi_turn_base.json"
    chats = [
        {"id": task, "question": questions, "involved_classes": [KIND],
         "initial_config": {KIND: {"files": [["a", 1]]}}}
        for task in ("x", "y")
    ]  # fmt: skip
    documents = [
        {"name": function, "description": "",
         "parameters": {"type": "dict", "properties": dict.fromkeys(names, {"type": "string"}),
                        "required": list(names)}}
        for function, names in FUNCTIONS.items()
    ]  # fmt: skip
    for path, lines in (
        (name, chats),
        (f"possible_answer/{name}", [{"id": c["id"], "ground_truth": TRUTH} for c in chats]),
        ("multi_turn_func_doc/gorilla_file_system.json", documents),
    ):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / path).write_text(text, encoding="utf-8")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


def scripted(bfcl, *turns):
    """Return a model that makes calls by name, one list for each answer of a turn."""

    def write(conversations):
        answers = []
        for conversation in conversations:
            roles = [message["role"] for message in conversation.messages]
            number, since = roles.count("user") - 1, roles[::-1].index("user")
            step = roles[len(roles) - since :].count("assistant")
            script = turns[number] if number < len(turns) else []
            if script is None:
                answers.append(None)
                continue
            calls = [CALLS[name] for name in (script[step] if step < len(script) else ())]
            text = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
            answers.append(bfcl.Answer("".join(f"<tool_call>{each}</tool_call>" for each in text)))
        return answers

    return write


def play(bfcl, data, write, steps=3):
    """Return the first chat after its turns."""
    chats = [bfcl.Chat(*source, data) for source in bfcl.read_chats(data, [KIND], 2)]
    bfcl.converse(chats, write, steps)
    assert chats[0].turns == chats[1].turns
    return chats[0]


@pytest.mark.parametrize(
    ("turns", "states", "right"),
    [
        ([[["b"]], [["count"]], [["c"], ["d"]]], "1111", "1111"),
        # The results of true calls may have come in an earlier turn, in any order.
        ([[["b", "count"]], [["count"]], [["c", "d"]]], "1111", "1111"),
        ([[["b"], ["count"]], [], [["c", "d"]]], "1111", "1011"),  # nothing called in a turn
        # Failed calls change nothing; an error lasts.
        ([[["odd"], ["less"], ["b"]], [["count"]], []], "1100", "1100"),
        ([[["b", "b"]], [["count"]], [["c"], ["d"]]], "0000", "0000"),
        ([[["b"]], [["count"]], [["d"], ["c"]]], "1100", "1100"),
        # A function that is not among the tools does not run.
        ([[["erase"], ["b"]], [["count"]], [["c", "d"]]], "1111", "1111"),
        ([], "0000", "0000"),
        ([[["b"]], None, [["c", "d"]]], "1100", "1000"),  # no answers any more
    ],
)
def test_a_turn_is_judged_by_the_state_and_the_results(bfcl, data, turns, states, right):
    chat = play(bfcl, data, scripted(bfcl, *turns))
    assert "".join(str(int(turn["state"])) for turn in chat.turns) == states
    assert "".join(str(int(turn["right"])) for turn in chat.turns) == right


def test_results_come_back_until_an_answer_has_no_call(bfcl, data):
    chat = play(bfcl, data, scripted(bfcl, [["less", "b"], ["odd"]], [["count"]] * 5), steps=3)
    roles = [message["role"][0] for message in chat.messages]
    assert "".join(roles) == "uattata" + "uatatat" + "ua" + "ua"
    results = [message["content"] for message in chat.messages if message["role"] == "tool"]
    assert results[:2] == ['{"error": "too small"}', '{"added": "b"}']
    assert re.match("Error: .*title", results[2]) and results[3:] == ["2"] * 3
    assert [turn["failed"] for turn in chat.turns] == [2, 0, 0, 0]
    assert [len(turn["answers"]) for turn in chat.turns] == [3, 3, 1, 1]
    assert chat.turns[0]["calls"][1] == ["add", {"name": "b", "size": 2}]


def test_rows_compare_calls_with_the_full_caches(bfcl, data):
    scripts = {
        ("full", 1.0): [[["b"]], [["count"]], [["c"], ["d"]]],
        ("best", 0.5): [[["b"]], [["count", "count"]], [["d"], ["c"]]],
    }
    completed = {}
    for cache, turns in scripts.items():
        chats = [bfcl.Chat(*source, data) for source in bfcl.read_chats(data, [KIND], 2)]
        # The second chat goes as with the full cache.
        for chat, script in zip(chats, (turns, scripts["full", 1.0]), strict=True):
            bfcl.converse([chat], scripted(bfcl, *script), 3)
        completed[cache] = {
            chat.task: {"turns": chat.turns, "entries": 7, "is_over": False} for chat in chats
        }
    full, best = (bfcl.row_of(*cache, ["x", "y"], completed) for cache in scripts)
    assert (full["turns"], full["state"], full["right"], full["chats_right"]) == (8, 8, 8, 2)
    assert (full["same_calls"], full["unchanged"], full["first_difference"]) == ("1.0000", 2, "")
    # Of x, 2 of 5 calls are the same, and 4 functions; of y, 4 of 4.
    assert (best["same_calls"], best["same_functions"]) == ("0.6667", "0.8889")
    assert (full["same_functions"], full["same_functions_stderr"]) == ("1.0000", "0.0000")
    assert best["unchanged"] == 1
    assert best["first_difference"] == "2.00"
    assert (best["state"], best["right"], best["chats_right"], best["entries"]) == (6, 6, 1, 7)
    # Changes of -2 and 0 in 4 turns each: the standard error of the mean of -0.5 and 0.
    assert (best["right_minus_full"], best["right_minus_full_stderr"]) == ("-0.2500", "0.2500")


def test_every_cache_goes_through_the_chats_and_a_finished_one_is_read(
    bfcl, data, tmp_path, monkeypatch
):
    written = []

    def answer(args, tested, name, share, chats):
        written.append((name, share))
        bfcl.converse(chats, scripted(bfcl, [["b"]]), args.steps)
        return [
            {"task": chat.task, "cache": name, "fraction": share, "entries": 7,
             "is_over": False, "turns": chat.turns}
            for chat in chats
        ]  # fmt: skip

    monkeypatch.setattr(bfcl, "play", answer)
    args = Namespace(
        model="m", dtype="bfloat16", every=256, turns=2, steps=2, longest=64, kinds=[KIND],
        chats=2, data=data, out=tmp_path / "out.jsonl", rules=["best"], fractions=[0.5],
    )  # fmt: skip
    rows = bfcl.evaluate(args, Namespace(name="m"))
    assert [row["cache"] for row in rows] == ["full", "best", "no calls"]
    assert [(row["turns"], row["state"], row["right"]) for row in rows] == [
        (4, 4, 2), (4, 4, 2), (4, 0, 0),
    ]  # fmt: skip
    args.fractions = [0.5, 0.25]
    assert bfcl.evaluate(args, Namespace(name="m"))[:2] == rows[:2]
    assert written == [("full", 1.0), ("best", 0.5), ("best", 0.25)]
    for name, value, message in (
        ("steps", 0, "--steps must be at least 1, got 0"),
        ("chats", 3, f"--chats must be 1 to 2 for {KIND}, got 3"),
        ("fractions", [2], "--fractions must be above 0 and at most 1"),
        ("steps", 3, "steps"),  # a file of other settings
    ):
        with pytest.raises(ValueError, match=message):
            bfcl.evaluate(Namespace(**vars(args) | {name: value}), Namespace(name="m"))


def test_data_without_its_classes_are_refused(bfcl, data):
    path = data.parent / "eval_checker/multi_turn_eval/func_source_code/gorilla_file_system.py"
    path.write_text("import a_module_that_is_nowhere", encoding="utf-8")
    with pytest.raises(ValueError, match="need 'a_module_that_is_nowhere'; pip install"):
        bfcl.read_class(KIND, data)
    path.unlink()
    args = Namespace(
        turns=2, steps=2, every=256, kinds=[KIND], chats=2, data=data, out=data / "out.jsonl",
        fractions=[0.5],
    )  # fmt: skip
    with pytest.raises(ValueError, match="--data must be bfcl_eval/data of the unpacked wheel"):
        bfcl.evaluate(args, Namespace(name="m"))
    assert not args.out.exists()


def test_chats_continue_from_states_and_end_before_they_outgrow_the_longest(
    bfcl, data, import_benchmark, monkeypatch
):
    monkeypatch.setattr(bfcl, "ROOM", 16)
    tested = import_benchmark("quality").under_test("bundled")

    def turns(name, longest):
        args = Namespace(every=16, steps=2, longest=longest)
        chats = [bfcl.Chat(*source, data, 2) for source in bfcl.read_chats(data, [KIND], 2)]
        return bfcl.play(args, tested, name, 0.1, chats)

    full, tenth = turns("full", 512), turns("h2o", 512)
    [[first, reused]], [[second, more]] = (turn["answers"] for turn in full[0]["turns"])
    assert first - 32 <= reused < first < second and reused < more < second
    assert [row["entries"] for row in (*full, *tenth)] == [512] * 2 + [round(first / 10)] * 2
    assert not any(row["is_over"] for row in (*full, *tenth))
    assert full[0]["messages"] != tenth[0]["messages"]
    short = turns("full", second + bfcl.ROOM - 1)
    assert all(row["is_over"] for row in short)
    assert [turn["answers"] for turn in short[0]["turns"]] == [[[first, reused]], []]
    with pytest.raises(ValueError, match=f"--longest must be at least {first + bfcl.ROOM}, got 9"):
        turns("full", 9)
