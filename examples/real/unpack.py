"""Writes a GGUF file as a Hugging Face folder of bf16 weights, as other tools want it.

    python examples/real/unpack.py checkpoints/smollm2-135m.gguf -o folders/smollm2-135m

jetdraft reads GGUF files itself and needs no folder; onnxruntime-genai and OpenVINO do,
and so do exports that choose their own recipe. Quantized weights come as the floats
they stand for. transformers reads them; the tokenizer and its chat template are those
of a jetdraft export.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers

from jetdraft.checkpoints.gguf import opened_gguf
from jetdraft.errors import JetdraftError

SHARD_SIZE = 2_000_000_000
"""Bytes of a shard, so that a checkpoint of 1.5 billion weights has several."""


def unpack(file: Path, output: Path) -> None:
    """Write the folder `output`, which must not exist; raises `JetdraftError`."""
    if output.exists():
        raise JetdraftError(f"{output} exists; give a new folder")
    with opened_gguf(str(file)) as gguf:
        config, tokenizer = gguf.config(), gguf.tokenizer_json()
        templates, special_tokens = gguf.chat_templates(), gguf.special_tokens()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    model.config = config
    model.tie_weights()
    model.hf_quantizer = None  # its weights are floats by now
    model.save_pretrained(output, max_shard_size=SHARD_SIZE)
    (output / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": [
            {"name": name, "template": text} for name, text in templates.items() if text
        ],
        **special_tokens,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Unpack the file of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        unpack(arguments.file, arguments.output)
    except JetdraftError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
