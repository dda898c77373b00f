"""BFCL (the Berkeley Function Calling Leaderboard) by cache: do calls still come out right?

Questions of the kinds simple and multiple have one or several functions and one right call. A
question of the kind long is one of simple behind a passage of a book (``--text``), so that the
functions are far back when it comes. The model answers greedily, with the full cache first. The
other caches evict as `h2okv serve` does, at multiples of ``--every`` tokens, before the question is
read, and keep a fraction of each prompt, but ``--min`` heavy and recent tokens as the commands do:
``entries`` is how many that are. "pinned" pins the functions; where they have no room in the
budget, the question is left out of that row.

A question of the kind turns is a later turn of a chat with the 10 to 20 functions of one class
(multi_turn, of 2,000 to 4,700 tokens), where one call is right. The chat before it has the true
calls: BFCL runs the model's calls on simulated classes, and here their results say only that a call
was made, so that an early error does not decide all turns after it.

A call is right if it is the only one, names the function, and gives each argument one of its
possible answers; arguments whose answers include "" may be missing. Numbers are equal by value,
texts without case, spaces and punctuation. Types are JSON's. Answers are kept in a JSONL file, so a
stopped run resumes.

The data is the folder ``bfcl_eval/data`` of the wheel ``bfcl-eval``.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import quality
import torch
from humaneval import Completions, read_completions

import h2okv
from h2okv.config import CacheConfig
from h2okv.console import Progress
from h2okv.prompts.chat_template import message_spans
from h2okv.prompts.messages import Conversation, read_conversation
from h2okv.records import naming
from h2okv.server.tools import ToolCall, ToolCallParser
from h2okv_lab.evaluation.model import ModelUnderTest

FILES = {
    "simple": "simple_python", "multiple": "multiple", "long": "simple_python",
    "turns": "multi_turn_base",
}  # fmt: skip
CLASSES = {
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
DESCRIBED = ("name", "description", "parameters")  # and not what they return
TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # to those of JSON schemas
ROOM = 96  # tokens of an answer
BATCH = 8  # questions at a time
BEGUN = "Remember this passage:\n\n{}", "I will. What shall I do now?"
Case = dict[str, Any]


def as_schema(value: Any) -> Any:
    """Return a description of parameters with the types of JSON schemas."""
    if isinstance(value, list):
        return [as_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {name: as_schema(item) for name, item in value.items()}
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = TYPES.get(kind, kind)
        if kind == "any":
            del schema["type"]
    return schema


def read_lines(path: Path) -> list[Any]:
    """Read a file of the data."""
    with naming(path, "read", "give the folder bfcl_eval/data of the wheel bfcl-eval"):
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_cases(data: Path, kind: str, count: int, passages: Sequence[str]) -> list[Case]:
    """Read questions spread over a file, with their possible answers."""
    if kind == "turns":
        return read_turns(data, count)
    name = f"BFCL_v4_{FILES[kind]}.json"
    lines = read_lines(data / name)
    if not 0 < count <= len(lines):
        raise ValueError(f"--counts must be 1 to {len(lines)} for {kind}, got {count}")
    answers = {
        line["id"]: line["ground_truth"] for line in read_lines(data / "possible_answer" / name)
    }
    cases = []
    for number in range(count):
        line = lines[number * len(lines) // count]
        messages = line["question"][0]
        if kind == "long":
            request, reply = BEGUN
            passage = {"role": "user", "content": request.format(passages[number])}
            messages = [passage, {"role": "assistant", "content": reply}, *messages]
        tools = [{"type": "function", "function": as_schema(f)} for f in line["function"]]
        chat = read_conversation({"messages": messages, "tools": tools})
        identifier = f"{kind} {line['id']}"
        cases.append({"task": identifier, "chat": chat, "answer": answers[line["id"]]})
    return cases


def read_call(text: str, functions: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Read a call that is written as in Python; return its arguments by name, by its name."""
    call: Any = ast.parse(text, mode="eval").body
    [function] = [f for f in functions if f["name"] == call.func.id]
    names = list(function["parameters"]["properties"])
    values = {name: node for name, node in zip(names, call.args, strict=False)}
    values |= {keyword.arg: keyword.value for keyword in call.keywords}
    return {call.func.id: {name: ast.literal_eval(node) for name, node in values.items()}}


