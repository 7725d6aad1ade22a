"""Writes a file of an English Whisper as a Hugging Face folder.

    python examples/real/unpack_whisper.py checkpoints/whisper-base.en.bin \\
        -o folders/whisper-base.en

reads the ggml files (.bin) of whisper.cpp, which hold the words too. OpenAI's own files
(.pt) hold none; they come from a ggml file, since all English Whispers have the same:

    python examples/real/unpack_whisper.py checkpoints/whisper-tiny.en.pt \\
        --words checkpoints/whisper-base.en.bin -o folders/whisper-tiny.en
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import torch
import transformers
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS

from jetdraft.errors import JetdraftError

GGML = 0x67676D6C
SIZES = (
    "n_vocab",
    *(f"n_audio_{name}" for name in ("ctx", "state", "head", "layer")),
    *(f"n_text_{name}" for name in ("ctx", "state", "head", "layer")),
    "n_mels",
)
"""The order of a ggml file's sizes, by OpenAI's names."""

WORDS = 50_257
"""Tokens of GPT-2, the last of them the end of the text."""

END, START, NO_TIMESTAMPS = WORDS - 1, WORDS, 50_362
SETTINGS = {
    "decoder_start_token_id": START,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "is_multilingual": False,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_initial_timestamp_index": 50,
    "begin_suppress_tokens": [220, END],
    "suppress_tokens": list(NON_SPEECH_TOKENS),
    "max_length": 448,
}
"""generation_config.json of the English checkpoints, without their alignment."""

NAMES = (
    (r"\.blocks\.", ".layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"attn\.query\.", "attn.q_proj."),
    (r"attn\.key\.", "attn.k_proj."),
    (r"attn\.value\.", "attn.v_proj."),
    (r"attn\.out\.", "attn.out_proj."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.ln(_post)?\.", ".layer_norm."),
)
"""What transformers calls the parts of a name of OpenAI's."""


@dataclass
class Whisper:
    """A checkpoint as its file has it: sizes, weights by OpenAI's names, words."""

    sizes: dict[str, int]
    weights: dict[str, torch.Tensor]
    words: list[bytes] = field(default_factory=list)


def unpack(file: Path, words: Path | None, output: Path) -> None:
    """Write the folder `output`, which must not exist; raises `JetdraftError`."""
    if output.exists():
        raise JetdraftError(f"{output} exists; give a new folder")
    whisper = read(file)
    tokens = read(words).words if words else whisper.words
    if len(tokens) != WORDS or whisper.sizes["n_vocab"] != WORDS + 1607:
        raise JetdraftError(
            f"{words or file} has no words of an English Whisper; give a ggml file of "
            f"a checkpoint whose name ends in .en with --words"
        )
    model = transformers.WhisperForConditionalGeneration(config_of(whisper.sizes))
    places = model.state_dict()
    weights = {name_of(name): tensor for name, tensor in whisper.weights.items()}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    if set(weights) != set(places):
        raise JetdraftError(f"{file} has other weights than a Whisper; fetch it again")
    # ggml has the biases of convolutions as [n, 1].
    shaped = {n: tensor.reshape(places[n].shape) for n, tensor in weights.items()}
    model.load_state_dict(shaped)
    model.generation_config = transformers.GenerationConfig(**SETTINGS)
    model.save_pretrained(output)
    tokenizer_of(tokens).save_pretrained(output)
    bins = whisper.sizes["n_mels"]
    transformers.WhisperFeatureExtractor(feature_size=bins).save_pretrained(output)


def read(file: Path) -> Whisper:
    """Read a .bin of ggml or a .pt of OpenAI; raises `JetdraftError`."""
    try:
        if file.suffix != ".pt":
            with file.open("rb") as handle:
                return read_ggml(handle)
        contents = torch.load(file, weights_only=True)
        weights = {n: t.float() for n, t in contents["model_state_dict"].items()}
        return Whisper(contents["dims"], weights)
    except (OSError, KeyError, ValueError, struct.error, RuntimeError) as error:
        raise JetdraftError(
            f"{file} cannot be read as a Whisper ({error}); fetch it again"
        ) from error


