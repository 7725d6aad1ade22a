from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from jetdraft.methods.trigram.task import write_table
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.registry import AUTO, methods
from jetdraft.runtime.proposers.method import SIBLINGS, TREES
from jetdraft.runtime.proposers.model_proposer import THRESHOLDS
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from tests.families import TAG

TEXTS = (
    *("The robot sees", '{"name": "', "def fib(n):\n", "Hello", "A man takes the"),
    *("äöü 漢字 🙂", "aaaaaaaaaaaaaaaa", "1 2 3 1 2 3 1 2", "<|user|>Hi<|end|>", " "),
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
LIST = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z ]{3,20}\\."},
    {"regex": "(yes|no|The robot .*)"},
    {"json_schema": SCHEMA},
    {"json_schema": LIST},
    {"grammar": 'start: "a" start | "b"'},
    {"grammar": 'start: (WORD " ")+ WORD\nWORD: /[a-zA-Z]+/'},
    {"regex": f"({TAG}|[a-d ]){{1,9}}\\."},
    {"json_schema": {"enum": [TAG, "<|user|>", "the"]}},
    {"grammar": f'start: "{TAG}" /[a-z]+/ ("<|user|>" | ".")'},
)


def draw_prompt(draw: Random, model: Model, earlier: list[int]) -> list[int]:
    contract = model.bundle.target.contract
    most = contract.capacity
    kind = draw.choice(("text", "text", "noise", "repeated", "earlier", "long"))
    noise = [draw.randrange(contract.vocab_size) for _ in range(draw.randint(1, 12))]
    # What is drawn must not depend on an earlier text, which time may have cut.
    share, more = draw.random(), draw.randint(0, 2)
    if kind == "text" and model.parts.text.has_tokenizer:
        ids = model.parts.text.encode(draw.choice(TEXTS))
    elif kind == "repeated":
        ids = noise * draw.randint(1, 8)
    elif kind == "earlier" and earlier:
        ids = earlier[: 1 + int(share * len(earlier))] + noise[:more]
    elif kind == "long":
        ids = (noise * most)[: most - draw.randint(0, 6)]
    else:
        ids = noise
    return ids[:most] or [0]


def draw_options(draw: Random, model: Model) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": draw.choice((1, 2, 7, 16, 33, 60))}
    if draw.random() < 0.5:
        options |= _sampling(draw)
    if draw.random() < 0.3:
        options |= _penalties(draw, model.bundle.target.contract.vocab_size)
    if draw.random() < 0.2:
        options |= draw.choice(CONSTRAINTS)
    elif draw.random() < 0.6:
        options["ignore_eos"] = True
    if draw.random() < 0.2:
        options["stop"] = draw.sample([" ", "the", "e", "robot", ".", '"', "\n"], 2)
    if draw.random() < 0.2:
        options["logprobs"] = draw.choice((0, 1, 5))
    return options


def _sampling(draw: Random) -> dict[str, Any]:
    number = draw.choice((0, 1, 7, 2**31 - 1, 2**32 - 1, 2**63, -5))
    seed: object = number
    if draw.random() < 0.2:
        seed = draw.choice((np.int64, np.int32, np.uint32))(number % 2**31)
    options: dict[str, Any] = {
        "temperature": draw.choice((0.3, 0.8, 1.0, 1.5, 5.0)),
        "seed": seed,
    }
    if draw.random() < 0.5:
        name, values = draw.choice(
            (("top_k", (1, 3, 40, 1000)), ("top_p", (0.1, 0.9)), ("min_p", (0.05, 0.5)))
        )
        options[name] = draw.choice(values)
    return options


def _penalties(draw: Random, vocab_size: int) -> dict[str, Any]:
    penalties: dict[str, Any] = {
        "logit_bias": {
            draw.randrange(vocab_size): draw.choice((-100.0, -2.0, 3.0, 100.0))
            for _ in range(draw.randint(1, 4))
        },
        "repetition_penalty": draw.choice((0.8, 1.2, 5.0)),
        "presence_penalty": draw.choice((-1.0, 0.5, 2.0)),
        "frequency_penalty": draw.choice((-0.5, 0.3, 2.0)),
    }
    names = draw.sample(sorted(penalties), draw.randint(1, 3))
    return {name: penalties[name] for name in names}


def draw_drafting(
    draw: Random, model: Model, table: Path | None = None
) -> dict[str, Any]:
    names = list(methods() if draw.random() < 0.1 else model.methods[1:])
    if draw.random() < 0.15:
        method = ",".join(draw.sample(names, draw.randint(2, min(3, len(names)))))
    else:
        method = draw.choice([AUTO, *names])
    drafting: dict[str, Any] = {"method": method}
    settings = _settings(draw, method, table) if draw.random() < 0.5 else {}
    if settings:
        drafting["drafting"] = settings
    if draw.random() < 0.2:
        drafting["prediction"] = draw.choice(TEXTS) * draw.choice((1, 40))
    fixed = settings.keys() & {"branching", "tree_parents", "prune_threshold"}
    if not fixed and draw.random() < 0.7:
        drafting["num_draft_tokens"] = draw.choice((1, 2, 4, 5, 7, 15))
    return drafting


def _settings(draw: Random, method: str, table: Path | None) -> dict[str, Any]:
    if method == AUTO or "," in method:
        return {}
    names, settings = methods()[method].options.option_names(), dict[str, Any]()
    if "tree" in names and draw.random() < 0.6:
        settings |= _tree(draw)
    elif "stopping" in names and draw.random() < 0.6:
        settings["stopping"] = draw.choice(tuple(THRESHOLDS))
        settings["stop_threshold"] = draw.choice((0.0, 0.3, 0.9, 1.0))
    if "prune_threshold" in names and draw.random() < 0.4:
        settings["prune_threshold"] = draw.choice((0.0, 0.05, 0.5, 2.0, "auto"))
    if "table" in names and table is not None:
        settings["table"] = table
    if draw.random() < 0.3:
        settings["user"] = draw.choice(("", "ann", "bob"))
    return settings


def _tree(draw: Random) -> dict[str, Any]:
    tree = draw.choice(TREES)
    settings: dict[str, Any] = {"tree": tree}
    if tree == "k-ary":
        settings["branching"] = draw.choice(((1, 1, 1), (2, 1), (3, 2), (2, 2, 2)))
        settings["siblings"] = draw.choice(SIBLINGS)
    elif tree == "static":
        settings["tree_parents"] = tuple(
            draw.randint(0, row) for row in range(draw.randint(1, 7))
        )
    return settings


def draw_verifier(draw: Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"verifier": draw.choice(tuple(VERIFIERS))}
    if draw.random() < 0.7:
        settings |= {
            "tree": "k-ary",
            "branching": draw.choice(((1, 1, 1), (2, 2))),
            "siblings": draw.choice(SIBLINGS),
        }
    return {"method": "draft", "exact": False, "drafting": settings}


def table_of_texts(folder: Path, model: Model) -> Path:
    corpus, table = folder / "corpus.txt", folder / "table.npz"
    corpus.write_text("\n".join([*TEXTS] * 3), encoding="utf-8")
    write_table([corpus], model.bundle, table)
    return table


def words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
