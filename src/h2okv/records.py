"""Files: atomic writes, results that resume, and lines that people wrote."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Self, TypeVar

Kind = TypeVar("Kind", bound=type)
_SHOWN = 60  # characters of a wrong value that an error quotes


@contextmanager
def refusing(problem: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of `kinds` into a ValueError: the problem, the library's reason, the remedy."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{problem} ({first_line(error)}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, short enough for a sentence."""
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__


def short_repr(value: Any) -> str:
    """Return a value as errors quote it; the ``repr`` of a huge int raises."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def naming(path: Path, action: str, remedy: str) -> AbstractContextManager[None]:
    """Turn an OSError into a ValueError that names the file; `action` is "read" or "written"."""
    return refusing(f"'{path}' cannot be {action}", remedy, OSError)


# Names that other libraries and papers use, without case and underscores, by the name here.
_SYNONYMS = {
    "model": "config",
    "budget": "size maxsize cachesize maxcachesize maxcachelen maxcachelength maxentries numentries"
    " capacity maxcapacity maxcapacityprompt kvbudget cachebudget tokenbudget keep keepratio ratio"
    " budgetratio compressionratio",
    "heavy": "heavyratio heavybudget heavysize heavyhitters heavyhitter hh hhsize hhratio numheavy",
    "recent": "recentratio recentbudget recentsize numrecent window windowsize windowlength local"
    " slidingwindow localwindow",
    "sink": "sinks numsinks numsink sinksize sinktokens numsinktokens attentionsinks startsize",
    "policy": "method strategy eviction evictionpolicy evictionstrategy algorithm press",
    "scoring": "score scorer scores",
    "kv_bits": "bits nbits numbits quantization quantize",
    "evict_every": "prefillchunk chunk chunksize prefillchunksize blocksize"
    " interval evictioninterval evictinterval every",
    "layer_budgets": "headbudgets",
    "max_tokens": "maxnewtokens maxlength maxoutputtokens maxcompletiontokens npredict",
    "temperature": "dosample temp",
    "n": "numreturnsequences bestof",
    "stop": "stopstrings stopwords stopsequences",
    "stop_token_ids": "eostokenid eostokenids",
    "max_num_seqs": "batchsize maxbatchsize",
    "max_prompt_tokens": "maxmodellen maxseqlen contextlength",
    "memory": "gpumemory maxmemory",
    "dtype": "torchdtype",
    "device": "devicemap",
    "full": "none dynamic dynamiccache",
    "sink_recent": "streamingllm streaming",
}

_OF_GENERATE = (
    "max_new_tokens", "max_length", "temperature", "do_sample", "top_p", "top_k", "min_p", "stop",
    "stop_strings", "repetition_penalty", "num_beams", "num_return_sequences", "eos_token_id", "n",
)  # fmt: skip


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> ValueError:
    """Return the error for an unknown name, with close matches."""
    names = list(choices)
    plain = {_plain(choice): choice for choice in names}
    written = _plain(name)
    near = [choice for choice in names if written in _SYNONYMS.get(choice, "").split()]
    keys = [written] if written in plain else difflib.get_close_matches(written, plain)
    near = near or [plain[key] for key in keys]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"{kind} {name!r} is unknown; {hint}choose from {', '.join(names)}")


def _plain(name: object) -> str:
    return re.sub(r"[\W_]+", "", str(name).lower())


def check_arguments(function: str, arguments: Iterable[str], names: Iterable[str]) -> None:
    """Raise ValueError for an argument that a function or class does not have."""
    choices = list(names)
    for name in arguments:
        if name in _OF_GENERATE and not {name, "temperature"} & set(choices):
            raise ValueError(f"{function}: {name} is an argument of generate; give it there.")
        if name not in choices:
            raise unknown_name(f"{function}: argument", name, choices)


def checked_arguments(
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict, *more: str
) -> Callable[[Kind], Kind]:
    """Let a dataclass refuse wrong arguments by a ValueError with a hint.

    `convert` turns arguments into fields; `more` are names that only `convert` knows.
    """

    def decorate(kind: Kind) -> Kind:
        names = [entry.name for entry in fields(kind) if entry.init]
        positional = [entry.name for entry in fields(kind) if entry.init and not entry.kw_only]
        init: Any = vars(kind)["__init__"]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **values: Any) -> None:
            check_arguments(kind.__name__, values, (*names, *more))
            named = dict(zip(positional, args, strict=False))
            for name in named.keys() & values.keys():
                raise ValueError(f"{kind.__name__}: {name} is given twice; leave one of them out.")
            for value in args[len(positional) :]:
                raise ValueError(
                    f"{kind.__name__}: {short_repr(value)} must be given by name, such as"
                    f" {names[0]}={short_repr(value)}."
                )
            init(self, **convert(named | values))

        type.__setattr__(kind, "__init__", checked)
        return kind

    return decorate


def _refuse_device(path: Path) -> None:
    """Raise OSError for a device or a pipe, whose place a renamed file would take."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a device or a pipe")


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that gets its name only when it is complete and on the disk."""
    # A random name: another process may be writing the same file.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with naming(path, "written", "choose another path, or free some space"):
            _refuse_device(path)
            with draft.open(mode.replace("w", "x"), **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            if os.name == "posix":  # where the folder's entry can be synced, too
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON atomically."""
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise JSONDecodeError also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error


