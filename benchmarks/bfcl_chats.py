"""BFCL's chats of several turns by cache: the model's calls run, and their results come back.

Each chat has the functions of one of BFCL's simulated classes; its first ``--turns`` turns are
played. To a user's message the model answers greedily, up to ``--steps`` times: its calls run on
the class, and their results are added as a client of `h2okv serve` adds them, until it answers
without a call. Then comes the next message of the user, whatever was done before. Beside it BFCL's
true calls run on a second object.

The cache is that of `h2okv serve`: one budget in tokens, here a fraction of the mean first prompt,
evictions at multiples of ``--every`` tokens, and states from which prompts continue. The full
cache, which runs first, has room for ``--longest`` tokens; a chat that would outgrow them gets no
further answers, with any cache. Answers are kept in a JSONL file; as all chats go on together, a
stopped run resumes at the cache that it had not finished.

After a turn the state is true if the class has the public attributes that the true calls lead to,
from the first turn on. A turn is right if the results of its true calls are also among those that
the model has seen, and it has called something (BFCL's rule; it calls a chat right if all its turns
are). Many true calls only read: the row "no calls" counts states that are true without any.

Calls are compared with the full cache's, turn by turn and in their order: function and arguments,
and the function alone. Standard errors take chats as independent, not turns.

The data is the folder ``bfcl_eval/data`` of the unpacked wheel ``bfcl-eval``. The classes beside it
are imported, and run.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import sqrt
from operator import eq
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import quality
from bfcl import CLASSES, FILES, Case, read_call, read_lines, read_tools
from humaneval import Completions, read_completions

import h2okv
from h2okv.console import Progress
from h2okv.prompts.messages import Conversation, read_conversation
from h2okv.server.tools import ToolCall, ToolCallParser
from h2okv_lab.evaluation.model import ModelUnderTest

SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
KINDS = ("GorillaFileSystem", "TradingBot", "TravelAPI", "VehicleControlAPI")
"""The classes of which BFCL has chats without another one."""
ROOM = 96  # tokens of an answer
Source = tuple[Case, Sequence[Sequence[str]]]  # a line of BFCL, and the true calls of each turn


class Answer(NamedTuple):
    """What a model writes, and what it reads for it."""

    text: str
    is_cut: bool = False
    prompt_tokens: int = 0
    reused: int = 0  # of them, those that a state had read


Write = Callable[[Sequence[Conversation]], list[Answer | None]]


def read_class(name: str, data: Path) -> type:
    """Import a simulated class from the package that holds the folder of the data."""
    path = data.resolve().parents[1].joinpath(*SOURCES.split("."), f"{CLASSES[name]}.py")
    if not path.is_file():
        raise ValueError(
            f"--data must be bfcl_eval/data of the unpacked wheel bfcl-eval, whose classes are"
            f" beside it; '{path}' is not there"
        )
    sys.path.insert(0, str(data.resolve().parents[1]))
    try:
        simulated: type = getattr(importlib.import_module(f"{SOURCES}.{CLASSES[name]}"), name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the classes of --data need '{error.name}'; pip install {error.name}"
        ) from error
    finally:
        sys.path.remove(str(data.resolve().parents[1]))
    return simulated


class Simulation:
    """An object of a simulated class, in a chat's first state.

    Args:
        kind: the class.
        scenario: what its first state differs in.
        names: functions that may be called.
    """

    def __init__(self, kind: type, scenario: Any, names: Sequence[str]) -> None:
        self._object: Any = kind()
        self._object._load_scenario(copy.deepcopy(scenario))
        self._names = names

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a function; return its result as text, and whether it failed."""
        if name not in self._names:
            return f"Error: there is no function {name}", True
        try:
            result = getattr(self._object, name)(**arguments)
        except Exception as error:  # of a model's arguments
            return f"Error: {error}", True
        failed = isinstance(result, dict) and "error" in result
        if isinstance(result, dict):
            return json.dumps(result, default=str), failed
        return result if isinstance(result, str) else str(result), failed

    @property
    def state(self) -> dict[str, Any]:
        """Its public attributes."""
        return {key: value for key, value in vars(self._object).items() if key[0] != "_"}


