"""A tiny model learns to read a gauge, and its answers are drafted.

    python examples/gauge.py FOLDER [--minutes 15] [--pictures 200] [--threads 2]

It draws pictures of a needle and of coloured boxes, trains a model of SmolVLM's shape
to answer in JSON, writes FOLDER/checkpoint, exports FOLDER/fp32 and FOLDER/small, and
compares them with transformers on pictures that the training has not seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import jetdraft

Picture = npt.NDArray[np.uint8]
SIDE, PATCH, MOST, CAPACITY = 64, 8, 50, 4096  # Pixels, pixels, on the dial, tokens.
BATCH, RATE, WARM_UP, CHECK_STEPS, ENOUGH = 32, 1e-3, 0.03, 200, 0.995
HELD_OUT, FIRST_SEEN = range(1000, 1400), 1 << 20  # Seeds of pictures.
END, ASK, LENGTH = "<|endoftext|>", "Read the gauge.", 40
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
MARKS += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
COLOURS |= {"yellow": (220, 210, 50), "white": (245, 245, 245), "black": (10, 10, 10)}
PROPERTIES: dict[str, Any] = {
    "needle": {"type": "integer", "minimum": 0, "maximum": MOST},
    "boxes": {"type": "array", "items": {"enum": [*COLOURS]}, "maxItems": 4},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PROPERTIES}
SCHEMA |= {"required": [*PROPERTIES], "additionalProperties": False}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}assistant:"
)
ROWS = MARKS[0] * (SIDE // PATCH // 2) ** 2
PROMPT = f"user:{MARKS[1]}{MARKS[2]}{ROWS}{MARKS[1]}{ASK}\nassistant:"


def drawn(seed: int) -> tuple[Picture, str]:
    """A picture uint8 [64, 64, 3] and its answer: 270 degrees are 0 to `MOST`."""
    random = np.random.default_rng(seed)
    value, (left, top) = int(random.integers(0, MOST + 1)), random.uniform(-2, 2, 2)
    y, x = np.mgrid[:SIDE, :SIDE] - np.array([24 + top, 32 + left])[:, None, None]
    image = np.full((SIDE, SIDE, 3), random.uniform(70, 130, 3))
    image[np.hypot(x, y) < 21] = random.uniform(200, 235)
    angle = math.radians(270 * value / MOST - 135)
    along = np.clip(x * math.sin(angle) - y * math.cos(angle), 0, 18)
    away = np.hypot(x - along * math.sin(angle), y + along * math.cos(angle))
    image *= 1 - 0.9 * np.clip(1.8 - away, 0, 1)[..., None]
    boxes = [str(name) for name in random.choice([*COLOURS], random.integers(1, 5))]
    for place, name in enumerate(boxes):
        row, column = np.array([50, 3 + 15 * place]) + random.integers(-1, 2, 2)
        image[row : row + 11, column : column + 12] = COLOURS[name]
    noisy = (image + random.normal(0, 8, image.shape)).clip(0, 255)
    return noisy.astype(np.uint8), json.dumps({"needle": value, "boxes": boxes})


def save_tokenizer(folder: Path) -> Any:
    """Byte-level BPE whose tokens are words, signs and single digits."""
    made, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level(False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=[END, *MARKS], initial_alphabet=byte_level.alphabet()
    )
    made.train_from_iterator([PROMPT, *(drawn(n)[1] for n in HELD_OUT)], trainer)
    kind = transformers.PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=made, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def new_model(tokenizer: Any) -> Any:
    """A model of random weights: 0.4 M of vision and 0.9 M of text."""
    vision = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 3, "image_size": SIDE, "patch_size": PATCH}
    text = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    text |= {"vocab_size": len(tokenizer), "eos_token_id": 0, "pad_token_id": 0}
    text |= {"bos_token_id": None, "max_position_embeddings": CAPACITY}
    image = tokenizer.convert_tokens_to_ids(MARKS[0])
    both = {"vision_config": vision, "text_config": {**text, "model_type": "llama"}}
    config = transformers.SmolVLMConfig(**both, image_token_id=image, pad_token_id=0)
    return transformers.AutoModelForImageTextToText.from_config(config)


def pixels_of(pictures: list[Picture]) -> Tensor:
    """What the image processor makes of pictures of `SIDE`, [n, 1, 3, side, side]."""
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)[:, None]
    return stacked.float() / 127.5 - 1


def predicted(model: Any, tokenizer: Any, seeds: range) -> tuple[Tensor, Tensor]:
    """Logits [n, tokens, vocabulary] of answers, and their ids with -100 as padding."""
    pictures, answers = zip(*map(drawn, seeds), strict=True)
    ids = [torch.tensor(tokenizer(answer + END)["input_ids"]) for answer in answers]
    wanted = torch.nn.utils.rnn.pad_sequence(ids, True, -100)
    prompt = torch.tensor(tokenizer(PROMPT)["input_ids"]).expand(len(wanted), -1)
    both = torch.cat([prompt, wanted[:, :-1].clamp(min=0)], 1)
    how = {"pixel_values": pixels_of([*pictures]), "logits_to_keep": wanted.shape[1]}
    return model(both, **how).logits, wanted


def train(folder: Path, minutes: float) -> None:
    """Train until answers of unseen pictures are right, or for so many minutes."""
    torch.manual_seed(0)
    tokenizer = save_tokenizer(folder)
    model = new_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    start, step, right, spent = time.monotonic(), 0, 0.0, 0.0
    while spent < 1 and right < ENOUGH:
        rate = RATE * min(spent / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * spent))
        optimizer.param_groups[0]["lr"] = rate
        first = FIRST_SEEN + step * BATCH
        logits, wanted = predicted(model, tokenizer, range(first, first + BATCH))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, spent = step + 1, (time.monotonic() - start) / 60 / minutes
        if step % CHECK_STEPS == 0 or spent >= 1:
            with torch.no_grad():
                said, wanted = predicted(model, tokenizer, HELD_OUT)
            is_right = (said.argmax(-1) == wanted) | (wanted == -100)
            right = is_right.all(-1).float().mean().item()
            line = f"step {step}, {60 * minutes * spent:.0f} s: loss {loss:.4f}"
            print(f"{line}, {right:.3f} right", flush=True)
    model.save_pretrained(folder)
    edge, kind = {"longest_edge": SIDE}, "SmolVLMImageProcessor"
    processor = {"image_processor_type": kind, "size": edge, "max_image_size": edge}
    text = json.dumps({**processor, "do_image_splitting": False})
    (folder / "preprocessor_config.json").write_text(text)


def by_transformers(folder: Path, pictures: list[Picture]) -> list[str]:
    """The greedy answers of the checkpoint, by transformers, in one batch."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]]).expand(len(pictures), -1)
    how = {"max_new_tokens": LENGTH, "attention_mask": torch.ones_like(ids)}
    said = model.generate(ids, pixel_values=pixels_of(pictures), **how)
    ends = said[:, ids.shape[1] :]
    return [*map(str, tokenizer.batch_decode(ends, skip_special_tokens=True))]


