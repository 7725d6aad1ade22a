"""Conversations: turns that add to one text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetdraft.errors import JetdraftError, OptionError, PromptError
from jetdraft.files import replacing
from jetdraft.runtime.generation import Piece, Result, Stream
from jetdraft.runtime.text.template import Message, check_messages, user

if TYPE_CHECKING:
    from jetdraft.runtime.model import Model

KEPT = 0.75
"""Of the capacity is filled after turns were dropped: then all is read again, and the
next turns should not drop some too."""


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
