"""Conversations: turns that add to one text."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from jetdraft.errors import JetdraftError, OptionError, as_error
from jetdraft.files import write_text
from jetdraft.parsing import read_json_file
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.pictures import read_picture, read_pictures, url_of
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.planning.options import GenerateOptions, Options
from jetdraft.runtime.stream import Stream
from jetdraft.runtime.text.template import (
    Message,
    check_messages,
    take_images,
    user_message,
)
from jetdraft.runtime.text.tools import ToolCall, Tools

# The share of the capacity that stays filled; to drop turns reads the prompt again.
KEPT_SHARE = 0.75
# What a file raises that is no saved conversation.
_DAMAGES = OSError, ValueError, TypeError, LookupError, AttributeError, OptionError


class Conversation:
    """Turns of a user and a model; the model does not read earlier turns again.

    The keyword arguments are `Model.generate`'s options. Where the turns would exceed
    the buffers, `drop_oldest` drops whole turns, oldest first; without it `OptionError`
    is raised. If the model calls `tools`, `calls` has the calls of the last reply, and
    `answer` gives their results. The chat template reads the variables in `template`,
    and decides which thoughts of earlier turns the model sees.

        talk = Conversation(model, system="Be brief.", max_new_tokens=64)
        for piece in talk.say("Hello"):
            print(piece.text, end="")
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        drop_oldest: bool = False,
        tools: Tools | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> None:
        Options.of(**options)  # refuses bad options
        self.model, self.options, self.drop_oldest = model, options, drop_oldest
        self.tools = tools and model.fitted(tools)
        self._variables = {"tools": tools and tools.functions, **(template or {})}
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)
        self.last: Result | None = None
        self._stream: Stream | None = None

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> Iterator[Piece]:
        """Start the reply to `text` and the `images` among the options.

        `messages` gets both when the pieces end.
        """
        if not isinstance(text, str):
            fact = f"{text!r} is not a text; give what the user says"
            raise OptionError(fact, "prompt")
        images = [read_picture(image) for image in options.pop("images", ())]
        return self._reply([user_message(text, images)], options)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls in the last reply."""
        return [] if self.last is None else self.last.calls

    def answer(
        self, *results: object, **options: Unpack[GenerateOptions]
    ) -> Iterator[Piece]:
        """Start the reply to the results of all `calls`, in order; returns its pieces.

        A result is a text or what JSON can hold. Raises `OptionError`.

        for piece in talk.answer({"battery": 80}):
            print(piece.text, end="")
        """
        if len(results) != len(self.calls) or not results:
            fact = f"the last reply has {len(self.calls)} calls, not {len(results)}"
            raise OptionError(f"{fact}; give a result for each", "results")
        return self._reply(list(map(_tool_message, self.calls, results)), options)

    def _reply(self, added: list[Message], options: GenerateOptions) -> Iterator[Piece]:
        fields: GenerateOptions = {**self.options, **options}
        if "images" in fields:
            raise OptionError("images belong to a turn; give them to `say`", "images")
        messages, ids = self._fit_messages([*self.messages, *added], fields)
        fields["images"] = take_images(messages)[1]
        self._stream = self.model.stream_reply(ids, tools=self.tools, **fields)
        return self._yield_reply(messages, self._stream)

    def _yield_reply(self, messages: list[Message], stream: Stream) -> Iterator[Piece]:
        """Yield the pieces of a reply, then add it to the messages, even if cut off."""
        try:
            yield from stream
        except JetdraftError:
            raise  # there is no reply
        except BaseException:
            self._add_reply(messages, stream)
            raise
        self._add_reply(messages, stream)

    def _add_reply(self, messages: list[Message], stream: Stream) -> None:
        stream.close()
        self.last = stream.result()
        reply: Message = {"role": "assistant", "content": self.last.text}
        if self.last.thought:
            reply["reasoning_content"] = self.last.thought
        calls, said = self.tools.read(self.last.text) if self.tools else ([], "")
        if calls:
            self.last = replace(self.last, calls=calls)
            reply["content"] = said.strip()
            reply["tool_calls"] = [call.for_template() for call in calls]
        self.messages = [*messages, reply]
        self._stream = None

    def cancel(self) -> None:
        """End the reply under way, if there is a reply, at its next round."""
        if self._stream is not None:
            self._stream.cancel()

    def reset(self) -> None:
        """Drop all turns; the system message stays."""
        self.messages, self.last = list(self._opening), None

    def save(self, file: str | Path) -> None:
        """Write the messages to a JSON file, images as PNG; raises `OutputError`."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=2, default=url_of)
        write_text(Path(file), f"{text}\n")

    def load(self, file: str | Path) -> None:
        """Replace the messages by those in a file of `save`; raises `OptionError`."""
        fact = f"{file} is not a saved conversation"
        fix = "give a file of /save (Conversation.save)"
        with as_error(OptionError, _DAMAGES, fact, fix, "file"):
            messages = read_json_file(Path(file), most_bytes=1 << 28, exact=True)
            parts = [m["content"] or () for m in check_messages(messages)]
            for part in itertools.chain.from_iterable(parts):
                if isinstance(part, dict) and part["type"] == "image":
                    encoded = part["image"].removeprefix("data:")  # never a file
                    part["image"] = read_picture(f"data:{encoded}")
        self.messages = messages

    def _fit_messages(
        self, messages: list[Message], options: GenerateOptions
    ) -> tuple[list[Message], list[int]]:
        """Drop old turns until a reply fits; returns the messages and their ids."""
        capacity = self.model.bundle.target.contract.capacity
        reply_tokens = Options.of(**options).ending.max_new_tokens
        first, room = len(self._opening), capacity
        read_pictures(take_images(messages)[1])  # raises before turns are dropped
        while True:
            numbered = enumerate(messages[first:], first)
            turns = [place for place, said in numbered if said["role"] == "user"]
            can_drop = self.drop_oldest and len(turns) > 1
            try:
                prompt = self.model.chat_prompt(messages, **self._variables)
                images = read_pictures(take_images(messages)[1])
                placed, _ = self.model.parts.place_pictures(prompt, images)
            except OptionError:  # too long, perhaps
                if not can_drop:
                    raise
            else:
                tokens = len(placed) + (reply_tokens if self.drop_oldest else 0)
                if tokens <= room or (not can_drop and tokens <= capacity):
                    return messages, prompt
                if not can_drop:
                    fact = f"the conversation has {len(prompt)} tokens, the capacity is"
                    fact += f" {capacity}; /reset it, --drop-oldest "
                    fact += "(drop_oldest=True), or export with a larger --capacity"
                    raise OptionError(fact, "prompt")
            messages = messages[:first] + messages[turns[1] :]
            room = int(KEPT_SHARE * capacity)


def _tool_message(call: ToolCall, text: object) -> Message:
    fact = f"the result of {call.name!r} is not JSON"
    causes = TypeError, ValueError, RecursionError
    with as_error(OptionError, causes, fact, "give a text", "results"):
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
