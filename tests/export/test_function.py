"""`jetdraft.export` in Python: as on the command line, and what it warns of."""

import inspect
import os
import warnings
from pathlib import Path

import pytest
import transformers

import jetdraft
from jetdraft.cli.export import command
from jetdraft.contracts.constants import CAPACITY, MAX_WIDTH
from jetdraft.errors import DeviceError, OptionError
from jetdraft.export import exporter, graphs
from jetdraft.export.exporter import ExportOptions
from jetdraft.export.request import export
from jetdraft.export.seams import warn_of_length
from jetdraft.quant.choice import KL_BOUND
from jetdraft.recipe import Recipe
from tests.programs import ROOT, python
from tests.tiny import SIZES, drafter_config, llama_config, save_checkpoint

SMALL = {"capacity": 64, "max_width": 4096}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("function") / "checkpoint"
    return save_checkpoint(folder, drafter_config())


def test_it_exports_a_pair(source, tmp_path):
    stages = []
    bundle = jetdraft.export(
        source,
        tmp_path / "bundle",
        source,
        quantize="int8-rtn-b32",
        quantize_drafter="int4",
        progress=lambda stage, done, total: stages.append(stage),
        **SMALL,
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
        jetdraft.export(source, tmp_path / name, calibration=file, **SMALL)
        for name, file in (("given", text), ("own", None))
    )
    measured = [bundle.target.quantization["kl"] for bundle in (given, own)]
    assert measured[0] != measured[1]
    assert all(0 < kl <= KL_BOUND for kl in measured)


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({"quantize": "int3"}, OptionError, "int3"),
        ({"capacity": 15}, OptionError, "capacity 15 is out of range"),
        ({"dtype": "bf16"}, OptionError, "choose fp32 or fp16"),
        ({"drafter_provider": "cpu"}, OptionError, "give --drafter too"),
        ({"device": "abacus"}, DeviceError, "abacus"),
        ({"device": "orin-nano-4gb", "drafter": "org/name"}, OptionError, "--device"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    source, tmp_path, options, error, fact
):
    with pytest.raises(error, match=fact):
        jetdraft.export(source, tmp_path / "bundle", **options)
    assert os.listdir(tmp_path) == []


def test_the_function_and_its_package_have_one_name():
    """Nothing needs torch before an export, which names the missing extra."""
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
    assert inspect.signature(jetdraft.export) == inspect.signature(export)
    parameters = inspect.signature(export).parameters
    assert set(parameters) - {"progress"} == {param.name for param in command.params}
    for param in command.params:
        if not param.required:
            assert parameters[param.name].default == param.to_info_dict()["default"]


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
    config = llama_config(num_hidden_layers=1, max_position_embeddings=48)
    save_checkpoint(tmp_path / "checkpoint", config)
    options = ExportOptions(Recipe("none"), capacity=64, max_width=16)
    said = "LlamaForCausalLM was trained on texts of 48 tokens.* hold 64.*--capacity 48"
    with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):
        exporter.export(
            str(tmp_path / "checkpoint"), tmp_path / "bundle", options=options
        )


def test_frequencies_of_each_kind_of_layer_count():
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": LOCAL, "full_attention": LOCAL},
    )
    with pytest.warns(UserWarning, match="texts of 512 tokens"):
        warn_of_length(model(config), 513)


@pytest.mark.parametrize(
    ("config", "capacity"),
    [
        (llama_config(), 512),
        (llama_config(rope_parameters=YARN), 2048),
        (transformers.BloomConfig(vocab_size=288, hidden_size=64, n_head=4), 4096),
    ],
    ids=["short", "scaled", "no positions"],
)
def test_nothing_is_said_of_others(config, capacity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_length(model(config), capacity)
