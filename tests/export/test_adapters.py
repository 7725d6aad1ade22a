"""LoRA at run time, against transformers with the weights that peft merged."""

import gc
import json
import re
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import openai
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import jetdraft
from jetdraft import BundleError, CheckpointError, OptionError, Pool, StoreError
from jetdraft.bundle import Bundle, adapter_file
from jetdraft.runtime import model as module
from jetdraft.server import Limits
from jetdraft.server.app import Service
from tests import cases, tiny
from tests.programs import assert_refused
from tests.programs import jetdraft as run
from tests.server.serving import served
from tests.tiny import exported

PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]
HOW = {"token_ids": PROMPT, "max_new_tokens": 24, "ignore_eos": True}
ADAPTERS = {
    "some": {"r": 9, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all": {"r": 3, "target_modules": "all-linear", "use_rslora": True},
    "head": {"r": 4, "target_modules": ["lm_head"]},
}


class Made(NamedTuple):
    target: Path
    drafter: Path
    adapters: dict[str, Path]
    bundle: Bundle


def save_adapter(target: Path, folder: Path, **config: object) -> Path:
    """LoRA that matters, as after training: peft begins with B = 0."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(len(folder.name))
    settings = peft.LoraConfig(lora_alpha=8, task_type="CAUSAL_LM", **config)
    changed = peft.get_peft_model(model, settings)
    for name, weight in changed.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    changed.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A target whose query, key and value have biases and are one product."""
    folder = tmp_path_factory.mktemp("adapters")
    config = transformers.Qwen2Config(**tiny.SIZES, tie_word_embeddings=False)
    target = tiny.save_checkpoint(folder / "target", config)
    drafter = tiny.save_checkpoint(folder / "drafter", tiny.drafter_config())
    paths = {n: save_adapter(target, folder / n, **c) for n, c in ADAPTERS.items()}
    named = tuple(f"{name}={path}" for name, path in paths.items())
    how = {"drafter": drafter, "adapters": named, "fast": False}
    return Made(target, drafter, paths, exported(target, folder / "bundle", **how))


@pytest.fixture(scope="module")
def model(made):
    with jetdraft.load(made.bundle.path, threads=1) as model:
        yield model


def merged(target: Path, adapter: Path | None) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    if adapter is None:
        return model
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_logits_and_text_are_those_of_merged_weights(made, model, adapter):
    oracle = merged(made.target, made.adapters.get(adapter))
    changed = model.adapted(adapter) if adapter else model
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        wanted = oracle(ids).logits[0].numpy()
    changed.forget()
    changed.parts.target.cache.rewind(0)
    found = changed.parts.target.run(PROMPT).logits
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    text = oracle.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    plain = changed.generate(method="none", **HOW)
    assert plain.token_ids == text[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", ["lookup", "draft", "auto"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=str)
def test_drafts_change_no_text(model, adapter, method, sampling):
    changed, how = model.adapted(adapter), {**HOW, **sampling}
    plain = changed.generate(method="none", **how)
    changed.forget()
    assert changed.generate(method=method, **how).token_ids == plain.token_ids
    assert model.generate(method=method, **how).token_ids != plain.token_ids
    # Rows that are kept belong to one adapter, whoever generates in between.
    again = changed.generate(method=method, **how)
    assert again.token_ids == plain.token_ids
    assert again.stats.reused_tokens


def test_all_graphs_read_one_weights_file(made, tmp_path):
    def constants(file: Path) -> dict[str, onnx.TensorProto]:
        graph = onnx.load(file, load_external_data=False).graph
        return {tensor.name: tensor for tensor in graph.initializer}

    bare, path = exported(made.target, tmp_path / "bare").path, made.bundle.path
    plain = constants(path / "target-tree.onnx")
    assert plain.keys() == constants(bare / "target-tree.onnx").keys()
    for name in ADAPTERS:
        whole = constants(path / adapter_file(name))
        more = [n for n in whole if n not in plain]
        assert more
        assert all(n.startswith(f"adapter/{name}/") for n in more)
        stored = [t.external_data[0].value for t in whole.values() if t.external_data]
        assert {*stored} == {"target.onnx.data"}


def test_measurements_are_of_each_adapter(made, model):
    counts = {n: len(shares) for n, shares in made.bundle.adapters.items()}
    assert counts == dict.fromkeys(ADAPTERS, 4)
    files = {model.adapted(n).parts.profiles.file.name for n in ADAPTERS}
    assert files == {f"cpu-1-adapter-{name}.json" for name in ADAPTERS}


@cases(
    "recipe, config",
    ("q8_0", lambda: transformers.Qwen2Config(**tiny.SIZES)),
    ("int8-rtn", lambda: transformers.Phi3Config(**tiny.SIZES)),
    ("q8_0", tiny.HYBRIDS["qwen3_5"]),  # has no tree graph
)
def test_weights_of_integers(tmp_path, recipe, config):
    target = tiny.save_checkpoint(tmp_path / "target", config())
    folder = save_adapter(target, tmp_path / "a", r=9, target_modules="all-linear")
    bundle = exported(target, tmp_path / "bundle", recipe, adapters=(f"a={folder}",))
    with jetdraft.load(bundle.path, threads=1, adapter="a") as model:
        found = model.parts.target.run(PROMPT).logits.copy()
        model.forget()
        plain = model.generate(method="none", **HOW).token_ids
        assert model.generate(method="lookup", **HOW).token_ids == plain
    with torch.no_grad():
        wanted, before = (
            merged(target, adapter)(torch.tensor([PROMPT])).logits[0].numpy()
            for adapter in (folder, None)
        )
    assert np.abs(found - wanted).mean() < 0.2 * np.abs(before - wanted).mean()


def test_the_acceptance_of_each_adapter_is_measured(made):
    words = ("bench", made.bundle.path, "--methods", "draft", "--lengths", "4")
    words += ("--repeats", "1", "-n", "24", "-t", "1", "--json")
    shares = set()
    for more in ((), *(("--adapter", name) for name in ADAPTERS)):
        report = json.loads(run(*words, *more).stdout)
        [row] = [row for row in report["rows"] if row["num_draft_tokens"] == 4]
        assert report["machine"]["bundle"].endswith(f" with {more[1]}" if more else "")
        assert row["same_text"] == row["texts"]
        shares.add((row["acceptance_rate"], *row["accepted_by_position"]))
    assert len(shares) > 1, "each target accepts other drafts"


def test_a_learned_stop_is_of_one_adapter(made, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = (json.dumps({"token_ids": [40 + n, *PROMPT]}) for n in range(40))
    file.write_text("\n".join(lines))
    how = {"method": "draft", "drafting": {"stopping": "learned"}, **HOW}
    words = ("train", "acceptance", made.bundle.path, "-t", "1", "--prompts", file)
    words += ("--max-new-tokens", "32", "--temperature", "2")
    assert "acceptance-adapter-some.npz" in run(*words, "--adapter", "some").stderr
    with jetdraft.load(made.bundle.path, threads=1, adapter="some") as model:
        plain = model.generate(method="none", **HOW).token_ids
        assert model.generate(**how).token_ids == plain
        with pytest.raises(StoreError, match="train acceptance"):
            model.adapted("all").generate(**how)


def test_adapters_that_are_unused_are_freed(made, monkeypatch):
    monkeypatch.setattr(module, "MOST_ADAPTED", 2)

    def parts(changed):
        target = changed.parts.target
        return [*map(weakref.ref, (target.cache, target.sessions.any.session))]

    with jetdraft.load(made.bundle.path, threads=1) as model:
        some, opened = model.adapted("some"), parts(model.adapted("all"))
        kept = parts(some) + parts(model.adapted("some")) + parts(model)
        text = some.generate(**HOW).text
        kept += parts(model.adapted("head"))
        gc.collect()
        assert [ref() for ref in opened] == [None, None]
        assert None not in [ref() for ref in kept]
        model.adapted("all")
        assert some.generate(**HOW).text == text, "who holds a model may use it"
        assert model.adapted("some") is not some
    some.close()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_a_saved_prefix_is_of_one_adapter(model, tmp_path):
    file, changed = tmp_path / "prefix.npz", model.adapted("some")
    changed.save_prefix(file, PROMPT)
    changed.load_prefix(file)
    for other in (model, model.adapted("all")):
        with pytest.raises(BundleError, match="another bundle or adapter"):
            other.load_prefix(file)


def test_the_server_serves_each_by_name(made):
    how = {"max_tokens": 24, "prompt": PROMPT, "temperature": 0.0}
    how["extra_body"] = {"ignore_eos": True}
    with Pool(made.bundle.path, 1, threads=1) as pool:
        with served(Service(pool, "base", Limits())) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
            assert [m.id for m in client.models.list()] == ["base", *ADAPTERS]
            texts = {}
            for name in ("base", *ADAPTERS, "base", "some"):
                found = client.completions.create(model=name, **how)
                assert found.model == name
                text = found.choices[0].text
                assert texts.setdefault(name, text) == text
            with pytest.raises(openai.NotFoundError, match="ask for 'base' or 'some'"):
                client.completions.create(model="other", **how)
        for name in ADAPTERS:
            text = pool.models[0].adapted(name).generate(**HOW).text
            assert text == texts[name] != texts["base"]


def test_the_command_line(made, model):
    words = ("generate", made.bundle.path, "-p", "def f", "-n", "20", "-t", "1")
    for name in ADAPTERS:
        wanted = model.adapted(name).generate("def f", max_new_tokens=20).text
        assert run(*words, "--adapter", name).stdout == f"{wanted}\n"
    assert_refused(run(*words, "--adapter", "x"), "no adapter 'x'; it has: some, all")
    checked = run("check", made.bundle.path, "--adapter", "some", "-t", "1").stdout
    found = re.search(r"by position ([\d. ]+), at export (.+)", checked)
    assert found[1] == found[2], checked
    assert "verdict    pass" in checked
    words = ("export", made.target, "--adapter", "x", "-o", "x")
    assert_refused(run(*words), "NAME=FOLDER")


def test_what_is_refused(made, tmp_path, toy):
    source, target = made.adapters["some"], made.target

    def refused(said: str, error: type[Exception], *adapters: str, **options) -> None:
        with pytest.raises(error, match=said):
            exported(target, tmp_path / "bundle", adapters=adapters, **options)

    refused("with a new name", OptionError, f"a={source}", f"a={source}")
    refused("--select-kv out", OptionError, f"a={source}", select_kv=32)
    refused("cannot load", CheckpointError, f"a={tmp_path}")
    folder = save_adapter(target, tmp_path / "a", r=2, target_modules=["q_proj"])
    file, weights = (
        folder / f"adapter_{n}" for n in ("config.json", "model.safetensors")
    )
    config, parts = json.loads(file.read_text()), load_file(weights)
    for said, change in (
        ("use_dora", {"use_dora": True}),
        ("no LoRA", {"peft_type": "IA3"}),
    ):
        file.write_text(json.dumps({**config, **change}))
        refused(said, CheckpointError, f"a={folder}")
    file.write_text(json.dumps(config))
    key = min(parts)
    for changed in (
        {key: torch.zeros(2, 3)},
        {key: parts[key] * float("nan")},
        {"base_model.model.nowhere.lora_A.weight": parts[key].clone()},
    ):
        save_file({**parts, **changed}, weights)
        refused("fits no linear layer", CheckpointError, f"a={folder}")
    with pytest.raises(OptionError, match="it has: none; export with --adapter"):
        jetdraft.load(toy, threads=1, adapter="x")