class Chat:
    """One chat: its messages so far, and what its turns were."""

    def __init__(
        self, line: Case, truth: Sequence[Sequence[str]], data: Path, turns: int | None = None
    ) -> None:
        self.task = line["id"]
        [self.kind] = line["involved_classes"]
        self.questions: list[list[Case]] = line["question"][:turns]
        functions, self.tools = read_tools(self.kind, data)
        names = [function["name"] for function in functions]
        optional = [f["name"] for f in functions if not f["parameters"].get("required")]
        self._parser = {"names": names, "no_arguments": optional}
        self.truth = [[read_call(text, functions) for text in calls] for calls in truth]
        scenario = line["initial_config"].get(self.kind, {})
        loaded = read_class(self.kind, data)
        self.actual, self.true = (Simulation(loaded, scenario, names) for _ in range(2))
        self.messages: list[Case] = []
        self.turns: list[Case] = []
        self.seen: list[str] = []  # results of the model's calls
        self.is_over = False

    def begin_turn(self) -> None:
        """Add the next messages of the user; mutates the chat."""
        self.messages += self.questions[len(self.turns)]
        self.turns.append({"calls": [], "answers": [], "failed": 0})

    def ask(self, messages: Sequence[Case]) -> Conversation:
        """Return what the server gets with messages."""
        return read_conversation({"messages": messages, "tools": self.tools})

    def add(self, answer: Answer | None) -> bool:
        """Run the calls of an answer and add their results; return whether there were any.

        Without an answer the chat is over.
        """
        if answer is None:
            self.is_over = True
            return False
        parser, turn = ToolCallParser(**self._parser), self.turns[-1]
        segments = [*parser.add(answer.text), *parser.end(answer.is_cut)]
        calls = [segment for segment in segments if isinstance(segment, ToolCall)]
        content = "".join(segment for segment in segments if isinstance(segment, str))
        message: Case = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]  # fmt: skip
        self.messages.append(message)
        turn["answers"].append([answer.prompt_tokens, answer.reused])
        for call in calls:
            arguments = json.loads(call.arguments)
            result, failed = self.actual.call(call.name, arguments)
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            self.seen.append(result)
            turn["calls"].append([call.name, arguments])
            turn["failed"] += failed
        return bool(calls)

    def end_turn(self) -> None:
        """Make the true calls, and judge the turn; mutates the chat."""
        turn, true_calls = self.turns[-1], self.truth[len(self.turns) - 1]
        results = Counter(self.true.call(*item)[0] for call in true_calls for item in call.items())
        turn["state"] = self.actual.state == self.true.state
        called = bool(turn["calls"]) or not true_calls
        turn["right"] = turn["state"] and called and results <= Counter(self.seen)


def converse(chats: Sequence[Chat], write: Write, steps: int) -> None:
    """Go through the turns of chats together; mutates them.

    Args:
        chats: at their beginnings.
        write: returns the next answers of conversations, ``None`` for one that is too long.
        steps: answers to one message of a user.
    """
    for number in range(max(len(chat.questions) for chat in chats)):
        present = [chat for chat in chats if number < len(chat.questions)]
        for chat in present:
            chat.begin_turn()
        running = [chat for chat in present if not chat.is_over]
        for _ in range(steps):
            if not running:
                break
            answers = write([chat.ask(chat.messages) for chat in running])
            running = [chat for chat, each in zip(running, answers, strict=True) if chat.add(each)]
        for chat in present:
            chat.end_turn()


