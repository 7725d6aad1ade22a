"""Pictures in requests to the server, on the command line and from a camera."""

import base64
import json
import sys
from itertools import product

import numpy as np
import pytest
from PIL import Image

import jetdraft
from jetdraft.runtime.passes.pictures import cut
from jetdraft.server import Limits
from jetdraft.server.app import Service
from jetdraft.server.request_queue import MIN_ROWS, PrefixFolder
from tests.programs import ROOT, assert_refused, printed
from tests.programs import jetdraft as command
from tests.runtime import test_pictures as pictures
from tests.runtime.test_pictures import asked, encoded, image_of, picture, text_of
from tests.server.serving import served
from tests.server.test_dialects import MESSAGES, RESPONSES, post

CAMERA = ROOT / "examples" / "camera.py"
DATA = base64.b64encode(encoded(Image.fromarray(picture(8)))).decode()
URL = f"data:image/png;base64,{DATA}"
SHORT = {"model": "eyes", "max_tokens": 6, "temperature": 0, "stream": False}
CHAT = "/v1/chat/completions"
OLLAMA = {"stream": False, "options": {"num_predict": 6, "temperature": 0}}
OF_OPENAI = {"type": "image_url", "image_url": {"url": URL}}
OF_ANTHROPIC = {"type": "image", "source": {"type": "base64", "data": DATA}}
OF_RESPONSES = {"type": "input_image", "image_url": URL}
INPUT = asked(OF_RESPONSES, {"type": "input_text", "text": "a"})
OF_OLLAMA = [{"role": "user", "content": "a", "images": [DATA]}]
SEEN = {
    CHAT: SHORT | {"messages": asked(OF_OPENAI, text_of("a"))},
    MESSAGES: SHORT | {"messages": asked(OF_ANTHROPIC, text_of("a"))},
    RESPONSES: {"input": INPUT, "max_output_tokens": 6, "temperature": 0},
    "/api/chat": OLLAMA | {"messages": OF_OLLAMA},
    "/api/generate": OLLAMA | {"prompt": "a", "images": [DATA]},
}
UNSEEN = ["http://x/y.png", "data:image/png;base64,###", "x.png"]
FROM_URL = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
FROM_URL = asked(text_of("a"), FROM_URL)
BY_ID = [*INPUT, *asked({"file_id": "f"})]
TWO = [OF_OLLAMA[0] | {"images": [DATA, "###"]}]


def of_url(url, words):
    return CHAT, asked({"image_url": {"url": url}}), words


REFUSED = [  # Where an image stands, in the words of each API.
    *(of_url(url, "messages[0].content[0] must be an image") for url in UNSEEN),
    of_url("data:;base64,AAAA", "the image cannot be read"),
    (MESSAGES, FROM_URL, "messages[0].content[1] must be an image as data:"),
    (RESPONSES, BY_ID, "input[1].content[0] must be a text, or an image in base64"),
    ("/api/chat", TWO, "messages[0].images[1] must be an image in base64"),
]


@pytest.fixture(scope="module", params=pictures.FAMILIES)
def model(request, once):
    folder = pictures.folder_of(once, request.param)
    with jetdraft.load(folder / "bundle", threads=1) as model:
        yield model


def test_the_server_takes_pictures_in_every_dialect(model, tmp_path):
    said = model.chat(asked(image_of(picture(8)), text_of("a")), max_new_tokens=6).text
    with (
        jetdraft.Pool(model.bundle.path, 1, threads=1) as pool,
        served(Service(pool, "eyes", Limits(), images=tmp_path)) as address,
    ):
        (tmp_path / "x y.png").write_bytes(base64.b64decode(DATA))
        (tmp_path / "link.png").symlink_to(__file__)
        files = {"": 200, "x%20y.png": 200, "link.png": 400, "../a": 400}
        for (place, body), (name, expected) in product(SEEN.items(), files.items()):
            text, url = json.dumps(body), f"file://{tmp_path}/{name}"
            if name:
                text = text.replace(f'base64", "data": "{DATA}', f'url", "url": "{url}')
                text = text.replace(URL, url).replace(DATA, url)
            answer = post(address, place, {"model": "eyes", **json.loads(text)})
            assert answer.status_code == expected, (place, answer.text)
            if expected == 200:
                assert json.dumps(said)[1:-1] in json.dumps(answer.json()), place
            if expected == 200 and place == CHAT:
                asked_for = answer.json()["usage"]["prompt_tokens_details"]
                rows = cut(picture(8), model.bundle.vision).rows
                assert asked_for["image_tokens"] == rows
                assert answer.json()["choices"][0]["message"]["content"] == said
        for place, turns, words in REFUSED:
            field = "input" if place == RESPONSES else "messages"
            answer = post(address, place, {"model": "eyes", field: turns})
            assert answer.status_code == 400
            assert words in json.dumps(answer.json())


@pytest.mark.parametrize("model", ["smolvlm"], indirect=True)
def test_a_camera_and_the_command_line(model, tmp_path):
    bundle = model.bundle.path
    lines = printed(sys.executable, CAMERA, bundle, "--frames", 2).splitlines()
    assert [json.loads(line)["frame"] for line in lines] == [0, 1]
    (tmp_path / "x.png").write_bytes(encoded(Image.fromarray(picture(9))))
    greedy = ("-n", 4, "--temperature", 0, "--image")
    done = command("generate", bundle, "a", *greedy, tmp_path / "x.png")
    said = model.chat(asked(image_of(picture(9)), text_of("a")), max_new_tokens=4)
    assert done.stdout.startswith(said.text)
    for given, words in ((tmp_path, "not an image"), ("http://x", "would be fetched")):
        assert_refused(command("generate", bundle, "a", *greedy, given), words)
    lines = f"{'a ' * 300}\na\n/image y\n/image {tmp_path}/x.png\n/reset\na\n"
    done = command("chat", bundle, *greedy, tmp_path / "x.png", stdin=lines)
    alone = model.chat(asked(text_of("a")), max_new_tokens=4)
    assert done.stdout == f"{said.text}\n{alone.text}\n", "a refused turn keeps images"
    assert "has at least 697 tokens" in done.stderr
    assert "No such file" in done.stderr


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_the_beginning_before_a_marked_picture_is_saved(model, tmp_path):
    folder = PrefixFolder(tmp_path, "own", 10**9)
    text = "the " * (2 * MIN_ROWS)
    for seed in (1, 2):
        given = {"images": [picture(seed)], "max_new_tokens": 2, "method": "none"}
        with model.stream(text + pictures.PLACE, **given) as stream:
            list(stream)
        folder.save(model, stream.prompt)
    [file] = tmp_path.glob("own/*.npz")
    saved = np.load(file)["tokens"].tolist()
    assert saved == list(stream.prompt[: len(saved)])
    assert stream.prompt[len(saved)] == model.parts.picture_place
