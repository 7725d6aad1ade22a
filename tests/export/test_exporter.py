import inspect
import json
import os
import shutil
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx_ir as ir
import pytest
import transformers
from tokenizers import Tokenizer

import jetdraft
from jetdraft import CheckpointError, DeviceError, OptionError, OutputError, PairError
from jetdraft.cli.export import command
from jetdraft.contracts.tensors import CAPACITY, MAX_WIDTH
from jetdraft.export import exporter, graphs, measures
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.request import export as public_export
from jetdraft.export.seams import warn_of_length
from jetdraft.quant import weights
from jetdraft.quant.choice import KL_BOUND
from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import GRIDS, Recipe
from tests import cases, edit_json, same_text, tiny
from tests.programs import ROOT, python

SMALL = {"capacity": 64, "max_width": 16}
PROMPT = " the self"


def checkpoint(folder: Path, tokenizer: bool = True, **changes) -> str:
    return str(
        tiny.save_checkpoint(
            folder, tiny.drafter_config(**changes), tokenizer=tokenizer
        )
    )


def operators(bundle: jetdraft.Bundle) -> Counter[str]:
    graph = ir.load(bundle.path / bundle.target.file).graph
    return Counter(node.op_type for node in graph)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("exporter") / "checkpoint")


@pytest.fixture
def no_tracing(monkeypatch):
    def trace(*_):
        pytest.fail("bad input was noticed too late")

    monkeypatch.setattr(graphs, "trace", trace)


def test_an_export_says_when_it_asks_the_hub(tmp_path, monkeypatch):
    error, stages = CheckpointError("there is no network"), []
    monkeypatch.setattr(exporter, "check_exportable", Mock(side_effect=error))
    for source in ("some/model", str(tmp_path)):
        with pytest.raises(CheckpointError):
            export(source, tmp_path / "out", progress=lambda *step: stages.append(step))
    assert stages == [("ask the hub", 0, 1), ("load", 0, 1)]


def test_pair_becomes_a_bundle(bundle, pair):
    opened = jetdraft.Bundle.open(bundle)
    assert list(opened.graphs) == ["target", "drafter"]
    assert opened.eos_token_ids == (0,)
    assert opened.target.source == str(pair.target)
    assert Recipe.from_json(opened.target.quantization) == Recipe("int8", 32)
    assert opened.target.contract.kv_shapes == ((2, 16),) * 3
    assert opened.drafter.contract.kv_shapes == ((1, 16),)
    assert opened.target.contract.capacity == opened.drafter.contract.capacity == 256
    assert {"torch", "transformers", "onnxruntime"} <= set(opened.tools)


def test_bundle_keeps_the_tokenizer(bundle, pair):
    original = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    kept = Tokenizer.from_file(str(jetdraft.Bundle.open(bundle).tokenizer))
    text = "def the(self): return 'ü'<|endoftext|>"
    assert kept.encode(text).ids == original.encode(text).ids


@cases("scheme, dtype", ("int4", "fp16"), ("int8", "fp32"), ("none", "fp16"))
def test_every_precision_loads_and_drafts_the_same_text(
    source, tmp_path, scheme, dtype
):
    options = {"drafter": source, "drafter_recipe": scheme, "dtype": dtype}
    made = tiny.exported(source, tmp_path / "bundle", scheme, **options)
    assert ("MatMulNBits" in operators(made)) == (scheme != "none")
    assert ("MatMul" in operators(made)) == (scheme == "none")
    assert made.target.contract.dtype == {"fp32": "float32", "fp16": "float16"}[dtype]
    model = jetdraft.load(made.path, threads=1)
    drafts = [{"method": "draft", "num_draft_tokens": 3}]
    way = {"temperature": 1.0, "seed": 1, "max_new_tokens": 24}
    [drafted] = same_text(model, drafts, [way], prompt=PROMPT)
    assert len(set(drafted.token_ids)) > 4, "too dull to prove anything"
    assert drafted.stats.tokens_per_pass > 1


@pytest.fixture(scope="module")
def replaced(bundle, tmp_path_factory) -> jetdraft.Bundle:
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    source = checkpoint(folder, eos_token_id=[0, 7])
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    output = tmp_path_factory.mktemp("replaced") / "bundle"
    shutil.copytree(bundle, output)
    return export(source, output, options=ExportOptions(**SMALL))


