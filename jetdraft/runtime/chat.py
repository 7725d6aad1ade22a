"""Conversations: a checkpoint's own chat template, and turns that add to one text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jetdraft.errors import JetdraftError, OptionError, PromptError, TemplateError
from jetdraft.files import replacing
from jetdraft.runtime.stream import Piece, Result, Stream

if TYPE_CHECKING:
    from jetdraft.runtime.model import Model

Message = dict[str, Any]
"""A `role` and a `content`, as transformers' templates have them."""


KEPT = 0.75
"""Of the capacity is filled after turns were dropped: then all is read again, and the
next turns should not drop some too."""


class ChatTemplate:
    """Renders messages with a Jinja template in a sandbox that can change nothing.

    `tokens` are those that templates name, as `bos_token`. Raises `TemplateError`.

        ChatTemplate(source, {"eos_token": "</s>"}).render([user("Hello")])
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        from jinja2 import TemplateError as JinjaError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.source = source
        self._tokens = tokens
        self._error = JinjaError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except JinjaError as error:
            line = getattr(error, "lineno", None)
            raise TemplateError(
                f"the chat template is broken in line {line} ({error}); mend "
                "chat_template.jinja in the checkpoint and export it again"
            ) from error

    def render(self, messages: Sequence[Message], **more: Any) -> str:
        """The prompt for the assistant's next message; `more` is given on, as tools."""
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    add_generation_prompt=True,
                    **{**self._tokens, **more},
                )
            )
        except (self._error, TypeError, ValueError, KeyError) as error:
            raise TemplateError(
                f"the chat template refuses these messages ({error}); change their "
                "roles or order"
            ) from error


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def check_messages(messages: object) -> list[Message]:
    """Messages, or a `PromptError` that says which is none."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise PromptError("a chat needs a list of messages; give at least one")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"message {number} has no role; give "
                '{"role": "user", "content": "..."}'
            )
    return list(messages)


def user(content: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": content}


class Conversation:
    """Turns of a user and a model; what was said before is not read again.

    `options` are those of `Model.generate`. With `drop_oldest` whole turns go, oldest
    first, where the buffers would be full; without, `PromptError` says so.

        talk = Conversation(model, system="Be brief.", max_new_tokens=64)
        for piece in talk.say("Hello"):
            print(piece.text, end="")
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        drop_oldest: bool = False,
        **options: Any,
    ) -> None:
        self.model = model
        self.drop_oldest = drop_oldest
        self.options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)
        self.last: Result | None = None
        self._stream: Stream | None = None

    def say(self, text: str, **options: Any) -> Iterator[Piece]:
        """The model's reply, piece by piece; it belongs to the conversation then.

        A reply that is cut off, by `cancel` or by not reading on, stays as far as it
        came.
        """
        if not isinstance(text, str):
            raise PromptError(f"{text!r} is no text; give what the user says")
        asked = [*self.messages, user(text)]
        given = {**self.options, **options}
        asked, prompt = self._fitting(asked, given)
        self._stream = self.model.stream(token_ids=prompt, **given)
        return self._reply(asked, self._stream)

    def _reply(self, asked: list[Message], stream: Stream) -> Iterator[Piece]:
        try:
            yield from stream
        except JetdraftError:
            raise  # nothing was said
        except BaseException:
            self._ended(asked, stream)
            raise
        self._ended(asked, stream)

    def _ended(self, asked: list[Message], stream: Stream) -> None:
        """Keep a reply as far as it came."""
        stream.close()
        self.last = stream.result()
        reply = {"role": "assistant", "content": self.last.text}
        self.messages = [*asked, reply]
        self._stream = None

    def cancel(self) -> None:
        """End the reply under way."""
        if self._stream is not None:
            self._stream.cancel()

    def reset(self) -> None:
        """Start again, with the same system message."""
        self.messages, self.last = list(self._opening), None

    def save(self, file: str | Path) -> None:
        """Write the messages to a JSON file."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
        try:
            with replacing(Path(file)) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {file} ({error.strerror})") from error

    def load(self, file: str | Path) -> None:
        """Go on with the messages of a file that `save` wrote."""
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{file} is no saved conversation ({error}); give one"
            ) from error
        self.messages = check_messages(found)

    def _fitting(
        self, asked: list[Message], options: dict[str, Any]
    ) -> tuple[list[Message], list[int]]:
        """The messages that fit with the reply, and their prompt."""
        capacity = self.model.bundle.target.contract.capacity
        wanted = int(options.get("max_new_tokens", 128))
        first = len(self._opening)
        room = capacity
        while True:
            prompt = self.model.chat_prompt(asked)
            needed = len(prompt) + (wanted if self.drop_oldest else 0)
            turns = [i for i, m in enumerate(asked[first:], first) if _is_user(m)]
            last = not self.drop_oldest or len(turns) < 2
            if needed <= room or (last and needed <= capacity):
                return asked, prompt
            if last:
                raise PromptError(
                    f"the conversation has {len(prompt)} tokens, the capacity is "
                    f"{capacity}; reset it, let the oldest turns be dropped "
                    "(drop_oldest), or export with a larger --capacity"
                )
            asked = asked[:first] + asked[turns[1] :]
            room = int(KEPT * capacity)


def _is_user(message: Message) -> bool:
    return bool(message["role"] == "user")


def read_template(file: Path | None) -> str:
    """The source of a bundle's template; `TemplateError` where there is none."""
    if file is None:
        raise TemplateError(
            "the bundle has no chat template; give whole prompts to generate, or "
            "export a checkpoint that has one"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"{file} cannot be read ({error}); export the bundle again"
        ) from error
