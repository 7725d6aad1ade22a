import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import processors

import jetdraft
from jetdraft import CheckpointError, LengthError, OptionError, Pool, errors
from jetdraft.server import Limits
from jetdraft.server.app import Service
from tests import tiny
from tests.programs import assert_refused
from tests.programs import jetdraft as run
from tests.server.serving import served
from tests.tiny import exported, exported_model, refused

SIZES = {**tiny.SIZES, "head_dim": 16}
TEXTS = ["def f(self):", "x", "for the range in return " * 3, ""]
PROMPTS = {"query": "find the return: ", "document": ""}
BEGIN = "sentence_transformers.models."


class Kind(NamedTuple):
    config: Any
    pooling: str
    dense: int = 0


KINDS = {
    "last": Kind(transformers.Qwen3Config(**SIZES), "lasttoken"),
    "mean": Kind(transformers.Qwen3Config(**SIZES), "mean_tokens"),
    "both ways": Kind(
        transformers.Gemma3TextConfig(
            **SIZES,
            use_bidirectional_attention=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=16,
        ),
        "mean_tokens",
        48,
    ),
}


def save(folder: Path, kind: Kind, **pooling: Any) -> Path:
    torch.manual_seed(1)
    transformers.AutoModel.from_config(kind.config).save_pretrained(folder)
    tokenizer, end = tiny.tokenizer(), tiny.END_OF_TEXT
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, 0)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end
    ).save_pretrained(folder)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    fields = {f"pooling_mode_{mode}": mode == kind.pooling for mode in modes}
    write(folder / "1_Pooling", {**fields, "include_prompt": True, **pooling})
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    for place, sizes in enumerate([(64, 80), (80, kind.dense)] if kind.dense else ()):
        path = f"{place + 2}_Dense"
        identity = "torch.nn.modules.linear.Identity"
        write(folder / path, {"bias": False, "activation_function": identity})
        weight = torch.randn(*sizes[::-1])
        save_file({"linear.weight": weight}, folder / path / "model.safetensors")
        steps.append(("Dense", path))
    steps.append(("Normalize", "9_Normalize"))
    modules = [{"type": BEGIN + name, "path": path} for name, path in steps]
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def write(folder: Path, fields: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))


def expected(folder: Path, kind: Kind, texts: list[str]) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state
        row = states[0].mean(0) if kind.pooling == "mean_tokens" else states[0, -1]
        for file in sorted(folder.glob("*_Dense/model.safetensors")):
            row = load_file(file)["linear.weight"] @ row
        rows.append(torch.nn.functional.normalize(row, dim=0))
    return torch.stack(rows).numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("embedding")
    for name, kind in KINDS.items():
        exported(save(folder / name, kind), folder / f"{name}-bundle")
    return {name: (folder / name, folder / f"{name}-bundle") for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_embeddings_are_those_of_transformers(made, name):
    folder, bundle = made[name]
    with jetdraft.load(bundle, threads=1) as model:
        found = model.embed(TEXTS)
        asked = model.embed(TEXTS, "query")
        assert model.embed(TEXTS[2:3])[0].tolist() == found[2].tolist()
        assert model.embed([]).shape == (0, found.shape[1])
    assert found.dtype == np.float32
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0)
    cosines = (found * expected(folder, KINDS[name], TEXTS)).sum(1)
    assert cosines.min() >= 0.9999
    texts = [PROMPTS["query"] + text for text in TEXTS]
    cosines = (asked * expected(folder, KINDS[name], texts)).sum(1)
    assert cosines.min() >= 0.9999
    assert (asked * found).sum(1).min() < 0.999  # the prompt matters


@pytest.mark.parametrize("name", KINDS)
def test_integers_keep_the_direction(made, tmp_path, name):
    folder, _ = made[name]
    with exported_model(folder, tmp_path / "bundle", "q8_0") as model:
        found = model.embed(TEXTS)
    wanted = expected(folder, KINDS[name], TEXTS)
    assert (found * wanted).sum(1).min() >= 0.99


