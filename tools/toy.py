"""Makes jetdraft/toy.zip, the bundle of `jetdraft.testing.toy_bundle`, in two minutes.

Texts come from templates and a seed, a tokenizer and two tiny Llamas are trained on
them, and the exporter makes the bundle. On one machine, and with the same versions of
torch and onnx, a second run gives the same bytes. In the development environment:

    python tools/toy.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import string
import tempfile
import zipfile
from pathlib import Path

# Read when they are imported: one thread adds up in one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.text.template import ChatTemplate, Message, user_message

OUTPUT = Path(__file__).parents[1] / "jetdraft" / "toy.zip"
END_OF_TEXT, END = "<|endoftext|>", "<|end|>"
SPECIAL = [END_OF_TEXT, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
VOCAB_SIZE = 384
DOCUMENTS = 6000
STEPS, ROWS, LENGTH, RATE = 1400, 8, 224, 4e-3
SYSTEM_SHARE = 0.3
TOOLS_SHARE = 0.3

TEMPLATE = """\
{%- if tools %}<|system|>Tools: {{ tools | tojson }}<|end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role ' ~ message.role) }}
{%- endif %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}
{{- '</tool_call>' }}{% endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

SENSORS = {
    "battery": (80, "percent"),
    "temperature": (21, "degrees"),
    "pressure": (3, "bar"),
    "speed": (2, "meters per second"),
    "distance": (15, "meters"),
    "light": (40, "lux"),
}
"""What the robot says without tools, and the units."""
READINGS = (
    "What is the {}?",
    "Tell me the {}.",
    "How is the {}?",
    "Please read the {} sensor.",
)
TALK = {
    "Hello": "Hello, I am a toy robot.",
    "Hi": "Hello, I am a toy robot.",
    "Who are you?": "I am a toy robot with six sensors.",
    "Which sensors do you have?": "I have " + ", ".join(SENSORS) + ".",
    "Stop": "I have stopped.",
    "Go on": "I am moving on.",
    "Thank you": "You are welcome.",
}
SYSTEMS = ("Be brief.", "You are a robot.", "You are a helpful assistant.")
UNKNOWN = "I do not know that."
NAMES = {"Ann": 7, "Bob": 42, "Eve": 31, "Max": 19, "Sue": 65, "Tom": 23}
WHO = ("The robot", "A robot", "The red robot", "The small robot", "A man", "The cat")
DOES = ("sees", "moves", "finds", "takes", "follows", "likes")
WHAT = ("a box", "the ball", "a blue ball", "the door", "a green box", "the dog")
WHERE = ("in the house", "in the garden", "on the table", "near the wall", "today")


def person(name: str) -> str:
    """A JSON object."""
    return json.dumps({"name": name, "age": NAMES[name]})


def sentence(choice: random.Random) -> str:
    """One of some thousand sentences."""
    return " ".join(map(choice.choice, (WHO, DOES, WHAT, WHERE))) + "."


def noise(choice: random.Random) -> str:
    """Words that mean nothing, in place of all that nobody has thought of."""
    letters = string.ascii_letters + string.digits + "?!.,äé"
    lengths = [choice.randint(1, 9) for _ in range(choice.randint(1, 6))]
    return " ".join("".join(choice.choices(letters, k=length)) for length in lengths)


def turn(choice: random.Random, tools: bool) -> list[Message]:
    """What is asked, and the answer."""
    kind = choice.choice(("reading", "reading", "reading", "talk", "person", "unknown"))
    if kind == "reading":
        return reading(choice, tools)
    if kind == "talk":
        asked, answer = choice.choice(list(TALK.items()))
    elif kind == "person":
        name = choice.choice(list(NAMES))
        asked, answer = f"Give me {name} as JSON.", person(name)
    else:
        asked, answer = choice.choice((sentence, noise))(choice), UNKNOWN
    return [user_message(asked), assistant(answer)]


def reading(choice: random.Random, tools: bool) -> list[Message]:
    """A sensor's value: learned by heart, or read by a tool."""
    sensor, (value, unit) = choice.choice(list(SENSORS.items()))
    asked = user_message(choice.choice(READINGS).format(sensor))
    if not tools:
        return [asked, assistant(f"The {sensor} is {value} {unit}.")]
    value = choice.randint(1, 99)
    function = {"name": "read_sensor", "arguments": {"sensor": sensor}}
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": json.dumps({sensor: value})}
    return [asked, call, result, assistant(f"The {sensor} is {value} {unit}.")]


def assistant(content: str) -> Message:
    """What the model says."""
    return {"role": "assistant", "content": content}


def tool(choice: random.Random) -> dict[str, object]:
    """The robot's tool as programs offer it, at more or less length."""
    sensor = {"type": "string", "enum": list(SENSORS)}
    parameters = {"type": "object", "properties": {"sensor": sensor}}
    about: dict[str, object] = {"name": "read_sensor"}
    if choice.random() < 0.5:
        about["description"] = sentence(choice)
    if choice.random() < 0.5:
        about["parameters"] = parameters
    return {"type": "function", "function": about}


def conversation(choice: random.Random, template: ChatTemplate) -> str:
    """Some turns, as the template shows them."""
    messages: list[Message] = []
    if choice.random() < SYSTEM_SHARE:
        order = choice.choice((*SYSTEMS, noise(choice)))
        messages.append({"role": "system", "content": order})
    tools = [tool(choice)] if choice.random() < TOOLS_SHARE else None
    for _ in range(choice.randint(1, 3)):
        messages += turn(choice, tools is not None)
    return template.render(messages, tools=tools).removesuffix("<|assistant|>")


def document(choice: random.Random, template: ChatTemplate) -> str:
    """A conversation, an object or some sentences."""
    kind = choice.choice(("chat", "chat", "chat", "person", "sentences"))
    if kind == "chat":
        return conversation(choice, template) + END_OF_TEXT
    if kind == "person":
        return person(choice.choice(list(NAMES))) + END_OF_TEXT
    # Whatever a text begins with, sentences follow.
    before = choice.choice(([], [], [noise(choice)], [choice.choice(list(TALK))]))
    sentences = [sentence(choice) for _ in range(choice.randint(1, 3))]
    return " ".join([*before, *sentences]) + END_OF_TEXT


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE: special tokens, all bytes, merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build(width: int, layers: int, heads: int) -> LlamaForCausalLM:
    """An untrained model with heads of 16, every second a KV head."""
    ends = [SPECIAL.index(END_OF_TEXT), SPECIAL.index(END)]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def batch(documents: list[Tensor], chosen: random.Random) -> Tensor:
    """Rows of `LENGTH` ids: a document's beginning decides what follows, so every row
    begins with one.
    """
    rows = []
    for _ in range(ROWS):
        first = chosen.randrange(len(documents) - LENGTH)
        rows.append(torch.cat(documents[first : first + LENGTH])[:LENGTH])
    return torch.stack(rows)


def train(model: LlamaForCausalLM, documents: list[Tensor], name: str) -> None:
    """Next-token training; the weights end as bfloat16 numbers, which zip better."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    chosen = random.Random(0)
    for step in range(STEPS):
        rows = batch(documents, chosen)
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == STEPS - 1:
            print(f"{name} step {step}: {loss.item():.3f}", flush=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float())


def save_checkpoints(folder: Path) -> None:
    """Train a target and its drafter, and write them with the tokenizer."""
    choice, template = random.Random(0), ChatTemplate(TEMPLATE, {})
    texts = [document(choice, template) for _ in range(DOCUMENTS)]
    tokenizer = train_tokenizer(texts)
    documents = [torch.tensor(text.ids) for text in tokenizer.encode_batch(texts)]
    for name, width, layers, heads in (("target", 64, 2, 4), ("drafter", 32, 1, 2)):
        torch.manual_seed(0)
        model = build(width, layers, heads)
        train(model, documents, name)
        model.save_pretrained(folder / name)
        beside = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=END_OF_TEXT
        )
        beside.chat_template = TEMPLATE
        beside.save_pretrained(folder / name)


def pack(folder: Path, output: Path) -> None:
    """A zip that depends on the files' names and bytes only."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        # Hashes that were checked here mean nothing elsewhere.
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            entry = zipfile.ZipInfo(file.name)
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)


def main() -> None:
    """Make the zip."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # The bundle's manifest names the checkpoints as they are given.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        save_checkpoints(Path())
        options = ExportOptions(Recipe("none"), capacity=512, max_width=64)
        export("target", "bundle", "drafter", options)
        pack(Path("bundle"), OUTPUT)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
