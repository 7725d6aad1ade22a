import pytest

from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices.providers import engine_folder, engine_options

CONTRACT = StepContract(
    vocab_size=100,
    capacity=512,
    max_width=64,
    dtype="float16",
    kv_shapes=((2, 16),),
    tree=True,
)
MACHINE = {"bundle": "b", "gpu": "Orin", "tensorrt": "10.16.2", "onnxruntime": "1.31.1"}


SIZES = ("min", "opt", "max")


def shapes(text):
    return dict(part.split(":") for part in text.split(","))


def test_an_engine_of_one_width_knows_one_shape(tmp_path):
    options = engine_options(CONTRACT, 4, tmp_path)
    least, usual, largest = (options[f"trt_profile_{name}_shapes"] for name in SIZES)
    assert shapes(least) == {
        "input_ids": "1x4", "position_ids": "1x4", "answer_rows": "4",
        "draft_mask": "65x4",
    }  # fmt: skip
    assert least == usual == largest
    assert options["trt_engine_cache_path"] == str(tmp_path / "width-4")


def test_an_engine_of_all_widths_is_fastest_at_a_prefill(tmp_path):
    options = engine_options(CONTRACT, None, tmp_path)
    sizes = [shapes(options[f"trt_profile_{name}_shapes"]) for name in SIZES]
    rows_and_answers = [(size["input_ids"], size["answer_rows"]) for size in sizes]
    assert rows_and_answers == [("1x1", "1"), ("1x64", "1"), ("1x64", "64")]


def test_onnxruntime_takes_texts():
    options = engine_options(CONTRACT, 2, None)
    assert options["trt_fp16_enable"] == "1"
    assert options["trt_engine_cache_enable"] == "0"
    assert all(isinstance(value, str) for value in options.values())


@pytest.mark.parametrize("changed", list(MACHINE))
def test_engines_of_the_same_machine_are_kept(tmp_path, recwarn, changed):
    """Those of another version are built again."""
    folder = engine_folder(tmp_path / "engines", MACHINE)
    (folder / "an.engine").write_text("built")
    assert engine_folder(tmp_path / "engines", MACHINE) == folder
    assert (folder / "an.engine").exists()
    other = {**MACHINE, changed: "another"}
    assert not recwarn
    with pytest.warns(UserWarning, match="built again"):
        assert engine_folder(tmp_path / "engines", other) == folder
    assert not (folder / "an.engine").exists()
    recwarn.clear()
    engine_folder(tmp_path / "engines", other)
    assert not recwarn


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="built at every load"):
        assert engine_folder(tmp_path / "file" / "engines", MACHINE) is None
