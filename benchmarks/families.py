"""Every decoder of transformers, from a tiny random checkpoint of its structure.

Its logits are compared with transformers' (eager, float32), and texts drafted by lookup
and by a proposer that is mostly right with plain decoding, in floats and in q4_0. Of
what reads images too, the oracle is the whole model.

    python benchmarks/families.py [NAME...] --page docs/models.md
    python benchmarks/families.py qwen3-vl-2b --save FOLDER

The second command saves random weights in the sizes of a model that reads images.
"""

import json
import re
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import jetdraft
from jetdraft.checkpoints.model_reader import check_exportable
from jetdraft.checkpoints.refusals import EXPERT_FAMILIES, RECURRENT_FAMILIES
from jetdraft.errors import JetdraftError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.recipe import Recipe

TOLERANCE, MOST_WEIGHTS, RECIPES = 2e-4, 120_000_000, ("none", "q4_0")
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIZES, SEEING, CHANGES = TABLE["sizes"], TABLE["seeing"], TABLE["changes"]
END, IMAGE = MARKS = "<|endoftext|>", "<image>"
CHAT = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else"
CHAT += " %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else "
CHAT += "p['text'] }}{% endfor %}{% endif %}{% endfor %}"
SPECIAL = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
OF_LAYERS, VOCAB = ("layer_types", "layers_block_type"), SIZES["vocab_size"]