def test_a_bundle_is_replaced_and_drafts_by_lookup_without_a_drafter(replaced):
    assert replaced.drafter is None
    assert not list(replaced.path.glob("drafter*"))
    assert Recipe.from_json(replaced.target.quantization) == Recipe("int4", 128)
    assert replaced.target.contract.capacity == 64
    assert os.listdir(replaced.path.parent) == ["bundle"]
    assert replaced.eos_token_ids == (0, 7)
    assert (replaced.path / "chat_template.jinja").read_text() == "{{ messages }}"
    model = jetdraft.load(replaced.path, threads=1)
    assert model.methods == ("none", "lookup", "trigram")


def test_the_smallest_bundle_takes_and_gives_ids(tmp_path):
    source = checkpoint(tmp_path / "checkpoint", tokenizer=False)
    options = ExportOptions(capacity=16, max_width=2)
    odd = export(source, tmp_path / "bundle", options=options)
    assert odd.tokenizer is None
    model = jetdraft.load(odd.path, threads=1)
    result = model.generate(token_ids=[5, 6, 7], max_new_tokens=4)
    assert result.text == ""
    assert result.token_ids
    with pytest.raises(jetdraft.OptionError, match="no tokenizer"):
        model.generate(PROMPT)
    prompt = np.arange(1, 8)
    result = model.generate(token_ids=prompt, max_new_tokens=99, ignore_eos=True)
    assert result.finish_reason == "length"
    assert len(prompt) + len(result.token_ids) == 16


def test_export_is_silent_and_reports_its_progress(source, tmp_path, capfd):
    seen: dict[str, list[tuple[int, int]]] = {}
    export(
        source,
        tmp_path / "bundle",
        options=ExportOptions(**SMALL),
        progress=lambda stage, done, of: seen.setdefault(stage, []).append((done, of)),
    )
    assert capfd.readouterr() == ("", "")
    assert list(seen) == ["load", "trace target", "quantize target"]
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_failure_halfway_leaves_nothing(source, tmp_path, monkeypatch):
    fail = Mock(side_effect=RuntimeError("halfway"))
    monkeypatch.setattr(exporter, "_write_texts", fail)
    with pytest.raises(RuntimeError, match="halfway"):
        export(source, tmp_path / "bundle", options=ExportOptions(**SMALL))
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_tracing")
def test_a_drafter_of_unknown_tokens_has_about_as_many(source, tmp_path):
    other = checkpoint(tmp_path / "other", tokenizer=False, vocab_size=9999)
    said = r"has 9999 tokens, .* has 288, and without"
    tiny.refused(PairError, said, source, drafter=other)


def test_drafter_with_another_tokenizer_is_refused_before_a_weight_is_read(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        exporter.Checkpoint, "load", lambda *_: pytest.fail("weights were read")
    )
    other = checkpoint(tmp_path / "other", tokenizer=False)
    tiny.save_tokenizer(tmp_path / "other", tiny.WORDS[::-1])
    tiny.refused(PairError, "another tokenizer", source, drafter=other)


@cases("name", "nothing here", "./nothing", "empty")
@pytest.mark.usefixtures("no_tracing")
def test_missing_or_empty_checkpoint_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    tiny.refused(CheckpointError, "; give a folder", name)


@pytest.mark.usefixtures("no_tracing")
@cases(
    "file, content",
    ("config.json", b"not json"),
    ("config.json", b"{}"),
    ("config.json", json.dumps({"model_type": "nobody knows"}).encode()),
    ("model.safetensors", b""),
    ("model.safetensors", b"\xff" * 100),
    ("model.safetensors", None),
    ("tokenizer.json", b"not json"),
    ids=range(7),
)
def test_damaged_checkpoint_is_refused_in_one_line(source, tmp_path, file, content):
    folder = shutil.copytree(source, tmp_path / "checkpoint")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    tiny.refused(CheckpointError, str(folder), folder)