def read_tools(involved: str, data: Path) -> tuple[list[Case], list[Case]]:
    """Read the functions of a class, as BFCL describes them and as tools of a chat."""
    functions = read_lines(data / "multi_turn_func_doc" / f"{CLASSES[involved]}.json")
    tools = [
        {"type": "function", "function": {name: as_schema(f[name]) for name in DESCRIBED}}
        for f in functions
    ]
    return functions, tools


def turns_of(line: Case, truth: Sequence[Sequence[str]], data: Path) -> Iterator[Case]:
    """Yield the later turns of a chat for which one call is right, with the true calls before."""
    [involved] = line["involved_classes"]
    functions, tools = read_tools(involved, data)
    messages: list[dict[str, Any]] = []
    for number, (question, calls) in enumerate(zip(line["question"], truth, strict=True)):
        messages = [*messages, *question]
        read = [read_call(text, functions) for text in calls]
        if number and len(read) == 1:
            chat = read_conversation({"messages": messages, "tools": tools})
            [(name, arguments)] = read[0].items()
            possible = {key: [value] for key, value in arguments.items()}
            task = f"turns {line['id']} {number}"
            yield {"task": task, "chat": chat, "answer": [{name: possible}]}
        for index, call in enumerate(read):
            [(name, arguments)] = call.items()
            shown = {"name": name, "arguments": json.dumps(arguments)}
            identifier = f"call_{number}_{index}"
            request = {"id": identifier, "type": "function", "function": shown}
            messages.append({"role": "assistant", "content": None, "tool_calls": [request]})
            messages.append({"role": "tool", "tool_call_id": identifier, "content": "done"})


