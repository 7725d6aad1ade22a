"""A script that follows constraints; it imports nothing of jetdraft."""

# A short grammar can take all memory and never end; only the end of its process stops
# the library. A process ends itself at its limits, or when its second socket closes.

import json
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

# JSON on one line; the "x-guidance" of a schema overrides this.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_ERROR_CHARS = 400  # The library may repeat a whole expression in an error.
Reply = tuple[Any, bytes]  # What is sent back: a value for JSON, and masks.
FORBIDDEN = b""  # In place of the mask of a row that may not come.


class RefusalError(Exception):
    """What is wrong with a constraint or with the text so far, in one line."""


class LibraryVocabulary:
    """The tokens of a vocabulary as the library reads them.

    For the library an added token that is special or in <> is a name, `<name>` in a
    grammar. So that it may write its text too, it has an alias: a second id past the
    vocabulary, from `first` on, with the bytes of the text. Tokens that end a text have
    no alias. `hidden` has the texts of special tokens.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, text: str, size: int, ends: list[int]) -> None:
        from llguidance import LLTokenizer

        self._inner = inner = LLTokenizer(text, size, ends, slices=[])
        self.ends, self.eos_token_id = frozenset(ends), ends[0]
        texts = [inner.decode_bytes([token]) for token in range(size)]
        self.special_token_ids = list(filter(inner.is_special_token, range(size)))
        added = json.loads(text).get("added_tokens") or []
        special = {token["content"].encode(): token["special"] for token in added}
        names = [t for t in self.special_token_ids if texts[t] in special]
        self.first = -(-size // 8) * 8
        free = (token for token in names if token not in self.ends)
        self.aliases = {token: self.first + n for n, token in enumerate(free)}
        self.hidden = {t: texts[t].decode() for t in names if special[texts[t]]}
        aliased = [texts[token] for token in self.aliases]
        self.tokens = [*texts, *[b""] * (self.first - size), *aliased]
        self.tokenizer = LLTokenizer(self, eos_token=ends)  # type: ignore[arg-type]
        self.tokens.clear()  # the library has a copy

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text that a constraint forces; the library calls this."""
        tokens, inner = self._inner.tokenize_str(text), self._inner
        if self.ends.isdisjoint(tokens) and inner.decode_bytes(tokens) == text.encode():
            return tokens
        names = {alias: token for token, alias in self.aliases.items()}
        return [names.get(t, t) for t in self.tokenizer.greedy_tokenize(text)]

    def aliases_for(self, source: str) -> dict[int, int]:
        """The aliases of special tokens whose text is in a constraint."""
        for _ in range(2):  # an expression in JSON is escaped twice
            source += "\n" + _ESCAPE.sub(lambda e: e[2] or chr(int(e[1], 16)), source)
        unnamed = {token for token, text in self.hidden.items() if text not in source}
        return {t: alias for t, alias in self.aliases.items() if t not in unnamed}


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(\W))")


