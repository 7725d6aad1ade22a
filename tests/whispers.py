import io
import wave
from pathlib import Path

import numpy as np
import torch
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.tiny import VOCAB_SIZE, tokenizer

# A window of one second.
SLOTS = 50
# Words are 0 to 287; OpenAI's order of special tokens follows.
END, START = VOCAB_SIZE, VOCAB_SIZE + 1
LANGUAGES = {"<|en|>": START + 1, "<|de|>": START + 2}
TASKS = {"translate": START + 3, "transcribe": START + 4}
NO_TIMESTAMPS = START + 5
FIRST_TIMESTAMP = START + 6
TOKENS = FIRST_TIMESTAMP + SLOTS + 1
TIMESTAMPS = list(range(FIRST_TIMESTAMP, TOKENS))
SETTINGS = {
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_initial_timestamp_index": 10,
    "suppress_tokens": [7, 9, 11, START],
    "begin_suppress_tokens": [13, END],
}
MULTILINGUAL = {**SETTINGS, "lang_to_id": LANGUAGES, "task_to_id": TASKS}
MULTILINGUAL |= {"is_multilingual": True}


def config(**changes: object) -> WhisperConfig:
    fields = {"vocab_size": TOKENS, "num_mel_bins": 80, "d_model": 64, "init_std": 0.2}
    fields |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
    fields |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    fields |= {"max_source_positions": SLOTS, "max_target_positions": 64}
    fields |= {"decoder_start_token_id": START, "eos_token_id": END}
    fields |= {"bos_token_id": END, "pad_token_id": END}
    return WhisperConfig(**fields | changes)


def save(folder: Path, settings: dict[str, object] = MULTILINGUAL, **changes) -> Path:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config(**changes))
    # Else transformers would read the model's config in place of the file.
    settings = {**settings, "_from_model_config": False}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    words = tokenizer()
    names = [f"<|{place}|>" for place in range(TOKENS - VOCAB_SIZE)]
    words.add_special_tokens(names)
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=names[END - VOCAB_SIZE]
    ).save_pretrained(folder)
    return folder


def sound(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    """A tone with some noise, float32."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal(len(times))
    tone = np.sin(2 * np.pi * hertz * times) * (1 + np.sin(2 * np.pi * 3 * times))
    return (0.3 * tone + 0.01 * noise).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2) -> bytes:
    channels = samples.reshape(len(samples), -1)
    integers = np.clip(channels, -1, 1 - 1e-6) * 2.0 ** (8 * width - 1)
    if width == 1:
        data = (integers + 128).astype(np.uint8).tobytes()
    else:
        data = integers.astype("<i4").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels.shape[1])
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(data)
    return file.getvalue()


def extensible(data: bytes, kind: int = 1) -> bytes:
    """A WAV file whose format has the long name, as of 24 bits a sample; 1 is PCM."""
    guid = kind.to_bytes(2, "little") + bytes.fromhex("000000001000800000aa00389b71")
    bits = data[34:36]
    longer = b"\xfe\xff" + data[22:36] + b"\x16\x00" + bits + bytes(4) + guid
    size = (len(data) - 8 + 24).to_bytes(4, "little")
    return data[:4] + size + data[8:16] + b"\x28\x00\x00\x00" + longer + data[36:]
