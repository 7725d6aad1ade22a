"""Reads a multipart form (RFC 7578), the body of an upload."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesParser

from jetdraft.server.generation_request import RequestError

MOST_PARTS, LONGEST_HEAD = 32, 4096
"""The most fields of a form, and the most bytes of a field's headers."""


def read_form(data: bytes | bytearray, content_type: str) -> dict[str, list[bytes]]:
    """The values of each field of a form, in their order; raises `RequestError`.

    read_form(body, "multipart/form-data; boundary=x")["file"]
    """
    boundary = _parameter(content_type, "boundary")
    if not boundary or not boundary.isascii():
        raise _refusal("its content type has no boundary")
    delimiter = b"\r\n--" + boundary.encode()
    _, *parts = (b"\r\n" + data).split(delimiter, MOST_PARTS + 2)
    fields: dict[str, list[bytes]] = {}
    for part in parts[: MOST_PARTS + 1]:
        if part.startswith(b"--"):
            return fields
        head, separator, content = part.partition(b"\r\n\r\n")
        if not separator or len(head) > LONGEST_HEAD:
            raise _refusal("a field has no headers")
        headers = BytesParser().parsebytes(head.lstrip(), headersonly=True)
        name = _parameter(str(headers["content-disposition"]), "name")
        if name is None:
            raise _refusal("a field has no name")
        fields.setdefault(name, []).append(content)
    raise _refusal("it does not end, or has too many fields")


def _parameter(header: str, name: str) -> str | None:
    """A parameter of a header; None if it is missing, or encoded as RFC 2231 says.

    No form encodes a parameter so (RFC 7578, section 4.2).
    """
    message = Message()
    message["content-type"] = header
    try:
        value = message.get_param(name)
    except (ValueError, TypeError):  # what the library raises for wrong RFC 2231
        return None
    return value if isinstance(value, str) else None


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the body is not a multipart form ({reason}); send a form")
