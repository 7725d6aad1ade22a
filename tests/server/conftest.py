import time

import pytest
from openai import OpenAI

from jetdraft import Pool
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.server import Limits
from jetdraft.server.app import Service
from tests.server.serving import served

LIMITS = Limits(
    max_body_bytes=20_000, max_new_tokens=400, max_waiting=40, max_wait=60.0
)


@pytest.fixture(scope="module")
def service(toy):
    with Pool(toy, 2, threads=1) as pool:
        yield Service(pool, "toy", LIMITS)


@pytest.fixture
def fresh(service):
    return Service(service.pool, "toy", LIMITS)


@pytest.fixture(scope="module")
def address(service):
    with served(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(service):
    return service.pool.models[0].twin()


@pytest.fixture
def slow(monkeypatch):
    """Every token takes 20 ms more: a long text takes 8 seconds."""
    choose = Chooser.choose

    def slowly(*arguments):
        time.sleep(0.02)
        return choose(*arguments)

    monkeypatch.setattr(Chooser, "choose", slowly)