READS_IMAGES = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
NAMES = sorted(
    name
    for name in READS_IMAGES | {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    if not name.endswith("_assistant") and not CONFIG_MAPPING[name]().is_encoder_decoder
)
"""The `model_type`s of all decoders, and of what reads images and has a decoder.
Assistants are drafters, and encoder-decoders are in docs/sources.md."""

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
IDS = np.random.default_rng(0).integers(3, VOCAB - 40, 40).tolist()


@dataclass
class Outcome:
    """What became of a family: exact, refused or wrong; `text` is its decoder."""

    family: str
    result: str
    reason: str = ""
    text: str = ""
    gap: float = 0.0


def shrunk(kind: type, sizes: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Make a config with all fields of `sizes` that it has, and with `changes`."""
    known = kind().to_dict()
    names = {*known, *getattr(kind, "attribute_map", {})}
    fields = {name: size for name, size in sizes.items() if name in names}
    if "kv_lora_rank" in fields:  # all heads have keys, of a size that is a sum
        fields |= {"num_key_value_heads": 4, "head_dim": "default"}
    lists = {name: known[name] or () for name in known if name.endswith(OF_LAYERS)}
    kinds = {name: [*dict.fromkeys(value)] for name, value in lists.items() if value}
    if kinds:
        fields["num_hidden_layers"] = max(2, *map(len, kinds.values()))
    for name, value in known.items():
        if name in SPECIAL:
            fields[name] = SPECIAL[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            fields[name] = VOCAB - 1
        elif name in kinds:
            layers = fields["num_hidden_layers"]
            fields[name] = (kinds[name] * layers)[:layers]
    fields |= changes
    return kind(**{n: v for n, v in fields.items() if v != "default"})


def config_of(name: str) -> Any:
    """Make the tiny config of a family; its text half is tiny, and its other parts."""
    kind = CONFIG_MAPPING[name]
    default, made = kind(), dict[str, Any]()
    for part in getattr(kind, "sub_configs", None) or ():
        own = getattr(default, part)
        if own is not None:
            sizes = SIZES if part == "text_config" else SEEING
            made[part] = shrunk(type(own), sizes, CHANGES.get(own.model_type, {}))
    sizes = {} if "text_config" in made else SIZES
    return shrunk(kind, sizes, {**made, **CHANGES.get(name, {})})


def random_model(config: Any, seed: int) -> Any:
    """Make a model of a config in which no weight has a neutral value."""
    sees = config.model_type in READS_IMAGES
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    torch.manual_seed(seed)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind.from_config(config).parameters())
    assert size < MOST_WEIGHTS, f"{size:,} weights are not tiny"
    model = kind.from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for weight in filter(torch.is_floating_point, model.state_dict().values()):
            noise = torch.randn_like(weight)
            weight.copy_(0.2 * noise if weight.ndim > 1 else weight + 0.1 * noise)
    model.tie_weights()
    return model


def logits_of(model: Any, ids: Iterable[int]) -> np.ndarray:
    """What transformers computes for all tokens at once, [n, vocab]."""
    given = torch.tensor([list(ids)])
    with torch.no_grad():
        return model(input_ids=given, use_cache=False).logits[0].numpy()


class Known(Proposer):
    """Drafts what plain decoding wrote, with an error now and then."""

    traits = Traits("known", max_draft_tokens=15)
    text: list[int] = []  # noqa: RUF012

    def propose(self, context: Any, budget: int, parents: Any = None) -> Rows:
        """Return the root and a chain of the known text."""
        draw, rest = Random(len(context)), self.text[len(context) :]
        tokens = [token ^ (draw.random() < 0.2) for token in rest[:budget]]
        return Rows.chain([int(context[-1]), *tokens])


def try_family(name: str, folder: Path, seed: int = 0) -> Outcome:
    """Export a family from a random checkpoint, and compare all that it computes."""
    source, outcome, model = folder / "checkpoint", Outcome(name, "exact"), None
    try:
        model = save_tiny(name, source, seed)
        if model is not None:
            outcome.text = model.config.get_text_config(decoder=True).model_type
        for recipe in RECIPES:
            sizes: Any = {"capacity": 96, "max_width": 32, "fast": True}
            options = ExportOptions(Recipe.parse(recipe), **sizes)
            bundle = export(str(source), folder / recipe, options=options)
            with jetdraft.load(bundle.path, threads=1) as loaded:
                text = compare_texts(loaded)
                if recipe == "none":
                    outcome.gap = compare_logits(loaded, model, text)
    except UnsupportedModelError as error:
        outcome.result, outcome.reason = "refused", str(error).replace(f"{source} ", "")
    except (AssertionError, JetdraftError) as error:
        outcome.result = "untried" if model is None else "wrong"
        outcome.reason = str(error).replace(str(source), "it")
    return outcome


def save_tiny(name: str, source: Path, seed: int) -> Any:
    """Save a random checkpoint; None where no tiny one can be made, but its config."""
    try:
        config = config_of(name)
        config.save_pretrained(source)
        check_exportable(str(source))
        model = random_model(config, seed)
        model.save_pretrained(source)
        return model
    except UnsupportedModelError:
        raise
    except Exception:  # only a refusal of the config is an outcome then
        CONFIG_MAPPING[name]().save_pretrained(source)


def save_real(name: str, folder: Path) -> None:
    """Save random weights in a model's published sizes, and a tokenizer of letters."""
    sizes = dict(TABLE["real"][name])
    tokens = [*MARKS, "<fake_token_around_image>", "<global-img>"]
    tokens += [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({t: i for i, t in enumerate([*tokens, *letters])}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(tokens)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END).save_pretrained(folder)
    processor, special = sizes.pop("processor"), {"eos_token_id": 0, "pad_token_id": 0}
    sizes["text_config"] |= special
    ids = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3}
    config = AutoConfig.for_model(**sizes, **ids, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(CHAT)
    count = sum(weight.numel() for weight in model.parameters())
    click.echo(f"{count / 1e6:.0f} million weights")


def compare_texts(loaded: jetdraft.Model) -> list[int]:
    """Return the greedy text; raise `AssertionError` if a draft changes it."""
    given: Any = {"token_ids": IDS, "max_new_tokens": 24, "ignore_eos": True}
    plain = loaded.generate(method="none", **given).token_ids
    Known.text = [*IDS, *plain]
    with registered(Method("known", "the known text", lambda *_: Known())):
        for method, length in (("lookup", 4), ("known", 3), ("known", 15)):
            way = {"method": method, "num_draft_tokens": length}
            drafted = loaded.generate(**given, **way)
            assert drafted.token_ids == plain, f"another text with {way}"
            assert method == "lookup" or drafted.stats.drafted_tokens, "no draft"
    return Known.text


def compare_logits(loaded: jetdraft.Model, model: Any, text: list[int]) -> float:
    """Return the largest gap of logits; raise `AssertionError` for a large one."""
    expected, graph, logits = logits_of(model, text), loaded.parts.target, []
    assert expected.std(-1).min() > 0.05, "the logits are too flat to prove something"
    graph.cache.rewind(0)
    for start, end in ((0, 20), (20, 21), (21, 47), (47, len(text))):
        logits.append(graph.run(np.array(text[start:end])).logits.copy())
        graph.cache.advance(end - start)
    gap = float(np.abs(np.concatenate(logits) - expected).max())
    assert gap < TOLERANCE, f"logits differ by {gap:.2g}"
    written, best = text[len(IDS) :], expected[len(IDS) - 1 : -1]
    chosen = best[np.arange(len(written)), written]
    assert (best.max(-1) - chosen).max() < TOLERANCE, "another greedy text"
    return gap


def title(outcome: Outcome) -> str:
    """Return the row of the page in which an outcome stands."""
    if outcome.result != "exact":
        own = r" \(.*?\)| '.*?'(?= model)|^\w*[A-Z]\w+ "
        reason = re.split("; |, (?:which|and) jet", re.sub(own, "", outcome.reason))[0]
        return f"{outcome.result}: {reason}"
    if outcome.family in READS_IMAGES:
        return "exact: the language model of what reads images too"
    recurrent = outcome.text in RECURRENT_FAMILIES
    experts = ", experts" * (outcome.text in EXPERT_FAMILIES)
    return f"exact: {'recurrent states' if recurrent else 'attention alone'}{experts}"


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of the page, a row for each title."""
    rows = defaultdict(list)
    for outcome in outcomes:
        rows[title(outcome)].append(outcome.family)
    lines = (f"| {t} | {len(n)} | {', '.join(n)} |" for t, n in sorted(rows.items()))
    return "\n".join(["| outcome | | families |", "| --- | --- | --- |", *lines, ""])


def documented(page: Path) -> dict[str, str]:
    """Return the title of each family in the table of a page."""
    rows = re.findall(r"^\| (\w+: .*?) \| \d+ \| (.*) \|$", page.read_text(), re.M)
    return {name: row for row, names in rows for name in names.split(", ")}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--page", type=click.Path(path_type=Path))
@click.option("--save", type=click.Path(path_type=Path), help="Of one of the sizes.")
def main(names: tuple[str, ...], page: Path | None, save: Path | None) -> None:
    """Try the families NAMES, or all; write the table into the page."""
    if save is not None:
        if len(names) != 1 or names[0] not in TABLE["real"]:
            raise click.UsageError(f"--save takes one name: {', '.join(TABLE['real'])}")
        return save_real(names[0], folder=save)
    outcomes = []
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(try_family(name, Path(folder)))
        found = outcomes[-1]
        click.echo(f"{name} | {found.text} | {found.gap:.1e} | {title(found)}")
    if page is not None:
        text, made = page.read_text(), table(outcomes)
        page.write_text(re.sub(r"\| outcome \|.*?\n(?!\|)", made, text, flags=re.S))
    raise SystemExit(any(found.result == "wrong" for found in outcomes))


if __name__ == "__main__":
    main()