class Reader:
    """Reads tokens of one text, and goes back when tokens are withdrawn.

    `RefusalError` says that no text can follow, or the library's limits are reached.
    """

    def __init__(
        self, inner: "LLMatcher", words: LibraryVocabulary, source: str
    ) -> None:
        self._inner, self._words = inner, words
        self._aliases = words.aliases_for(source)
        self._path: list[int] = []

    def masks(self, fresh: list[int], tokens: list[int], parents: list[int]) -> Reply:
        """Commit `fresh`; returns how many tokens may follow each row below, and masks.

        A mask has a bit for each token. A forbidden row has no mask, and the count -1.
        """
        if not self._read_path(fresh):
            raise RefusalError("no token of the vocabulary fits")
        self._path.clear()
        masks = [self._row_mask(path) for path in _row_paths(tokens, parents)]
        counts = [int.from_bytes(mask, "little").bit_count() for mask in masks]
        pairs = zip(counts, masks, strict=True)
        return [n if mask != FORBIDDEN else -1 for n, mask in pairs], b"".join(masks)

    def forced(self, path: list[int]) -> Reply:
        """The tokens that must follow a path; empty if the path is forbidden."""
        return self._inner.compute_ff_tokens() if self._read_path(path) else [], b""

    def allowed(self, path: list[int], tokens: list[int], parents: list[int]) -> Reply:
        """The numbers of the allowed rows below a path, the root's 0 first."""
        paths, kept_rows = _row_paths(tokens, parents), [0]
        for row in range(1, len(tokens)):
            parent = parents[row]
            if parent in kept_rows and self._read_path([*path, *paths[parent]]):
                kept_rows += [row] * self._allows(tokens[row])
        return kept_rows, b""

    def _row_mask(self, path: list[int]) -> bytes:
        """The mask after a path of tokens; `FORBIDDEN` if the path may not come."""
        if not self._read_path(path):
            return FORBIDDEN
        mask = bytearray(self._inner.compute_bitmask())
        self._check_limits()
        first = self._words.first >> 3
        for token, alias in self._aliases.items() if any(mask[first:]) else ():
            if mask[alias >> 3] & 1 << (alias & 7):
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask[:first])

    def _allows(self, token: int) -> bool:
        """Whether a token may come next, as itself or as its alias."""
        if token in self._words.ends:
            return self._inner.is_accepting()
        allows = self._inner.validate_tokens
        return bool(allows([token]) or allows(self._alias(token)))

    def _read_path(self, path: Sequence[int]) -> bool:
        """Read `path` after the committed tokens; whether the constraint allows it."""
        same, read = 0, self._path
        while same < min(len(path), len(read)) and path[same] == read[same]:
            same += 1
        if same < len(read):
            self._inner.rollback(len(read) - same)
            del read[same:]
            self._check_limits()
        fresh = list(path[same:])
        if not self._words.ends.isdisjoint(fresh):
            return False  # nothing comes after the end
        consume = self._inner.try_consume_tokens
        while fresh and (count := consume(fresh) or consume(self._alias(fresh[0]))):
            read += fresh[:count]
            del fresh[:count]
        self._check_limits()
        return not fresh

    def _alias(self, token: int) -> list[int]:
        return [self._aliases.get(token, token)]

    def _check_limits(self) -> None:
        if problem := self._inner.get_error():
            raise RefusalError(problem.splitlines()[0])


def compile_constraint(
    words: LibraryVocabulary, limits: dict[str, Any], kind: str, source: str
) -> Reader:
    """Compile a constraint, and return a reader of a text under it.

    `kind` is "regex", "grammar" or "JSON schema", `limits` are the library's limits of
    a parser. Raises `RefusalError` with the place of a problem in `source`.
    """
    matcher = partial(_matcher, words, limits, kind)
    inner = matcher(source)
    if not (problem := inner.get_error()):
        return Reader(inner, words, source)
    if kind == "JSON schema":
        place = _schema_path(matcher, json.loads(source), problem) or "its root"
        raise RefusalError(f"{place}: {_error_line(problem)}")
    lines = problem.splitlines()
    caret = next((line for line in lines[1:] if line and not line.strip(" ^")), None)
    if kind == "regex" and caret is not None:
        raise RefusalError(f"character {caret.index('^') - 3}: {_error_line(problem)}")
    raise RefusalError(lines[0].rstrip(":").removeprefix("at "))


def _matcher(
    words: LibraryVocabulary, limits: dict[str, Any], kind: str, source: str
) -> "LLMatcher":
    """The library's matcher; its `get_error` says what is wrong with the source."""
    from llguidance import LLMatcher, LLParserLimits

    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind == "grammar":
        grammar = LLMatcher.grammar_from_lark(source)
    else:
        schema = json.loads(source)
        spacing = {**SPACING, **schema.get("x-guidance", {})}
        grammar = LLMatcher.grammar_from_json_schema({**schema, "x-guidance": spacing})
    parser_limits = LLParserLimits(**limits, verbose_errors=False)
    return LLMatcher(words.tokenizer, grammar, log_level=0, limits=parser_limits)


