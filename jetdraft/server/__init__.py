"""An HTTP server for `jetdraft serve`, its limits and refusals."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from jetdraft.errors import JetdraftError, LengthError, printable
from jetdraft.options import Checked, declared

_limit = partial(declared, "limits")


@dataclass(frozen=True)
class Limits(Checked):
    """Limits of requests, and of sound files in memory; raises `OptionError`.

    max_new_tokens: The most tokens of a text.
    max_body_bytes: The most bytes of a request's body.
    max_sound_bytes: The most bytes of a request with a sound or images.
    max_waiting: The most requests that may wait for a model.
    max_wait: The most seconds that a request may wait.
    max_seconds: The most seconds that a text may take.
    prefix_bytes: The most bytes of the files in --prefixes.
    """

    max_new_tokens: int = declared(
        "ending", 1024, names=("-n", "--max-new-tokens"), least=1
    )
    max_body_bytes: int = _limit(1_000_000, least=1)
    max_sound_bytes: int = _limit(25_000_000, least=1)
    max_waiting: int = _limit(64, least=0)
    max_wait: float = _limit(120.0, above=0)
    max_seconds: float = _limit(300.0, above=0)
    prefix_bytes: int = _limit(1_000_000_000, least=1)
    max_sounds: int = 8


ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_CODES = {429: "rate_limit_exceeded"}
MAX_MESSAGE_CHARS = 1000  # The most characters of an error's message.


class RequestError(JetdraftError):
    """A bad request: an HTTP `status`, the field `param` at fault, OpenAI's `code`."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str = ""
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def refusal_fields(error: object, status: int, chat: bool = False) -> dict[str, Any]:
    """Return an error as OpenAI's JSON object; a `chat` names messages, not prompt."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    kind = ERRORS.get(status, fallback)
    param = getattr(error, "param", None) or getattr(error, "field", None) or None
    if chat and param == "prompt" and not isinstance(error, RequestError):
        param = "messages"
    code = getattr(error, "code", None) or ERROR_CODES.get(status)
    if isinstance(error, LengthError):
        code = "context_length_exceeded"
    # It may quote what a client has sent.
    message = printable(" ".join(str(error).split()), MAX_MESSAGE_CHARS)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
