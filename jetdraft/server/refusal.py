"""Refusals in the form of OpenAI's errors."""

import json
from typing import Any

from starlette.responses import Response

from jetdraft.errors import JetdraftError, LengthError, printable

# OpenAI's types and codes of errors, by HTTP status.
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


def refusal_response(error: object, status: int, chat: bool = False) -> Response:
    """Return the HTTP response for an error, see `refusal_fields`."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    # Escapes, since a message may quote what no encoding can hold.
    content = json.dumps(refusal_fields(error, status, chat))
    return Response(content, status, headers, media_type="application/json")


def refusal_fields(error: object, status: int, chat: bool = False) -> dict[str, Any]:
    """Return an error as OpenAI's JSON object; a `chat` names messages, not prompt."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    kind = ERRORS.get(status, fallback)
    param = getattr(error, "param", None) or getattr(error, "field", None) or None
    if chat and param == "prompt":
        param = "messages"
    code = getattr(error, "code", None) or ERROR_CODES.get(status)
    if isinstance(error, LengthError):
        code = "context_length_exceeded"
    # It may quote what a client has sent.
    message = printable(" ".join(str(error).split()), MAX_MESSAGE_CHARS)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
