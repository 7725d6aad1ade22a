"""What OpenAI's own client gets for a sound, against the same model asked directly."""

from contextlib import contextmanager

import httpx
import openai
import pytest
from openai import OpenAI

from jetdraft import Pool
from jetdraft.server import Limits, RequestError
from jetdraft.server.app import Service
from jetdraft.server.whole_requests import read_form
from tests import whispers
from tests.server.serving import connect, served

SOUND = whispers.wav(whispers.sound(1.5))


@contextmanager
def listening(whisper, **limits):
    """An address that transcribes within limits, and the model behind it."""
    with (
        Pool(whisper / "bundle", 1, threads=1) as pool,
        served(Service(pool, "whisper", Limits(**limits))) as address,
    ):
        yield address, pool.models[0].twin()


@pytest.fixture(scope="module")
def hearing(whisper):
    with listening(whisper, max_sound_bytes=100_000) as found:
        yield found


def upload(address, **parts):
    return httpx.post(f"{address}/v1/audio/transcriptions", **parts)


@pytest.fixture(scope="module")
def audio(hearing):
    with OpenAI(base_url=f"{hearing[0]}/v1", api_key="none", max_retries=0) as client:
        yield client.audio.transcriptions


def test_every_format_has_the_transcript(audio, hearing):
    wanted = hearing[1].transcribe(SOUND, language="en")
    asked = {"model": "whisper", "file": ("a.wav", SOUND), "language": "en"}
    assert audio.create(**asked).text == wanted.text
    text = audio.create(**asked, response_format="text")
    assert text.rstrip("\n") == wanted.text
    verbose = audio.create(**asked, response_format="verbose_json")
    assert (verbose.language, float(verbose.duration)) == ("en", 1.5)
    assert [part.tokens for part in verbose.segments] == [
        segment.token_ids for segment in wanted.segments
    ]
    assert audio.create(**asked, response_format="srt").startswith("1\n00:00:00,")
    assert audio.create(**asked, response_format="vtt").startswith("WEBVTT\n\n00:")


def test_options_of_ours_draft_the_same(audio, hearing):
    wanted = hearing[1].transcribe(SOUND, language="en", method="none")
    ours = {"method": "draft", "num_draft_tokens": 3}
    found = audio.create(
        model="whisper", file=("a.wav", SOUND), language="en", extra_body=ours
    )
    assert found.text == wanted.text


@pytest.mark.parametrize(
    ("changes", "said", "param"),
    [
        ({"file": b""}, "is empty", "file"),
        ({"file": b"no sound"}, "is not a WAV file", "file"),
        ({"file": SOUND[:44]}, "at least 0.1", "file"),
        ({"language": "xx"}, "no language", "language"),
        ({"response_format": "mp3"}, "there is no format", "response_format"),
        ({"prompt": "before"}, "prompt is not supported", "prompt"),
        ({"stream": "true"}, "stream is not supported", "stream"),
        ({"temperature": "hot"}, "is not a number", "temperature"),
        ({"colour": "red"}, "unknown field 'colour'", None),
    ],
)
def test_bad_requests_are_refused(hearing, changes, said, param):
    fields = {"model": "whisper", **changes}
    files = {"file": ("a.wav", fields.pop("file", SOUND))}
    answer = upload(hearing[0], files=files, data=fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert said in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_what_is_no_upload_is_refused(hearing, audio):
    address, foreign = hearing[0], {"origin": "https://example.org"}
    assert upload(address, json={"model": "whisper"}).status_code == 415
    assert upload(address, files={"other": b"x"}).status_code == 400
    assert upload(address, files={"file": b"x" * 200_000}).status_code == 413
    assert upload(address, files={"file": SOUND}, headers=foreign).status_code == 403
    with pytest.raises(openai.NotFoundError):
        audio.create(model="other", file=("a.wav", SOUND))


def test_a_bundle_of_the_other_kind_is_refused(hearing, address):
    text = {"model": "whisper", "prompt": "hello"}
    answer = httpx.post(f"{hearing[0]}/v1/completions", json=text)
    assert answer.status_code == 400
    assert "hears, and reads no text" in answer.json()["error"]["message"]
    answer = upload(address, files={"file": SOUND})
    assert answer.status_code == 400
    assert "hears nothing" in answer.json()["error"]["message"]


def test_a_bundle_of_text_refuses_an_upload_unread(address):
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 99\r\n"
    with connect(address) as client:
        client.sendall(f"{head}\r\n".encode())
        assert b"400" in client.recv(100)  # and no byte of a body was sent


def test_a_text_that_was_cut_says_so(whisper):
    with listening(whisper, max_seconds=1e-6, max_sounds=1) as (address, _):
        for form in ("json", "verbose_json"):
            asked = {"response_format": form}
            answer = upload(address, files={"file": SOUND}, data=asked)
            assert answer.json()["finish_reason"] == "length"


def test_sounds_wait_for_memory(whisper):
    with listening(whisper, max_sounds=0, max_wait=0.01) as (address, _):
        assert upload(address, files={"file": SOUND}).status_code == 503


def test_forms_are_read_to_the_byte():
    data = b"\r\n--x\r\n--xy\x00\xff\r\n"
    head = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = b"--bound\r\n" + head + data + b"\r\n--bound--\r\n"
    kind = "multipart/form-data; boundary=bound"
    assert read_form(body, kind) == {"file": [data]}
    named = body.replace(b'"a"', '"\u00e9.wav"'.encode())
    assert read_form(named, kind) == {"file": [data]}
    for wrong, type_ in (
        (body, "multipart/form-data"),
        (body[:-6], kind),
        (b"", kind),
        (b"--bound\r\nno head\r\n--bound--", kind),
        (b"--bound\r\nA: b\r\n\r\nx\r\n--bound--", kind),
        (body.replace(b"--bound--", (b"--bound\r\n" + head + b"\r\n") * 40), kind),
        # What the standard library reads as RFC 2231, and fails at.
        (body, "multipart/form-data; boundary*=undefined''bound"),
        (body, f"multipart/form-data; boundary*{'9' * 5000}=bound"),
        (body.replace(b'name="file"', b"name*0*=a; name*=b"), kind),
    ):
        with pytest.raises(RequestError, match="not a multipart form"):
            read_form(wrong, type_)