def read_chats(data: Path, kinds: Sequence[str], count: int) -> list[Source]:
    """Read chats of one class each, spread over those of every class, with their true calls."""
    name = f"BFCL_v4_{FILES['turns']}.json"
    truth = {
        line["id"]: line["ground_truth"] for line in read_lines(data / "possible_answer" / name)
    }
    lines, chats = read_lines(data / name), []
    for kind in kinds:
        group = [line for line in lines if line["involved_classes"] == [kind]]
        if not 0 < count <= len(group):
            raise ValueError(f"--chats must be 1 to {len(group)} for {kind}, got {count}")
        for number in range(count):
            line = group[number * len(group) // count]
            chats.append((line, truth[line["id"]]))
    return chats


def writer(llm: h2okv.LLM, longest: int) -> Write:
    """Return a function that lets a model write the next answers."""
    params = h2okv.SamplingParams(max_tokens=ROOM, temperature=0.0)

    def write(conversations: Sequence[Conversation]) -> list[Answer | None]:
        prompts = [llm.engine.encode(conversation) for conversation in conversations]
        fits = [len(prompt.token_ids) + ROOM <= longest for prompt in prompts]
        fitting = [prompt for prompt, room in zip(prompts, fits, strict=True) if room]
        outputs = iter(llm.generate(fitting, params, kind="tools", show_progress=False))
        return [answer_of(next(outputs)) if room else None for room in fits]

    return write


def answer_of(output: h2okv.RequestOutput) -> Answer:
    """Return what a chat needs of an output."""
    read = output.prompt
    is_cut = output.completions[0].finish_reason == "length"
    return Answer(output.text, is_cut, len(read.token_ids), read.num_reused)


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Go through all chats with each cache; return the rows of the table."""
    if not all(0 < share <= 1 for share in args.fractions):
        raise ValueError(f"--fractions must be above 0 and at most 1, got {args.fractions}")
    for name in ("turns", "steps", "every"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    sources = read_chats(args.data, args.kinds, args.chats)

    def begin() -> list[Chat]:
        return [Chat(*source, args.data, args.turns) for source in sources]

    silent = begin()
    names = ("model", "dtype", "every", "turns", "steps", "longest", "kinds", "chats")
    completed = read_completions(args.out, {name: getattr(args, name) for name in names})
    caches = [("full", 1.0), *product(args.rules, args.fractions)]
    tasks = [line["id"] for line, _ in sources]
    with args.out.open("a") as file, Progress(tested.name, len(caches), "caches") as bar:
        for cache in caches:
            finished = completed.setdefault(cache, {})
            if not finished.keys() >= set(tasks):
                for row in play(args, tested, *cache, begin()):
                    print(json.dumps(row), file=file, flush=True)
                    finished[row["task"]] = row
            bar.update(1)
    converse(silent, lambda conversations: [Answer("")] * len(conversations), 1)
    completed["no calls", 0.0] = {
        chat.task: {"turns": chat.turns, "entries": 0, "is_over": False} for chat in silent
    }
    return [row_of(*cache, tasks, completed) for cache in (*caches, ("no calls", 0.0))]


def play(
    args: argparse.Namespace, tested: ModelUnderTest, name: str, share: float, chats: list[Chat]
) -> list[dict[str, Any]]:
    """Go through chats with one cache; return what the file keeps of each."""
    firsts = [len(tested.encode(chat.ask(chat.questions[0]))) for chat in chats]
    if args.longest < (least := max(firsts) + ROOM):
        raise ValueError(f"--longest must be at least {least}, got {args.longest}")
    entries = args.longest if name == "full" else round(share * mean(firsts))
    rule = "h2o" if name == "full" else name
    llm = h2okv.LLM(
        tested.model, tested.tokenizer, cache=f"{rule}:{entries},every={args.every}",
        max_num_seqs=len(chats), max_prompt_tokens=args.longest,
    )  # fmt: skip
    with llm:
        # Each leaves a state from which the first prompts of a class continue.
        for chat in {chat.kind: chat for chat in chats}.values():
            prompt = llm.engine.encode(chat.ask([{"role": "user", "content": ""}]))
            llm.generate([prompt], max_tokens=1, show_progress=False)
        converse(chats, writer(llm, args.longest), args.steps)
    return [
        {"task": chat.task, "cache": name, "fraction": share, "entries": entries,
         "is_over": chat.is_over, "turns": chat.turns, "messages": chat.messages}
        for chat in chats
    ]  # fmt: skip


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[str, str]:
    """Return a ratio of sums over chats and its standard error, blank if there are none."""
    count, total = len(numerators), sum(denominators)
    if not total:
        return "", ""
    value = sum(numerators) / total
    squares = sum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    error = f"{sqrt(count / (count - 1) * squares) / total:.4f}" if count > 1 else ""
    return f"{value:.4f}", error


def compare(turns: Sequence[Case], full: Sequence[Case]) -> list[tuple[int, int, int]]:
    """Return for each turn how many calls, and functions, are the full cache's, and of how many."""
    pairs = [(a["calls"], b["calls"]) for a, b in zip(turns, full, strict=True)]
    return [
        (sum(map(eq, *calls)), sum(a[0] == b[0] for a, b in zip(*calls, strict=False)),
         max(map(len, calls)))
        for calls in pairs
    ]  # fmt: skip


def row_of(name: str, share: float, tasks: Sequence[str], completed: Completions) -> dict[str, Any]:
    """Count over chats, and compare with the full cache's, paired by chat."""
    chats, full = ([completed[key][t] for t in tasks] for key in ((name, share), ("full", 1.0)))
    counts = [len(chat["turns"]) for chat in chats]
    turns = [turn for chat in chats for turn in chat["turns"]]
    answers = [answer for turn in turns for answer in turn["answers"]]
    compared = [compare(a["turns"], b["turns"]) for a, b in zip(chats, full, strict=True)]
    firsts = [
        at
        for each in compared
        if (at := next((n for n, (same, _, of) in enumerate(each, 1) if same < of), 0))
    ]
    read = [tokens for tokens, _ in answers] or [0]
    row: dict[str, Any] = {
        "cache": name, "kept": share, "chats": len(chats), "turns": len(turns),
        "outgrown": sum(chat["is_over"] for chat in chats), "answers": len(answers),
        "prompt_tokens": round(mean(read)), "longest_prompt": max(read),
        "entries": round(mean(read if name == "full" else [chat["entries"] for chat in chats])),
        "reused": f"{sum(reused for _, reused in answers) / max(sum(read), 1):.4f}",
        "calls": sum(len(turn["calls"]) for turn in turns),
        "failed": sum(turn["failed"] for turn in turns),
        "chats_right": sum(all(turn["right"] for turn in chat["turns"]) for chat in chats),
    }  # fmt: skip
    for field in ("state", "right"):
        sums, base = ([sum(t[field] for t in c["turns"]) for c in group] for group in (chats, full))
        changes = [a - b for a, b in zip(sums, base, strict=True)]
        row[field] = sum(sums)
        row[f"{field}_minus_full"], row[f"{field}_minus_full_stderr"] = ratio(changes, counts)
    *same, of = ([sum(each[at] for each in chat) for chat in compared] for at in range(3))
    for field, counted in zip(("same_calls", "same_functions"), same, strict=True):
        row[field], row[f"{field}_stderr"] = ratio(counted, of)
    row["unchanged"] = len(chats) - len(firsts)
    row["first_difference"] = f"{mean(firsts):.2f}" if firsts else ""
    return row


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__,
        "bfcl_chats.py --data bfcl_eval/data --model qwen2.5-coder-0.5b.gguf"
        " --out bfcl_chats.jsonl --csv bfcl_chats.csv",
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder bfcl_eval/data")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of chats")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="classes")
    parser.add_argument("--chats", type=int, default=3, help="chats of each class (3)")
    parser.add_argument("--turns", type=int, default=2, help="first turns of a chat (2)")
    parser.add_argument("--steps", type=int, default=3, help="answers in a turn (3)")
    parser.add_argument("--every", type=int, default=256, help="tokens between evictions (256)")
    parser.add_argument("--longest", type=int, default=5120, help="tokens of a chat (5120)")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--rules", nargs="+", default=["h2o", "best"], choices=("h2o", "best"))
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