def by_jetdraft(
    model: jetdraft.Model, pictures: list[Picture], **options: Any
) -> tuple[list[str], jetdraft.Stats, float]:
    """The answers to encoded pictures, their statistics, and milliseconds for each."""
    model.generate(ASK, max_new_tokens=1, **options)  # The first call is slower.
    model.forget()
    results, start = [], time.perf_counter()
    for picture in pictures:
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": ASK}]
        ask = [{"role": "user", "content": parts}]
        results.append(model.chat(ask, max_new_tokens=LENGTH, **options))
    ms = 1e3 * (time.perf_counter() - start) / len(pictures)
    stats = results[0].stats
    for result in results[1:]:
        stats.merge(result.stats)
    return [result.text for result in results], stats, ms


def main() -> None:
    """Train, export and measure; what lies in the folder already is taken from it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=15, help="of training at most")
    parser.add_argument("--pictures", type=int, default=200, help="to measure with")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    source, count = given.folder / "checkpoint", given.pictures
    if not source.is_dir():
        train(source, given.minutes)
    pictures, answers = map(list, zip(*map(drawn, range(count)), strict=True))
    wanted = by_transformers(source, pictures)
    print(f"transformers: {sum(map(str.__eq__, wanted, answers)) / count:.3f} right")
    print("bundle method K schema right equal tokens/pass accepted ms")
    fixed = itertools.product(("lookup", "trigram"), (None, 4))
    ways = [("none", None), *fixed, ("auto", None)]
    for name, recipe in {"fp32": "none", "small": None}.items():
        bundle = given.folder / name
        if not bundle.is_dir():
            jetdraft.export(source, bundle, quantize=recipe, capacity=CAPACITY)
        with jetdraft.load(bundle, threads=given.threads) as model:
            start = time.perf_counter()
            assert all(map(model.encode_image, pictures)), "give fewer --pictures"
            ms = 1e3 * (time.perf_counter() - start) / count
            print(f"{name:6} encoder: {ms:.3f} ms a picture")
            for schema, (method, length) in itertools.product((None, SCHEMA), ways):
                options = {"method": method, "num_draft_tokens": length}
                options |= {"json_schema": schema}
                texts, stats, ms = by_jetdraft(model, pictures, **options)
                shares = [sum(map(str.__eq__, texts, t)) for t in (answers, wanted)]
                figures = [*(n / count for n in shares), stats.tokens_per_pass or 0]
                figures += [stats.acceptance_rate or 0, ms]
                words = (
                    f"{name:6} {method:8}{length or '':3}{'yes' if schema else 'no':>4}"
                )
                print(words, *(f"{x:.3f}" for x in figures), flush=True)


if __name__ == "__main__":
    main()
