"""Reads a multipart form (RFC 7578), the body of an upload."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesParser

from jetdraft.server.generation_request import RequestError

MOST_PARTS, LONGEST_HEAD = 32, 4096
"""The most fields of a form, and the most bytes of a field's headers."""


def read_form(data: bytes, content_type: str) -> dict[str, list[bytes]]:
    """The values of each field of a form, in their order; raises `RequestError`.

    read_form(body, "multipart/form-data; boundary=x")["file"]
    """
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
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
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _refusal("a field has no name")
        fields.setdefault(name, []).append(content)
    raise _refusal("it does not end, or has too many fields")


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the body is no multipart form ({reason}); send a form")