def _schema_path(
    matcher: "Callable[[str], LLMatcher]", schema: Any, problem: str
) -> str:
    """The path to the innermost part of a schema that has the same problem."""
    for path, part in _inner_schemas(schema):
        if matcher(json.dumps(part)).get_error() == problem:
            return path + _schema_path(matcher, part, problem)
    return ""


def _row_paths(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """The tokens from below the root down to each row, the root's path empty."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return paths


def _inner_schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, as pairs of a path and a schema."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        has_names = key in ("properties", "$defs", "definitions", "patternProperties")
        if isinstance(value, list):
            parts = {f"/{key}/{index}": part for index, part in enumerate(value)}
        elif has_names and isinstance(value, dict):
            parts = {f"/{key}/{name}": part for name, part in value.items()}
        else:
            parts = {f"/{key}": value}
        yield from (item for item in parts.items() if isinstance(item[1], dict))


def _error_line(problem: str) -> str:
    lines = problem.splitlines()
    return next((line[7:] for line in lines if line.startswith("error: ")), lines[0])


def _serve(pipe: socket.socket, words: LibraryVocabulary) -> None:
    """Answer the requests of one text until the other end is closed."""
    reader: Reader | None = None
    while header := pipe.recv(4, socket.MSG_WAITALL):
        size = struct.unpack("<I", header)[0]
        seconds, name, *request = json.loads(pipe.recv(size, socket.MSG_WAITALL))
        # These seconds do not pass while other programs have the processor.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply: Reply = [], b""
        try:
            if name == "compile":
                reader = compile_constraint(words, *request)
            else:
                reply = getattr(reader, name)(*request)
        except (RefusalError, ValueError) as error:
            reply = {"error": _one_line(str(error))}, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(pipe, *reply)


def _one_line(problem: str) -> str:
    line = " ".join(problem[: 2 * MAX_ERROR_CHARS].split())[:MAX_ERROR_CHARS]
    return line.encode("utf-8", "replace").decode("utf-8")


def _send(pipe: socket.socket, value: object, masks: bytes = b"") -> None:
    """Send a value as JSON, and masks; both sizes come first."""
    text = json.dumps(value).encode()
    pipe.sendall(struct.pack("<II", len(text), len(masks)) + text + masks)


def _limit_memory(most_bytes: int) -> None:
    import resource  # here, since the runtime imports this file on any system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with_socket(life: socket.socket) -> None:
    """Let the system end this process when the other end of `life` is closed."""
    import fcntl

    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(life, fcntl.F_GETFL)
    fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC)
    with suppress(BlockingIOError):
        # An end that was closed before sends no signal any more.
        if not life.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            os._exit(0)


def _choose_what_ends() -> None:
    """Let closed sockets, or a lack of memory, end this process, and nothing else."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)
    for ending in (signal.SIGIO, signal.SIGPROF):
        signal.signal(ending, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(OSError):  # end it before the process of the model
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(control: socket.socket, tokenizer: str, size: int, ends: list[int]) -> None:
    """Read the vocabulary, then fork a worker for each socket that comes."""
    _choose_what_ends()
    try:
        text = Path(tokenizer).read_text(encoding="utf-8")
        words = LibraryVocabulary(text, size, ends)
    except (ImportError, OSError, ValueError) as error:
        _send(control, {"error": _one_line(str(error))})
        return
    _send(control, [])
    while True:
        sent, descriptors, *_ = socket.recv_fds(control, 8, 2)
        if not descriptors:
            return
        pipe, life = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        with pipe, life, suppress(OSError):
            if os.fork() == 0:
                try:
                    control.close()
                    _end_with_socket(life)
                    _limit_memory(int.from_bytes(sent, "little"))
                    _serve(pipe, words)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    setting = json.loads(sys.argv[2])
    sys.path[:] = setting.pop("path")
    main(socket.socket(fileno=int(sys.argv[1])), **setting)