def read_turns(data: Path, count: int) -> list[Case]:
    """Read later turns, one of each chat that has one class and such a turn."""
    name = f"BFCL_v4_{FILES['turns']}.json"
    truth = {
        line["id"]: line["ground_truth"] for line in read_lines(data / "possible_answer" / name)
    }
    cases: list[Case] = []
    for line in read_lines(data / name):
        if len(line["involved_classes"]) == 1:
            cases += list(turns_of(line, truth[line["id"]], data))[-1:]
    if not 0 < count <= len(cases):
        raise ValueError(f"--counts must be 1 to {len(cases)} for turns, got {count}")
    return [cases[number * len(cases) // count] for number in range(count)]


def read_passages(args: argparse.Namespace, tested: ModelUnderTest, count: int) -> list[str]:
    """Read passages of a book, one after the other."""
    if args.text is None:
        raise ValueError("the kind long needs a book; give --text FILE, or other --kinds")
    with naming(args.text, "read", "give the text of a book"):
        tokens = tested.encode(args.text.read_text("utf-8"), special=False)
    size = args.passage
    if len(tokens) < size * count:
        raise ValueError(f"--text has {len(tokens)} tokens, fewer than {count} passages of {size}")
    return [tested.decode(tokens[at * size : (at + 1) * size]) for at in range(count)]


def plain(text: str) -> str:
    """Return a text without case, spaces and punctuation."""
    return "".join(filter(str.isalnum, text.casefold()))


def equals(value: Any, answer: Any) -> bool:
    """Tell whether a JSON value is the one of an answer; in objects each value has several."""
    if isinstance(answer, dict):
        return isinstance(value, dict) and agrees(value, answer)
    if isinstance(answer, list):
        same = isinstance(value, list) and len(value) == len(answer)
        return same and all(map(equals, value, answer))
    if isinstance(answer, str) or answer is None:
        return isinstance(value, type(answer)) and (answer is None or plain(value) == plain(answer))
    return isinstance(value, bool) is isinstance(answer, bool) and bool(value == answer)


def agrees(arguments: Mapping[str, Any], answers: Mapping[str, Sequence[Any]]) -> bool:
    """Tell whether each argument is among its possible answers; those with "" may be missing."""
    if not arguments.keys() <= answers.keys():
        return False
    return all(
        any(equals(arguments[name], answer) for answer in possible)
        if name in arguments
        else "" in possible
        for name, possible in answers.items()
    )


def check(text: str, chat: Conversation, answer: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Return whether an answer calls the right function, and whether the call is right."""
    parser = ToolCallParser([tool["function"]["name"] for tool in chat.tools])
    segments = [*parser.add(text), *parser.end()]
    calls = [segment for segment in segments if isinstance(segment, ToolCall)]
    ((name, arguments),) = answer[0].items()
    if len(calls) != 1 or calls[0].name != name:
        return False, False
    return True, agrees(json.loads(calls[0].arguments), arguments)


def caches(args: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the caches by name and fraction, in the order in which they run."""
    pins = ["", ", pinned"] if args.pin else [""]
    evicting = product(args.rules, args.fractions, pins)
    return [("full", 1.0), *((rule + pin, share) for rule, share, pin in evicting)]


def answer(
    llm: h2okv.LLM, cases: Sequence[Case], pinned: bool, budget: int | str
) -> list[dict[str, Any]]:
    """Let the model answer questions together; return what the file keeps of each."""
    options: dict[str, Any] = {"max_tokens": ROOM, "temperature": 0.0}
    params, rows, fitting = h2okv.SamplingParams(**options), [], []
    for case in cases:
        prompt = llm.engine.encode(case["chat"])
        tools = message_spans(llm.tokenizer, case["chat"], ["tools"])
        row = {
            "task": case["task"], "prompt_tokens": len(prompt.token_ids),
            "tools_tokens": sum(stop - start for start, stop in tools), "fits": True,
        }  # fmt: skip
        rows.append(row)
        pins = tools if pinned else []
        try:
            llm.engine.request(prompt, params, lambda event: None, budget, pins=pins)
        except ValueError as error:
            if "are pinned" not in str(error):
                raise
            row["fits"] = False
            continue
        fitting.append((row, case, prompt, pins))
    prompts, all_pins = [each[2] for each in fitting], [each[3] for each in fitting]
    outputs = llm.generate(prompts, params, budget=budget, pins=all_pins, show_progress=False)
    for (row, case, *_), output in zip(fitting, outputs, strict=True):
        names, right = check(output.text, case["chat"], case["answer"])
        row |= {"names": names, "right": right, "text": output.text}
    return rows


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Answer all questions with each cache; return the rows of the table."""
    kinds: dict[str, list[Case]] = {}
    if len(args.counts) != len(args.kinds):
        raise ValueError(f"--counts must be one for each of {args.kinds}, got {args.counts}")
    if not all(0 < share <= 1 for share in args.fractions):
        raise ValueError(f"--fractions must be above 0 and at most 1, got {args.fractions}")
    for kind, count in zip(args.kinds, args.counts, strict=True):
        passages = read_passages(args, tested, count) if kind == "long" else ()
        kinds[kind] = read_cases(args.data, kind, count, passages)
    cases = [case for group in kinds.values() for case in group]
    longest = max(len(tested.encode(case["chat"])) for case in cases) + ROOM
    settings = {name: getattr(args, name) for name in ("model", "dtype", "every", "min", "passage")}
    completed = read_completions(args.out, settings)
    for rule in dict.fromkeys(("h2o", *args.rules)):
        answer_all(args, completed, cases, rule, longest)
    return [
        row_of(kind, name, share, group, completed, args.min)
        for kind, group in kinds.items()
        for name, share in caches(args)
    ]


def answer_all(
    args: argparse.Namespace, completed: Completions, cases: list[Case], rule: str, longest: int
) -> None:
    """Answer with one rule's caches; mutates `completed` and appends to the file."""
    todo = {
        (name, share): [
            case for case in cases if case["task"] not in completed.get((name, share), {})
        ]
        for name, share in caches(args)
        if name.partition(",")[0] == rule or (name == "full" and rule == "h2o")
    }
    if not (total := sum(map(len, todo.values()))):
        return
    llm = h2okv.LLM(
        args.model, cache=f"{rule}:{longest},every={args.every}", max_num_seqs=BATCH,
        max_prompt_tokens=longest, dtype=getattr(torch, args.dtype), prefix_cache=0,
    )  # fmt: skip
    with llm, args.out.open("a") as file, Progress(rule, total, "answers") as bar:
        for (name, share), left in todo.items():
            # A fraction is of the prompt alone; the full cache keeps the answer too.
            budget = longest if name == "full" else f"{100 * share:g}%,min={args.min}"
            for start in range(0, len(left), BATCH):
                batch = left[start : start + BATCH]
                for row in answer(llm, batch, name.endswith("pinned"), budget):
                    row |= {"cache": name, "fraction": share}
                    print(json.dumps(row), file=file, flush=True)
                    completed.setdefault((name, share), {})[row["task"]] = row
                bar.update(len(batch))


def row_of(
    kind: str, name: str, share: float, cases: list[Case], completed: Completions, minimum: int
) -> dict[str, Any]:
    """Count right calls, with the binomial standard error, and the paired change from full."""
    tasks = [case["task"] for case in cases]
    results = completed[name, share]
    fitting = [task for task in tasks if results[task]["fits"]]
    right = [results[task]["right"] for task in fitting]
    full = [completed["full", 1.0][task]["right"] for task in fitting]
    changes = [int(a) - int(b) for a, b in zip(right, full, strict=True)]
    count = len(fitting)
    rate = mean(right) if count else None
    lengths = [results[task]["prompt_tokens"] for task in tasks]
    entries = mean(lengths)
    if name != "full":
        rule = name.partition(",")[0]
        config = CacheConfig.from_spec(f"{rule}:{100 * share:g}%", min_tokens=minimum)
        entries = mean(config.budget.resolve(length).total for length in lengths)
    row: dict[str, Any] = {
        "kind": kind, "cache": name, "kept": share, "min": minimum, "questions": count,
        "too_large": len(tasks) - count,
        "prompt_tokens": round(mean(lengths)), "entries": round(entries),
        "tools_tokens": round(mean(results[task]["tools_tokens"] for task in tasks)),
        "function_right": sum(results[task]["names"] for task in fitting), "right": sum(right),
        "rate": "", "stderr": "", "minus_full": "", "minus_full_stderr": "",
        "lost": changes.count(-1), "gained": changes.count(1),
    }  # fmt: skip
    if rate is not None:
        row |= {"rate": f"{rate:.4f}", "stderr": f"{sqrt(rate * (1 - rate) / count):.4f}"}
        row["minus_full"] = f"{mean(changes):.4f}"
    if count > 1:
        row["minus_full_stderr"] = f"{stdev(changes) / sqrt(count):.4f}"
    return row


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__,
        "bfcl.py --data bfcl_eval/data --text book.txt --model qwen2.5-coder-0.5b.gguf"
        " --out bfcl.jsonl --csv bfcl.csv",
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder bfcl_eval/data")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of answers")
    parser.add_argument("--kinds", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[20, 20, 15, 12], help="of each kind"
    )
    parser.add_argument("--text", type=Path, help="a book, for the kind long")
    parser.add_argument("--passage", type=int, default=900, help="tokens of a passage (900)")
    parser.add_argument("--every", type=int, default=64, help="tokens between evictions (64)")
    parser.add_argument(
        "--min", type=int, default=64, help="minimum of heavy and recent tokens (64)"
    )
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--rules", nargs="+", default=["h2o", "best"], choices=("h2o", "best"))
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="without pinned ones")
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
