from __future__ import annotations

import warnings

import pytest

from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices.providers import as_options
from jetdraft.devices.tensorrt import engine_folder, engine_options

CONTRACT = StepContract(
    vocab_size=100,
    capacity=512,
    max_width=64,
    dtype="float16",
    kv_shapes=((2, 16),),
    tree=True,
)
MACHINE = {"bundle": "b", "gpu": "Orin", "tensorrt": "10.16.2", "onnxruntime": "1.31.1"}


def shapes(text):
    return dict(part.split(":") for part in text.split(","))


def test_an_engine_of_one_width_knows_one_shape(tmp_path):
    options = engine_options(CONTRACT, 4, tmp_path)
    least = shapes(options.trt_profile_min_shapes)
    assert least == {
        "input_ids": "1x4",
        "position_ids": "1x4",
        "answer_rows": "4",
        "draft_mask": "65x4",
    }
    assert options.trt_profile_max_shapes == options.trt_profile_min_shapes
    assert options.trt_profile_opt_shapes == options.trt_profile_min_shapes
    assert options.trt_engine_cache_path == str(tmp_path / "width-4")


def test_an_engine_of_all_widths_is_fastest_at_a_prefill(tmp_path):
    options = engine_options(CONTRACT, None, tmp_path)
    rows_and_answers = [
        (shapes(text)["input_ids"], shapes(text)["answer_rows"])
        for text in (
            options.trt_profile_min_shapes,
            options.trt_profile_opt_shapes,
            options.trt_profile_max_shapes,
        )
    ]
    assert rows_and_answers == [("1x1", "1"), ("1x64", "1"), ("1x64", "64")]


def test_onnxruntime_takes_texts():
    options = as_options(engine_options(CONTRACT, 2, None))
    assert options["trt_fp16_enable"] == "1"
    assert options["trt_engine_cache_enable"] == "0"
    assert all(isinstance(value, str) for value in options.values())


def test_engines_of_the_same_machine_are_kept(tmp_path):
    folder = engine_folder(tmp_path / "engines", MACHINE)
    (folder / "an.engine").write_text("built")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine_folder(tmp_path / "engines", MACHINE) == folder
    assert (folder / "an.engine").exists()


@pytest.mark.parametrize("changed", list(MACHINE))
def test_engines_of_another_version_are_built_again(tmp_path, changed):
    folder = engine_folder(tmp_path / "engines", MACHINE)
    (folder / "an.engine").write_text("built")
    other = {**MACHINE, changed: "another"}
    with pytest.warns(UserWarning, match="built again"):
        assert engine_folder(tmp_path / "engines", other) == folder
    assert not (folder / "an.engine").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_folder(tmp_path / "engines", other)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="built at every load"):
        assert engine_folder(tmp_path / "file" / "engines", MACHINE) is None
