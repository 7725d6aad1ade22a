"""Eight clients with eight requests each: all answered, none mixed up, memory flat."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

from tests.server.serving import started

CLIENTS, REQUESTS = 8, 8
PROMPTS = ("The robot sees", '{"name": "Ann"', "The cat", "A blue ball")


def resident(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask(address, number):
    """What one client got: by turns whole and streamed, text and chat."""
    found = {}
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        for turn in range(REQUESTS):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            seed = 100 * number + turn
            asked = {"model": "toy", "temperature": 0.9, "seed": seed, "max_tokens": 24}
            if turn % 2:
                chunks = client.completions.create(**asked, prompt=prompt, stream=True)
                text = "".join(chunk.choices[0].text for chunk in chunks)
            else:
                text = client.completions.create(**asked, prompt=prompt).choices[0].text
            found[prompt, seed] = text
    return found


def test_all_are_answered_and_none_mixed_up(toy, model):
    with started(toy, "--models", "2") as (process, address):
        ask(address, CLIENTS)  # what is allocated once
        before = resident(process.pid)
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(lambda n: ask(address, n), range(CLIENTS)))
        after = resident(process.pid)
    texts = {key: text for found in answers for key, text in found.items()}
    assert len(texts) == CLIENTS * REQUESTS
    for (prompt, seed), text in texts.items():
        expected = model.generate(
            prompt, method="none", temperature=0.9, seed=seed, max_new_tokens=24
        )
        assert text == expected.text
    assert len(set(texts.values())) > CLIENTS * REQUESTS / 2
    assert after - before < 16e6, "memory stays"
