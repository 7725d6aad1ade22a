"""Requests whose texts a head drafts: the texts of plain decoding, to the byte."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from jetdraft import Pool
from jetdraft.server.app import Service
from tests.server.conftest import LIMITS
from tests.server.serving import served
from tests.toy_graphs import toy_eagle

PROMPT = "The robot sees the sensor and then"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WAYS = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0, "extra_body": {"json_schema": SCHEMA}},
    {"temperature": 0.8, "seed": 5, "extra_body": {"json_schema": SCHEMA}},
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    bundle = toy_eagle(tmp_path_factory.mktemp("served-head") / "bundle")
    with (
        Pool(bundle, 2, threads=1) as pool,
        served(Service(pool, "toy", LIMITS)) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, method, way, prompt=PROMPT, **more):
    body = {"method": method, **way.get("extra_body", {})}
    own = {name: value for name, value in way.items() if name != "extra_body"}
    return client.completions.create(
        model="toy", prompt=prompt, max_tokens=40, extra_body=body, **own, **more
    )


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "json", "json-sampled"])
def test_a_request_gets_the_text_of_plain_decoding(client, way):
    plain = ask(client, "none", way).choices[0].text
    for method in ("eagle", "eagle,lookup", "auto"):
        assert ask(client, method, way).choices[0].text == plain
        pieces = ask(client, method, way, stream=True)
        text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
        assert text == plain
    if "extra_body" in way:
        answer = json.loads(plain)
        assert isinstance(answer["b"], bool)
        assert answer["a"] <= 99


def test_requests_side_by_side(client):
    """Each model of a pool has a head with a cache of its own."""
    prompts = [f"{PROMPT} {number}" for number in range(6)]
    plain = [ask(client, "none", WAYS[0], p).choices[0].text for p in prompts]
    with ThreadPoolExecutor(3) as threads:
        texts = threads.map(
            lambda p: ask(client, "eagle", WAYS[0], p).choices[0].text, prompts * 3
        )
        assert list(texts) == plain * 3
