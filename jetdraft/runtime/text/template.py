"""Turns chat messages into a prompt with the checkpoint's own chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetdraft.errors import OptionError, as_error, printable
from jetdraft.runtime.text.stops import Thinking

Message = dict[str, Any]  # With `role` and `content`, as in transformers.
# The fields for a message's reasoning, in different programs.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders messages with a Jinja template, in a `Sandbox`.

    `tokens` are the tokenizer's special tokens by name, for example `bos_token`.
    Raises `OptionError` if the template is broken or refuses the messages.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        from jetdraft.runtime.text.sandbox import Sandbox

        self.source, self.thinking = source, Thinking.of(source)
        self._tokens = dict(tokens)
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:  # also SyntaxError and RecursionError of Python
            # A line of a SyntaxError is in the code that Jinja makes.
            is_python = isinstance(error, SyntaxError)
            line = None if is_python else getattr(error, "lineno", None)
            where = "" if line is None else f" in line {line}"
            fact = f"the chat template is broken{where} ({_reason(error)})"
            fix = "fix chat_template.jinja in the checkpoint and export it again"
            raise OptionError(f"{fact}; {fix}", "messages") from error

    @classmethod
    def open(cls, file: Path | None, tokens: Mapping[str, str]) -> "ChatTemplate":
        """Read a bundle's template; raises `OptionError` if it is missing."""
        if file is None:
            fact = "the bundle has no chat template; give whole prompts (generate, "
            fact += "/v1/completions), or export a checkpoint with a chat template"
            raise OptionError(fact, "messages")
        causes, fact = (OSError, UnicodeDecodeError), f"{file} cannot be read"
        with as_error(OptionError, causes, fact, "export the bundle again", "messages"):
            return cls(file.read_text(encoding="utf-8"), tokens)

    def render(self, messages: Sequence[Message], /, **more: Any) -> str:
        """Write the prompt for the assistant's next message; `more` are variables."""
        from jetdraft.runtime.text.sandbox import MAX_SIZE

        variables: dict[str, Any] = {"tools": None, "documents": None}
        variables["add_generation_prompt"] = True
        try:
            variables |= {**self._tokens, **_json_copy(more)}
            variables["messages"] = list(map(_normalize_message, _json_copy(messages)))
            with self._sandbox.bounded():
                text = self._template.render(variables)
            if len(text) > MAX_SIZE:
                raise ValueError(f"the prompt has more than {MAX_SIZE} characters")
        except Exception as error:  # a template may raise anything
            roles = printable(", ".join(message["role"] for message in messages))
            reason = _reason(error)
            fact = f"the model's chat template refuses these messages ({reason})"
            fix = f"their roles are {roles}: change them, their order or their length"
            raise OptionError(f"{fact}; {fix}", "messages") from error
        return text


def _json_copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _normalize_message(message: Message) -> Message:
    """The message without nulls and empty lists, its reasoning under all names."""
    fields = {name: value for name, value in message.items() if value not in (None, [])}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _reason(error: Exception) -> str:
    return printable(str(error) or type(error).__name__)


def check_messages(messages: object) -> list[Message]:
    """The messages as a list; raises `OptionError` if any of them is not a message."""
    if not isinstance(messages, (list, tuple)) or not messages:
        fact = "a chat needs a list of messages; give at least one"
        raise OptionError(fact, "messages")
    example = '{"role": "user", "content": "..."}'
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            at = f"messages[{place}]"
            fact = f"{at} must be an object with a role, for example {example}"
            raise OptionError(fact, f"{at}.role")
    return list(messages)


def user_message(content: str, images: Sequence[object] = ()) -> Message:
    """A user's message, with images before its text."""
    if not images:
        return {"role": "user", "content": content}
    parts: list[Message] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": content}]}


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Split messages from the images in their parts `{"type": "image", "image": ...}`.

    A template writes a place for each part that is left of an image. Raises
    `OptionError` for an image in a part of another type.
    """
    images = list[Any]()

    def rest(part: Any) -> Any:
        if not isinstance(part, dict) or "image" not in part:
            return part
        if part.get("type") != "image":
            fact = f"a part of type {part.get('type')!r} has an image"
            raise OptionError(f'{fact}; write "type": "image"', "messages")
        images.append(part["image"])
        return {name: value for name, value in part.items() if name != "image"}

    return [
        {**message, "content": list(map(rest, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ], images