def read_ggml(file: IO[bytes]) -> Whisper:
    """Read a ggml file: sizes, mel filters, words, tensors."""
    numbers = struct.unpack("<12i", file.read(48))
    if numbers[0] != GGML:
        raise ValueError("it is no ggml file")
    sizes = dict(zip(SIZES, numbers[1:11], strict=True))
    bins, frequencies = struct.unpack("<2i", file.read(8))
    file.seek(4 * bins * frequencies, 1)
    words = [
        file.read(*struct.unpack("<I", file.read(4)))
        for _ in range(*struct.unpack("<i", file.read(4)))
    ]
    weights = {}
    while header := file.read(12):
        rank, length, kind = struct.unpack("<3i", header)
        shape = struct.unpack(f"<{rank}i", file.read(4 * rank))[::-1]
        name = file.read(length).decode()
        if kind not in (0, 1):
            raise ValueError("its weights are quantized")
        dtype = np.dtype("<f2" if kind else "<f4")
        data = file.read(math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(data, dtype).reshape(shape)
        weights[name] = torch.from_numpy(array.astype(np.float32))
    return Whisper(sizes, weights, words)


def name_of(name: str) -> str:
    """transformers' name of a weight, from OpenAI's."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return f"model.{name}"


def config_of(sizes: dict[str, int]) -> transformers.WhisperConfig:
    """The sizes of a checkpoint, in transformers' words."""
    return transformers.WhisperConfig(
        vocab_size=sizes["n_vocab"],
        num_mel_bins=sizes["n_mels"],
        d_model=sizes["n_text_state"],
        encoder_layers=sizes["n_audio_layer"],
        encoder_attention_heads=sizes["n_audio_head"],
        encoder_ffn_dim=4 * sizes["n_audio_state"],
        decoder_layers=sizes["n_text_layer"],
        decoder_attention_heads=sizes["n_text_head"],
        decoder_ffn_dim=4 * sizes["n_text_state"],
        max_source_positions=sizes["n_audio_ctx"],
        max_target_positions=sizes["n_text_ctx"],
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )


def tokenizer_of(words: list[bytes]) -> transformers.WhisperTokenizer:
    """A tokenizer of words in the order of their merges; special tokens follow."""
    letters = bytes_to_unicode()
    spelled = ["".join(letters[byte] for byte in word) for word in words[:END]]
    ranks = {word: rank for rank, word in enumerate(words[:END])}
    merges = [merge_of(word, ranks) for word in words[:END] if len(word) > 1]
    tokenizer = transformers.WhisperTokenizer(
        vocab={**{word: id for id, word in enumerate(spelled)}, "<|endoftext|>": END},
        merges=[tuple("".join(letters[b] for b in part) for part in m) for m in merges],
    )
    tokenizer.add_tokens([AddedToken(n, special=True) for n in special_names()])
    times = [AddedToken(f"<|{tick * 0.02:.2f}|>") for tick in range(1501)]
    tokenizer.add_tokens(times)
    return tokenizer


def special_names() -> list[str]:
    """The special tokens from the start token on, without timestamps."""
    languages = transformers.models.whisper.tokenization_whisper.LANGUAGES
    rest = ["translate", "transcribe", "startoflm", "startofprev"]
    rest += ["nospeech", "notimestamps"]
    codes = list(languages)[: NO_TIMESTAMPS - START - len(rest)]
    return [f"<|{name}|>" for name in ("startoftranscript", *codes, *rest)]


def merge_of(word: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that a word was made of: what merges of lower rank leave."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 2:
        pairs = [first + second for first, second in itertools.pairwise(parts)]
        place = min(range(len(pairs)), key=lambda n: ranks.get(pairs[n], len(ranks)))
        parts[place : place + 2] = [pairs[place]]
    return parts[0], parts[1]


def main() -> None:
    """Unpack the file of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", type=Path, help="a ggml file with the words")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        unpack(arguments.file, arguments.words, arguments.output)
    except JetdraftError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
