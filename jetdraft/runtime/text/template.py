"""Turns chat messages into a prompt with the checkpoint's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jetdraft.errors import OptionError

Message = dict[str, Any]
"""A dict with a `role` and a `content`, as templates of transformers expect."""


class ChatTemplate:
    """Renders messages with a Jinja template, in a sandbox where it can change nothing.

    `tokens` are the special tokens that a template may name, for example `bos_token`.
    Raises `OptionError` if the template is broken or refuses the messages.

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
            raise OptionError(
                f"the chat template is broken in line {line} ({error}); fix "
                "chat_template.jinja in the checkpoint and export it again",
                "messages",
            ) from error

    def render(self, messages: Sequence[Message], **more: Any) -> str:
        """The prompt for the assistant's next message.

        `more` are further variables of the template, for example `tools`.
        """
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    add_generation_prompt=True,
                    **{**self._tokens, **more},
                )
            )
        except (self._error, TypeError, ValueError, KeyError) as error:
            raise OptionError(
                f"the chat template refuses these messages ({error}); change their "
                "roles or order",
                "messages",
            ) from error


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def check_messages(messages: object) -> list[Message]:
    """The messages as a list; raises `OptionError` if any of them is not a message."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise OptionError(
            "a chat needs a list of messages; give at least one", "messages"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise OptionError(
                f"message {number} has no role; give "
                '{"role": "user", "content": "..."}',
                "messages",
            )
    return list(messages)


def user(content: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def read_template(file: Path | None) -> str:
    """The source of a bundle's template; raises `OptionError` if there is none."""
    if file is None:
        raise OptionError(
            "the bundle has no chat template; give whole prompts to generate, or "
            "export a checkpoint with a chat template",
            "messages",
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{file} cannot be read ({error}); export the bundle again", "messages"
        ) from error