@pytest.mark.usefixtures("no_tracing")
def test_output_that_is_no_bundle_stays_untouched(source, tmp_path):
    (tmp_path / "precious").write_text("precious")
    with pytest.raises(OutputError, match="is not a bundle"):
        export(source, tmp_path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["precious"]


def test_a_pass_is_no_wider_than_the_buffers():
    with pytest.raises(OptionError, match="choose 2 to the capacity"):
        ExportOptions(capacity=64, max_width=65)


def test_linear_layers_of_any_kind_are_quantized(tmp_path):
    sizes = {"vocab_size": tiny.VOCAB_SIZE, "n_embd": 32, "n_layer": 1, "n_head": 2}
    sizes |= {"n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, initializer_range=0.2)
    checkpoint = tiny.save_checkpoint(tmp_path / "gpt2", config)
    nodes = operators(tiny.exported(checkpoint, tmp_path / "bundle", "int8"))
    assert nodes["MatMulNBits"] == 4 + 1
    assert not nodes["Gemm"] + nodes["MatMul"]


def test_graphs_have_no_paths_of_this_machine_and_a_compaction_no_weights(bundle):
    place = str(Path(jetdraft.__file__).parent).encode()
    assert place not in (bundle / "target.onnx").read_bytes()
    model = ir.load(bundle / jetdraft.Bundle.open(bundle).target.compaction_file)
    assert not model.graph.initializers
    assert {node.op_type for node in model.graph} == {"Gather", "TensorScatter"}


def test_damaged_tokenizer_is_refused(pair, tmp_path):
    drafter = shutil.copytree(pair.drafter, tmp_path / "drafter")
    file = drafter / "tokenizer.json"
    fields = json.loads(file.read_text())
    left, right = fields["model"]["merges"][0]
    del fields["model"]["vocab"][left + right]
    file.write_text(json.dumps(fields))
    said = r"tokenizer of .* cannot be read"
    tiny.refused(CheckpointError, said, pair.target, drafter=drafter)


def test_weights_that_do_not_fit_their_config_are_refused(pair, tmp_path):
    target = shutil.copytree(pair.target, tmp_path / "target")
    edit_json(target / "config.json", vocab_size=tiny.VOCAB_SIZE + 8)
    tiny.refused(CheckpointError, r"do not fit its config\.json", target)


@pytest.fixture
def sums(monkeypatch):
    seen, total = [], measures.second_moments
    watched = lambda *a: seen.append(a) or total(*a)  # noqa: E731
    monkeypatch.setattr(measures, "second_moments", watched)
    return seen


def test_what_was_measured_is_written(pair, tmp_path, monkeypatch, sums):
    late, rounding, options = [], weights.quantize, ExportOptions(None, **SMALL)
    monkeypatch.setattr(weights, "quantize", lambda *a: late.append(a) or rounding(*a))
    target, drafter = str(pair.target), str(pair.drafter)
    once = export(target, tmp_path / "once", drafter, options)
    assert once.target.quantization["scheme"] in GRIDS
    assert len({id(model) for model, *_ in sums}) == len(sums) == 2
    assert not late
    monkeypatch.setattr(Divergence, "rounded", lambda *_: {})
    twice = export(target, tmp_path / "twice", drafter, options)
    assert late
    for file in once.path.glob("*.onnx*"):
        assert file.read_bytes() == (twice.path / file.name).read_bytes()


def test_a_drafter_beside_a_given_recipe_has_importance(pair, tmp_path, sums):
    options = ExportOptions(Recipe("int4", 32), **SMALL)
    bundle = export(str(pair.target), tmp_path / "b", str(pair.drafter), options)
    assert bundle.drafter.quantization["scheme"] in GRIDS
    [(_, _, diagonal, _)] = sums
    assert diagonal


def test_both_graphs_read_the_same_weights(bundle):
    entry = jetdraft.Bundle.open(bundle).target
    chain, tree = (ir.load(bundle / file) for file in (entry.file, entry.tree_file))
    places = [
        {
            name: (value.const_value.location, value.const_value.offset)
            for name, value in model.graph.initializers.items()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        for model in (chain, tree)
    ]
    assert places[0] == places[1]
    assert {location for location, _ in places[0].values()} == {"target.onnx.data"}
    added = {v.name for v in tree.graph.inputs} - {v.name for v in chain.graph.inputs}
    assert added == {"draft_mask", "draft_start"}
    assert (bundle / entry.tree_file).stat().st_size < 200_000


def test_sliding_windows_leave_chains_only(tmp_path):
    sizes = {**tiny.SIZES, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    kinds = ["sliding_attention", "full_attention"]
    windows = {"sliding_window": 16, "query_pre_attn_scalar": 8, "layer_types": kinds}
    config = transformers.Gemma3TextConfig(**sizes, **windows)
    target = tiny.save_checkpoint(tmp_path / "target", config, seed=0)
    bundle = tiny.exported(target, tmp_path / "bundle")
    assert bundle.target.tree_file is None
    assert not list(bundle.path.glob("*tree*"))


WIDE = {"capacity": 64, "max_width": 4096}


def test_it_exports_a_pair(source, tmp_path):
    stages = []
    bundle = jetdraft.export(
        Path(source),
        tmp_path / "bundle",
        source,
        quantize="int8-rtn-b32",
        quantize_drafter="int4",
        progress=lambda stage, done, total: stages.append(stage),
        **WIDE,
    )
    assert Recipe.from_json(bundle.target.quantization) == Recipe("int8", 32)
    assert Recipe.from_json(bundle.drafter.quantization) == Recipe("int4", 32)
    assert bundle.target.contract.capacity == bundle.target.contract.max_width == 64
    assert {"load", "trace target", "quantize drafter"} <= set(stages)
    assert jetdraft.Bundle.open(tmp_path / "bundle").sha256 == bundle.sha256


def test_the_default_recipe_is_measured_on_a_text(source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(self):\n    return self.x\n" * 60)
    given, own = (
        jetdraft.export(source, tmp_path / name, calibration=file, **WIDE)
        for name, file in (("given", text), ("own", None))
    )
    measured = [bundle.target.quantization["kl"] for bundle in (given, own)]
    assert measured[0] != measured[1]
    assert all(0 < kl <= KL_BOUND for kl in measured)


@cases(
    "options, error, fact",
    ({"drafter_provider": "cpu"}, OptionError, "give --drafter too"),
    ({"device": "abacus"}, DeviceError, "abacus"),
    ({"device": "orin-nano-4gb", "drafter": "org/name"}, OptionError, "--device"),
)
def test_bad_options_are_refused_before_anything_is_written(
    source, tmp_path, options, error, fact
):
    with pytest.raises(error, match=fact):
        jetdraft.export(source, tmp_path / "bundle", **options)
    assert os.listdir(tmp_path) == []


def test_the_function_and_its_package_have_one_name():
    code = """
import sys
import jetdraft
sys.modules["torch"] = None
before = jetdraft.export
import jetdraft.export.request
assert jetdraft.export is before
try:
    jetdraft.export("target", "bundle")
except jetdraft.JetdraftError as error:
    print(error)
"""
    expected = "exporting needs torch; pip install 'jetdraft[cpu,export]'\n"
    assert python(code, cwd=ROOT) == expected


def test_the_verb_has_the_same_signature():
    assert inspect.signature(jetdraft.export) == inspect.signature(public_export)
    parameters = inspect.signature(public_export).parameters
    assert set(parameters) - {"progress"} == {param.name for param in command.params}
    for param in command.params:
        if not param.required:
            default = param.to_info_dict()["default"]
            several = () if param.multiple and default is None else default
            assert parameters[param.name].default == several


def test_defaults_are_the_same_everywhere():
    options = ExportOptions()
    assert (options.capacity, options.max_width) == (CAPACITY, MAX_WIDTH)
    assert MAX_WIDTH == 128


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}


def model(config):
    return transformers.AutoModelForCausalLM.from_config(config)


def test_an_export_warns_of_rows_that_no_training_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "trace", None)  # it warns before it traces
    config = tiny.llama_config(num_hidden_layers=1, max_position_embeddings=48)
    source = tiny.save_checkpoint(tmp_path / "checkpoint", config)
    options = ExportOptions(Recipe("none"), capacity=64, max_width=16)
    said = "LlamaForCausalLM was trained on texts of 48 tokens.* hold 64.*--capacity 48"
    with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):
        exporter.export(str(source), tmp_path / "bundle", options=options)


def test_frequencies_of_each_kind_of_layer_count():
    config = transformers.Gemma3TextConfig(
        **{**tiny.SIZES, "num_hidden_layers": 2},
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": LOCAL, "full_attention": LOCAL},
    )
    with pytest.warns(UserWarning, match="texts of 512 tokens"):
        warn_of_length(model(config), 513)


@cases(
    "config, capacity",
    (tiny.llama_config(), 512),
    (tiny.llama_config(rope_parameters=YARN), 2048),
    (transformers.BloomConfig(vocab_size=288, hidden_size=64, n_head=4), 4096),
    ids=["short", "scaled", "no positions"],
)
def test_nothing_is_said_of_others(config, capacity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_length(model(config), capacity)
