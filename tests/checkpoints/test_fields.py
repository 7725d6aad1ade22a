"""No field of a checkpoint that may change its text is passed over in silence."""

import functools
import inspect
import json
import re
import shutil
from operator import attrgetter, getitem

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import Keys
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

import jetdraft
from jetdraft import Bundle, CheckpointError, UnsupportedModelError
from jetdraft.checkpoints import defaults as module
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.defaults import FILE, WARNED, GenerationFields, rules_by_name
from jetdraft.checkpoints.gguf import GgufFile
from jetdraft.checkpoints.gguf_fields import FILE_FIELDS as GGUF_FILE
from jetdraft.checkpoints.gguf_fields import MODEL_FIELDS as GGUF_MODEL
from jetdraft.checkpoints.model_reader import load_tokenizer
from jetdraft.server.generation_request import GenerationRequest
from tests import cases, documents, edit_json, edit_manifest, ggufs, tiny
from tests.programs import jetdraft as command
from tests.sources import CONFIGS
from tests.sources import save as save_source

PAGE = documents.ROOT / "docs" / "checkpoints.md"
TABLES = {
    "generation_config.json": module.GENERATION_FIELDS,
    "with `do_sample`": module.SAMPLING_FIELDS,
    "of an encoder-decoder": module.SOURCE_FIELDS,
    "of a model that hears": module.SPEECH_FIELDS,
    "GGUF, behind the name of the architecture": GGUF_MODEL,
    "GGUF": GGUF_FILE,
}
"""The tables of the page, by the heads of their first columns."""
TEXT = "def the <|endoftext|> self .\nreturn 12"
TOKEN = {"content": "def", "special": False, "normalized": False}
TOKENIZER_FIELDS = dict.fromkeys(("add_bos_token", "add_eos_token"), True)
TOKENIZER_FIELDS |= {"add_prefix_space": True, "split_special_tokens": True}
TOKENIZER_FIELDS |= {"clean_up_tokenization_spaces": True, "do_lower_case": True}
TOKENIZER_FIELDS |= {"spaces_between_special_tokens": False, "legacy": False}
TOKENIZER_FIELDS |= {"bos_token": "<|endoftext|>", "eos_token": "self"}
TOKENIZER_FIELDS |= {
    "added_tokens_decoder": {"70": TOKEN | {"lstrip": True, "rstrip": False}},
    "additional_special_tokens": ["self"],
    "extra_special_tokens": {"image_token": "self"},
    "chat_template": "{{ messages }}",
    "model_max_length": 4,
    "use_default_system_prompt": True,
    **dict.fromkeys(("padding_side", "truncation_side"), "left"),
}
_FOR_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
SAMPLED, SAMPLES = {"do_sample": True}, {"temperature": 1.0, "top_k": 50}
OUT_OF_RANGE = {
    **{"temperature": (-0.1, "0.6", True, float("nan")), "top_p": (0, 1.5)},
    **{"top_k": (2.5, -1), "min_p": (1.0,), "repetition_penalty": (0, [1.1])},
}
MALFORMED = {
    **{"suppress_tokens": (5, ["a"]), "bad_words_ids": ([5], {"a": 1})},
    **{"stop_strings": ([5], {})},
}


def table(head, rows):
    yield f"| {head} | is | |"
    yield "| --- | --- | --- |"
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        yield f"| {names} | {row.fate} | {row.why} |"


@pytest.mark.parametrize("head", TABLES)
def test_the_page_has_all_rows(head):
    expected = "\n".join(table(head, TABLES[head]))
    assert expected in PAGE.read_text(), f"docs/checkpoints.md needs:\n{expected}"


def test_every_field_of_transformers_has_a_row():
    rows, config = rules_by_name(module.GENERATION_FIELDS), GenerationConfig()
    documented = re.findall(r"^ +(\w+) ?\(`", inspect.getdoc(GenerationConfig), re.M)
    assert len(documented) > 50
    names = {*vars(config), *config.to_dict(), *documented}
    assert names - rows.keys() == set(), "name them in checkpoints/defaults.py"