def read_text_file(path: Path, kind: str = "text") -> str:
    """Return the text of a file; raise ValueError if it is empty or not UTF-8."""
    with naming(path, "read", f"give a {kind} file"):
        text = decode_text(path.expanduser().read_bytes(), f"'{path}'")
    if not text.strip():
        raise ValueError(f"'{path}' is empty; give a file with some text")
    return text


def decode_text(data: bytes, source: str) -> str:
    """Decode UTF-8 without its byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error


def check_text(value: Any, location: str) -> str:
    """Return a value if it is a non-empty string; raise ValueError otherwise."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{location} is not a text; give a string that is not empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{location} has half of a surrogate pair; correct the text") from error
    return value


@dataclass(frozen=True)
class Record:
    """One entry of a data file."""

    fields: dict[str, Any]
    location: str  # line and file, for messages

    @classmethod
    def parse(cls, line: str | bytes, location: str, expected: str = "an object") -> Self:
        """Parse a line of JSON that must be an object."""
        try:
            fields = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{location} is not JSON ({error}); correct or remove it") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{location} is not a JSON object; give {expected}")
        return cls(fields, location)


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if settings differ from the saved ones, naming the first that does."""
    current = json.loads(json.dumps(dict(current)))
    for name in {**current, **saved}:
        if saved.get(name) != current.get(name):
            then, now = (
                "unset" if values.get(name) is None else values[name] for values in (saved, current)
            )
            differs = f"{source} was begun with {name} {then}, not {now}"
            raise ValueError(
                f"{differs}; continue it with that, delete it to start over, or choose another file"
            )


def settings_path(path: Path) -> Path:
    """Return the file beside a `ResultFile` that has its settings."""
    return path.with_name(f"{path.name}.job.json")


class ResultFile:
    """Results in JSON lines; the records of `append` are on the disk when it returns.

    Subclasses override `take` to remember what they need of a record; it is called for each record
    of the file when it is opened, and for each that is appended. A last line that a kill has
    truncated is dropped; a second writer and a file of another kind are refused.
    """

    def __init__(
        self, path: Path, kind: str, version: int = 1, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.kind = kind
        self.settings_path = settings_path(path)
        self._header = _line({"kind": kind, "version": version}) if settings is None else b""
        with self._naming(), ExitStack() as cleanup:
            _refuse_device(path)  # opening a pipe would wait for its reader
            self._file = cleanup.enter_context(path.open("ab", buffering=0))
            self._lock()
            self._size = self._read()
            self._file.truncate(self._size)
            if settings is not None:
                self._settle(settings)
            elif not self._size:
                self._write(self._header)
            cleanup.pop_all()  # the file stays open unless something went wrong

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, whose records are on the disk already."""
        self._file.close()

    def take(self, record: Record) -> None:
        """Process a record; raise ValueError for one of another kind of file."""

    def foreign(self, location: str) -> ValueError:
        """Return the error of a line that is of another kind of file."""
        return ValueError(f"{location} is not a result of {self.kind}; choose another file")

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append all records; on an error, restore the file."""
        added = [dict(record) for record in records]
        with self._naming():
            self._write(b"".join(map(_line, added)))
        for record in added:
            self.take(Record(record, f"a new line of '{self.path}'"))

    def _write(self, data: bytes) -> None:
        unwritten = memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

    def _read(self) -> int:
        """Process the records of the file; return the bytes of its complete lines."""
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                location = f"line {number} of '{self.path}'"
                if not line.endswith(b"\n"):
                    # An unfinished first line is dropped only if this package began it.
                    is_begun = not self._header and self.settings_path.exists()
                    if size or is_begun or self._header.startswith(line):
                        break
                    raise self.foreign(location)
                if number > 1 or not self._header:
                    self.take(Record.parse(line, location, f"a result of {self.kind}"))
                elif line != self._header:
                    raise self.foreign(location)
                size += len(line)
        return size

    def _settle(self, settings: Mapping[str, Any]) -> None:
        """Write the settings before the first result; compare them with the file's later."""
        if not self._size:
            write_json(self.settings_path, dict(settings))
            return
        settings_file = f"'{self.settings_path.name}' in the same folder"
        problem = f"'{self.path}' has results, but their settings, {settings_file}, cannot be read"
        with refusing(problem, "choose another file", OSError, ValueError, TypeError):
            saved = dict(parse_json(self.settings_path.read_text(encoding="utf-8")))
        check_settings(saved, settings, f"'{self.path}'")

    def _lock(self) -> None:
        """Lock the file against a second writer as long as it is open."""
        try:
            import fcntl
        except ImportError:  # a system without it
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            other = f"'{self.path}' is being written by another run"
            raise ValueError(f"{other}; wait for it, or choose another file") from error

    def _naming(self) -> AbstractContextManager[None]:
        remedy = "its results are kept, and the same command goes on from there when there is space"
        return naming(self.path, "written", f"{remedy}, or choose another path")


def _line(record: Mapping[str, Any]) -> bytes:
    # A model's bytes may decode to a lone half of a surrogate pair, which UTF-8 cannot encode.
    return f"{json.dumps(record, ensure_ascii=False)}\n".encode(errors="replace")