def test_what_is_refused(made, tmp_path, toy):
    with jetdraft.load(made["both ways"][1], threads=1) as model:
        with pytest.raises(OptionError, match=r"no prompt 'x'; .*: query, document"):
            model.embed(["a"], "x")
        with pytest.raises(OptionError, match="a list of texts"):
            model.embed("a")
        with pytest.raises(LengthError, match="the capacity is 64"):
            model.embed(["x" * 100])
        with pytest.raises(OptionError, match=r"Model\.embed"):
            model.generate("a")
    with (
        jetdraft.load(toy, threads=1) as model,
        pytest.raises(OptionError, match="embeds none; export a checkpoint"),
    ):
        model.embed(["a"])
    target = made["last"][0]
    refused(OptionError, "leave --drafter and --head out", target, drafter=target)
    for change, said in (
        ({"pooling_mode_cls_token": True}, "pools by cls_token, lasttoken"),
        ({"include_prompt": False}, "leaves its prompts out"),
    ):
        folder = save(tmp_path / said, KINDS["last"], **change)
        refused(errors.UnsupportedModelError, said, folder)
    (folder / "modules.json").write_text("{}")
    refused(errors.UnsupportedModelError, "no step that pools", folder)
    (folder / "modules.json").write_text("[3]")
    refused(CheckpointError, "cannot load", folder)
    bert = transformers.BertConfig(**tiny.SIZES)
    folder = save(tmp_path / "bert", Kind(bert, "mean_tokens"))
    refused(errors.UnsupportedModelError, "with an encoder, a 'bert' model", folder)


def test_the_command_line(made, tmp_path):
    bundle, file = made["last"][1], tmp_path / "vectors.npy"
    texts = [word for text in TEXTS for word in ("-p", text)]
    with jetdraft.load(bundle, threads=1) as model:
        wanted = model.embed(TEXTS, "query")
    words = ("embed", bundle, *texts, "--prompt-name", "query", "-t", "1")
    lines = [json.loads(line) for line in run(*words).stdout.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    assert np.array([line["embedding"] for line in lines]) == pytest.approx(wanted)
    assert run(*words, "-o", file).exit_code == 0
    assert np.load(file).tolist() == wanted.tolist()
    assert_refused(run("generate", bundle, "-p", "hi"), "use jetdraft embed")
    assert_refused(
        run("embed", bundle, "-p", "a", "--prompt-name", "b"), "no prompt 'b'"
    )


def test_no_width_is_measured_while_it_is_idle(made):
    with jetdraft.load(made["last"][1], threads=1) as model:
        before = set(threading.enumerate())
        model.embed(TEXTS[:1])
        names = [thread.name for thread in set(threading.enumerate()) - before]
    assert "jetdraft-idle" not in names


def test_the_server(made):
    with Pool(made["both ways"][1], 1, threads=1) as pool:
        vectors = pool.models[0].twin().embed(TEXTS[:2])
        ids = pool.models[0].prompt(TEXTS[0]).tolist()
        with served(Service(pool, "tiny", Limits())) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
            make = client.embeddings.create
            found = make(model="tiny", input=TEXTS[:2])
            assert [entry.index for entry in found.data] == [0, 1]
            got = np.array([entry.embedding for entry in found.data])
            assert got == pytest.approx(vectors, abs=1e-6)
            raw = client.embeddings.with_raw_response.create
            raw = raw(model="tiny", input="a", user="b", extra_body={"store": True})
            assert raw.headers["x-jetdraft-ignored"] == "user, store"
            assert found.usage.total_tokens == found.usage.prompt_tokens > len(ids)
            for given in (TEXTS[0], ids, [ids]):
                one = make(model="tiny", input=given, encoding_format="float").data
                assert one[0].embedding == pytest.approx(vectors[0], abs=1e-6)
            cut = make(model="tiny", input=TEXTS[0], dimensions=5).data[0].embedding
            wanted = vectors[0][:5] / np.linalg.norm(vectors[0][:5])
            assert cut == pytest.approx(wanted, abs=1e-6)
            for wrong, said in (
                ({"input": []}, "1 to 2048 texts"),
                ({"input": [3.5]}, "1 to 2048 texts"),
                ({"dimensions": 49}, "48 dimensions"),
                ({"dimensions": []}, "not a number"),
                ({"encoding_format": "hex"}, "float or base64"),
                ({"extra_body": {"prompt_name": "x"}}, "no prompt 'x'"),
                ({"extra_body": {"colour": 1, "size": 2}}, "unknown field 'colour'"),
                ({"model": "other"}, "no model 'other'"),
            ):
                with pytest.raises(openai.APIStatusError, match=said) as error:
                    make(**{"model": "tiny", "input": "a", **wrong})
                assert error.value.status_code in (400, 404)