def test_what_transformers_does_by_itself_is_no_reason_to_warn(tmp_path):
    fields = GenerationConfig._get_default_generation_params()
    for sampled in (False, True):
        source = written(tmp_path / "it", {**fields, "do_sample": sampled})
        assert GenerationFields.read(source).passed_over(True, False) == ()


WARNED_OF = {"num_beams": 4, "no_repeat_ngram_size": 3, "penalty_alpha": 0.6}
WARNED_OF |= {"encoder_no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.2}
WARNED_OF |= {"min_length": 5, "min_new_tokens": 5, "max_length": 400, "max_time": 2.0}
WARNED_OF |= {"max_new_tokens": 20, "exponential_decay_length_penalty": [5, 1.1]}
WARNED_OF |= {"forced_bos_token_id": 5, "forced_eos_token_id": 5}
WARNED_OF |= {"begin_suppress_tokens": [5], "bad_words_ids": [[5, 6], [7]]}
WARNED_OF |= {"force_words_ids": [[5]], "sequence_bias": [[[5], 1.0]]}
WARNED_OF |= {"constraints": [5], "watermarking_config": {"bias": 2.0}}
WARNED_OF |= {"token_healing": True, "dola_layers": "high", "guidance_scale": 1.5}
WARNED_OF |= {"epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4}
WARNED_OF |= {"typical_p": 0.9, "top_h": 0.4}


@pytest.mark.parametrize("name", [*WARNED_OF, "a_field_of_next_year"])
def test_what_is_not_honoured_is_warned_of_by_name(tmp_path, name):
    fields = {"do_sample": True, name: WARNED_OF.get(name, 5)}
    found = GenerationFields.read(written(tmp_path / "it", fields))
    lines = found.passed_over(False, False)
    assert [line.startswith(f"{FILE}: {name} ") for line in lines] == [True]


def test_all_names_are_tried_above():
    rows = rules_by_name(module.GENERATION_FIELDS, module.SAMPLING_FIELDS)
    assert WARNED_OF.keys() == {n for n, row in rows.items() if row.fate == WARNED}


def test_filters_count_only_where_something_is_drawn(tmp_path):
    source = written(tmp_path / "it", {"typical_p": 0.9, "top_h": 0.4})
    assert GenerationFields.read(source).passed_over(False, False) == ()


def test_config_json_is_read_where_generation_config_json_is_missing(tmp_path):
    fields = {"num_beams": 4, "hidden_size": 5, "bad_words_ids": [[6]], "min_p": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = GenerationFields.read(str(tmp_path))
    [line] = found.passed_over(True, False)
    assert line.startswith("config.json: num_beams 4: ")
    assert found.defaults(vocab_size=9) == {"logit_bias": {6: -1e30}}


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settled")
    source = tiny.save_checkpoint(folder / "checkpoint", tiny.drafter_config())
    fields = {"do_sample": True, **QWEN, "eos_token_id": [0, 3, 4]}
    (source / FILE).write_text(json.dumps(fields | {"no_repeat_ngram_size": 2}))
    edit_json(source / "tokenizer_config.json", image_token="<|endoftext|>")
    # Tokens that the text has without the settings, so that they change it.
    with pytest.warns(UserWarning, match="passed over: .* no_repeat_ngram_size 2: "):
        tiny.exported(source, folder / "free")
    with jetdraft.load(folder / "free") as model:
        free = model.generate("def", max_new_tokens=20, ignore_eos=True).token_ids
    never = list(dict.fromkeys(free))[:3]
    fields = {
        "suppress_tokens": [-1, never[0], 10**6],
        "bad_words_ids": [[never[1]], [0], [never[2]]],
        **{"repetition_penalty": 1.3, "num_beams": 1, "eos_token_id": 0},
    }
    (source / FILE).write_text(json.dumps(fields))
    tiny.exported(source, folder / "bundle")
    return source, folder, never


def test_a_bundle_keeps_defaults_every_end_of_text_and_names_of_tokens(settled):
    """An image_token made a bundle that could not be opened."""
    bundle = Bundle.open(settled[1] / "free")
    assert bundle.eos_token_ids == (0, 3, 4)
    assert bundle.generation == QWEN
    assert bundle.special_tokens["image_token"] == "<|endoftext|>"


def test_a_text_with_the_defaults_is_the_one_of_transformers(settled):
    source, folder, never = settled
    model = Checkpoint.load(str(source), torch.float32).model
    model.set_attn_implementation("eager")
    with jetdraft.load(folder / "bundle") as bundle:
        assert sorted(bundle.defaults["logit_bias"]) == sorted(never)
        ids = bundle.prompt("def the").tolist()
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=20, pad_token_id=0
        )[0, len(ids) :].tolist()
        for method in ("none", "lookup"):
            found = bundle.generate(
                token_ids=ids, max_new_tokens=20, method=method, **bundle.defaults
            )
            assert found.token_ids == expected
        plain = bundle.generate(token_ids=ids, max_new_tokens=20).token_ids
        assert plain != expected, "the settings change the text"


def test_check_shows_what_is_honoured_and_what_is_passed_over(settled):
    _, folder, _ = settled
    shown = command("check", folder / "free", "--no-run").stdout
    assert f"passed over {FILE}: no_repeat_ngram_size 2: the text may repeat" in shown
    shown = command("check", folder / "bundle", "--no-run").stdout
    assert "passed over" not in shown
    defaults = r"^defaults +repetition_penalty 1.3, logit_bias of \d+ tokens"
    assert re.search(defaults, shown, re.M)
    fields = json.loads(command("check", folder / "free", "--no-run", "--json").stdout)
    assert [line.split(":")[0] for line in fields["passed_over"]] == [FILE]


def test_a_bundle_without_the_record_still_opens(settled, tmp_path):
    _, folder, _ = settled
    old = shutil.copytree(folder / "free", tmp_path / "old")
    edit_manifest(old, passed_over=...)
    assert Bundle.open(old).passed_over == ()


def test_an_encoder_decoders_settings_may_lie_in_config_json(tmp_path):
    save_source(tmp_path, CONFIGS["marian"])
    (tmp_path / FILE).unlink()
    settings = {"num_beams": 4, "bad_words_ids": [[1]], "forced_bos_token_id": 7}
    edit_json(tmp_path / "config.json", **settings)
    found = Checkpoint.load(str(tmp_path), torch.float32)
    assert found.generation == {"logit_bias": {1: -1e30}}
    assert [line.split()[1] for line in found.passed_over] == ["num_beams"]
    assert found.start_token_ids == (2, 7)


def test_a_request_cannot_bring_back_what_is_never_written():
    defaults = {"logit_bias": {5: -1e30}, "stop": ["x"], "temperature": 0.5}
    for given, biases in (({}, [5]), ({"logit_bias": {"5": 100, "6": 1}}, [5, 6])):
        body = {"model": "m", "prompt": "a", **given}
        found = GenerationRequest.of(body, False, 16, defaults=defaults).options
        assert sorted(found["logit_bias"]) == biases
        assert found["logit_bias"][5] == -1e30
        assert found["stop"] == ["x"]


def test_stop_texts_of_the_checkpoint_count_unless_flags_give_others(settled, tmp_path):
    _, folder, _ = settled
    bundle = shutil.copytree(folder / "free", tmp_path / "bundle")
    edit_manifest(bundle, generation={})

    def text(*more):
        how = ["-n", 20, "--ignore-eos", "--repetition-penalty", 2, "--json"]
        said = command("generate", bundle, "def", *how, *more).stdout
        return json.loads(said)["text"]

    whole = text()
    first, second = [letter for letter in dict.fromkeys(whole) if letter.isalpha()][1:3]
    edit_manifest(bundle, generation={"stop": [second]})
    assert text() == whole[: whole.index(second)]
    assert text("--stop", first) == whole[: whole.index(first)]


def trained(folder):
    """A tokenizer as a training leaves it: it cuts to 8 tokens, and pads to 8."""
    tiny.save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer(["a", "b"], truncation=True, max_length=8, padding="max_length")
    tokenizer.save_pretrained(folder)
    fields = json.loads((folder / "tokenizer.json").read_text())
    assert fields["truncation"]["max_length"] == fields["padding"]["strategy"]["Fixed"]
    return folder


def test_truncation_and_padding_of_a_training_are_reset(tmp_path):
    expected = AutoTokenizer.from_pretrained(tiny.save_tokenizer(tmp_path / "plain"))
    source = trained(tmp_path / "trained")
    tiny.save_checkpoint(source, tiny.drafter_config(), tokenizer=False)
    found = Tokenizer.from_str(Checkpoint.load(str(source), torch.float32).tokenizer)
    for text in ("def", TEXT):
        assert found.encode(text).ids == expected(text).input_ids


@pytest.mark.parametrize("name", TOKENIZER_FIELDS)
@pytest.mark.filterwarnings("ignore")
def test_ids_and_texts_are_those_of_transformers(tmp_path, name):
    tiny.save_tokenizer(tmp_path)
    changed = {name: TOKENIZER_FIELDS[name]}
    edit_json(tmp_path / "tokenizer_config.json", **changed)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    found = Tokenizer.from_str(load_tokenizer(str(tmp_path)).backend_tokenizer.to_str())
    ids = expected(TEXT).input_ids
    assert (found.encode(TEXT).ids == ids) == (name != "split_special_tokens")
    assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids)
    assert f"`{name}`" in PAGE.read_text()


def test_the_page_has_the_settings_of_every_tokenizer():
    source = inspect.getsource(PreTrainedTokenizerBase.__init__)
    names = set(re.findall(r'kwargs\.pop\(\s*"(\w+)"', source))
    assert len(names) > 10
    internal = {"name_or_path", "verbose", "backend", "files_loaded", "max_len"}
    for name in names - internal:
        assert f"`{name}`" in PAGE.read_text(), name


CLEANS = {"clean_up_tokenization_spaces": True}


@cases(
    "field, said",
    ({"split_special_tokens": True}, "split_special_tokens True: "),
    (CLEANS, None),
    ({**CLEANS, _FOR_BPE: True}, "clean_up_tokenization_spaces True: "),
    ({"eos_token": "self"}, "eos_token self: "),
    ({}, None),
)
def test_settings_that_no_tokenizer_json_has_are_warned_of(tmp_path, field, said):
    tiny.save_checkpoint(tmp_path, tiny.drafter_config())
    edit_json(tmp_path / "tokenizer_config.json", **field)
    found = Checkpoint.load(str(tmp_path), torch.float32).passed_over
    assert len(found) == (said is not None)
    assert all(line.startswith(f"tokenizer_config.json: {said}") for line in found)


def keys(group=Keys):
    for name, value in vars(group).items():
        if not name.startswith("_"):
            yield from [value] if isinstance(value, str) else keys(value)


def test_every_key_of_llama_cpp_has_a_row():
    model, file = rules_by_name(GGUF_MODEL), rules_by_name(GGUF_FILE)
    found = list(keys())
    assert len(found) > 200
    for key in found:
        own = key.removeprefix("{arch}.")
        rules = file if own == key else model
        assert module.find_rule(own, rules), f"name {key} in gguf_fields"


def header(path, fields=(), family="llama"):
    writer = gguf.GGUFWriter(path, family)
    sizes = {"block_count": 2, "context_length": 4096, "embedding_length": 64}
    sizes |= {"feed_forward_length": 96, "vocab_size": 288}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    own = {f"{family}.{name}": value for name, value in sizes.items()}
    ggufs.adding(own | dict(fields))(writer)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight"):
        writer.add_tensor(name, np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(str(path))


def read(path, fields, family="llama"):
    file = header(path, fields, family)
    return file.passed_over(), file.config()


def refused_keys():
    for rows, prefix in ((GGUF_MODEL, "llama."), (GGUF_FILE, "")):
        for row in rows:
            if row.fate == module.REFUSED:
                yield from ((prefix + name, row) for name in row.names.split())


@cases("name, row", *refused_keys(), ids=lambda it: str(it)[:40])
def test_a_key_that_no_model_computes_with_is_refused(tmp_path, name, row):
    name = name.replace("*", "other")
    value = "adapter" if name == "general.type" else 7
    with pytest.raises((UnsupportedModelError, CheckpointError)) as refused:
        read(tmp_path / "a.gguf", {name: value})
    assert name.removeprefix("llama.") in str(refused.value) or name == "split.count"
    if row.neutral(0) and not row.neutral(value):
        assert read(tmp_path / "b.gguf", {name: 0})[0] == ()


def test_keys_that_are_not_honoured_are_warned_of(tmp_path):
    fields = {"general.sampling.xtc_probability": 0.5}
    fields |= {"general.sampling.penalty_repeat": 1.0, "llama.next_years_field": 5}
    fields |= {"tokenizer.ggml.next_year": "x"}
    fields |= {"quantize.imatrix.file": "calibration.dat"}
    fields |= {"another_program.version": "5"}
    lines, _ = read(tmp_path / "a.gguf", fields)
    assert [line.split()[1] for line in lines] == [
        "general.sampling.xtc_probability",
        "next_years_field",
        "tokenizer.ggml.next_year",
    ]


def test_a_temperature_before_the_filters_is_warned_of(tmp_path):
    """llama.cpp filters first, so that it keeps other tokens."""
    [line] = read(tmp_path / "a.gguf", {"general.sampling.temp": 2.0})[0]
    assert line.startswith("metadata: general.sampling.temp: the temperature comes")


def test_sampling_and_suppressed_tokens_become_defaults(tmp_path):
    fields = {"general.sampling.temp": 0.5, "general.sampling.min_p": 0.25}
    change = ggufs.adding(fields | {"tokenizer.ggml.suppress_tokens": [7, 9, 400]})
    config = tiny.llama_config(num_hidden_layers=1)
    file = ggufs.write_gguf(tmp_path / "model.gguf", config, change=change)
    assert Checkpoint.load(str(file.path), torch.float32).generation == {
        **{"temperature": 0.5, "top_k": 40, "top_p": 0.95, "min_p": 0.25},
        "logit_bias": {7: -1e30, 9: -1e30},
    }
    assert header(tmp_path / "b.gguf").generation().defaults() == {}
    only = header(tmp_path / "c.gguf", {"general.sampling.top_k": -1})
    others = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.05}
    assert only.generation().defaults() == others


def rope(*path):
    return lambda config: functools.reduce(getitem, path, config.rope_parameters)


TURNED = rope("partial_rotary_factor")


@cases(
    "family, key, value, expected",
    ("starcoder2", "rope.freq_base", 1e6, rope("rope_theta")),
    ("stablelm", "rope.freq_base", 5e5, rope("rope_theta")),
    ("starcoder2", "attention.layer_norm_epsilon", 0.125, "norm_epsilon"),
    ("nemotron", "attention.layer_norm_epsilon", 0.125, "norm_eps"),
    ("falcon", "attention.layer_norm_epsilon", 0.5, "layer_norm_epsilon"),
    ("phi3", "attention.sliding_window", 8, "sliding_window"),
    ("gemma2", "final_logit_softcapping", 5.0, "final_logit_softcapping"),
    ("gemma2", "attn_logit_softcapping", 5.0, "attn_logit_softcapping"),
    ("gemma3", "final_logit_softcapping", 5.0, "final_logit_softcapping"),
    ("gemma3", "rope.freq_base_swa", 5e4, rope("sliding_attention", "rope_theta")),
    ("gemma3", "attention.key_length", 32, "query_pre_attn_scalar"),
    ("stablelm", "rope.dimension_count", 8, lambda c: 16 * TURNED(c)),
)
def test_numbers_that_transformers_passes_over_are_set(
    tmp_path, family, key, value, expected
):
    lines, config = read(tmp_path / "a.gguf", {f"{family}.{key}": value}, family)
    assert lines == ()
    number = attrgetter(expected) if isinstance(expected, str) else expected
    assert number(config) == value


@cases(
    "family, key, value",
    ("llama", "attention.sliding_window", 8),
    ("qwen2", "attention.sliding_window", 8),
    ("llama", "attn_logit_softcapping", 30.0),
    ("llama", "rope.freq_base_swa", 5e4),
    ("qwen2", "rope.dimension_count", 8),
    ("llama", "rope.scaling.attn_factor", 0.5),
    ("llama", "attention.value_length", 32),
    ("gemma3", "attention.sliding_window_pattern", 2),
)
def test_numbers_that_a_family_does_not_have_are_refused(tmp_path, family, key, value):
    with pytest.raises(UnsupportedModelError, match=f"{family}.{key} {value}"):
        read(tmp_path / "a.gguf", {f"{family}.{key}": value}, family)


def written(folder, fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").touch()
    (folder / FILE).write_text(json.dumps(fields))
    return str(folder)


@cases(
    "fields, defaults",
    ({}, {}),
    (LLAMA, {"temperature": 0.6, "top_p": 0.9, "top_k": 50}),
    ({**SAMPLED, **QWEN}, QWEN),
    (SAMPLED, SAMPLES),
    ({**SAMPLED, "top_k": None, "top_p": 1}, {**SAMPLES, "top_p": 1}),
    ({**SAMPLED, "top_k": 0, "min_p": 0.15}, {**SAMPLES, "top_k": 0, "min_p": 0.15}),
    ({"min_p": 0.15}, {}),
    ({"stop_strings": "\n\n"}, {"stop": ["\n\n"]}),
    ({"stop_strings": ["a", "", "b"]}, {"stop": ["a", "b"]}),
    ({**LLAMA, "do_sample": False}, {}),
    ({"temperature": 0.6, "top_k": "never read"}, {}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"repetition_penalty": 1.0}, {}),
)
def test_defaults_are_those_that_would_be_used(tmp_path, fields, defaults):
    source = written(tmp_path / "checkpoint", fields)
    assert GenerationFields.read(source).defaults() == defaults


def test_a_checkpoint_without_the_file_has_no_defaults(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert GenerationFields.read(str(tmp_path)).defaults() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n, values in (OUT_OF_RANGE | MALFORMED).items() for v in values],
)
def test_a_value_that_cannot_be_is_refused(tmp_path, name, value):
    source = written(tmp_path / "checkpoint", {"do_sample": True, name: value})
    said = "is malformed" if name in MALFORMED else f"has {name}"
    with pytest.raises(
        CheckpointError, match=f"{said} .*; correct or remove it|NaN is not"
    ):
        GenerationFields.read(source)


@pytest.mark.parametrize("text", ["", "not json", "[1]", "5", "\x00"])
def test_a_damaged_file_is_refused(tmp_path, text):
    written(tmp_path / "checkpoint", {})
    (tmp_path / "checkpoint" / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GenerationFields.read(str(tmp_path / "checkpoint"))


def test_a_bad_value_is_refused_before_the_model_is_loaded(tmp_path):
    source = tiny.save_checkpoint(tmp_path / "checkpoint", tiny.drafter_config())
    (source / FILE).write_text(json.dumps({"do_sample": True, "temperature": -1}))
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has temperature -1"):
        Checkpoint.load(str(source), torch.float32)
