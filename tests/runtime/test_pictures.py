"""Models that read pictures, against transformers: tiles, logits, texts."""

import importlib
import io
import json
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image
from tokenizers import AddedToken
from transformers import image_processing_backends

import jetdraft
from jetdraft.bundle import GRID, MAX_PIXELS, SPLIT, TEXTS, WHOLE, Vision
from jetdraft.checkpoints.streams import PromptSettings, StreamSettings
from jetdraft.checkpoints.vision import _read_processor, count_work
from jetdraft.cli import main as cli
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import ContractError, OptionError, UnsupportedModelError
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.pictures import PictureRows, cut, read_picture, url_of
from tests import cases, tiny
from tests.checkpoints.heads import layouts
from tests.runtime.test_recurrent import add_mtp
from tests.tiny import VOCAB_SIZE, exported, refused, save_tokenizer

SIDE = 32
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<img>", "</img>"]
PLACE = "<start_of_image>"
MARKS += ["[IMG_BREAK]", "[IMG_END]", PLACE, "<end_of_image>"]
MARKS += [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
ADDED = [AddedToken(mark, special=True, normalized=False) for mark in MARKS]
ADDED += [AddedToken("\n" * count, normalized=False) for count in (2, 3, 4)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for p in m['content'] %}{{ '<image>' if p['type'] "
    "== 'image' else p['text'] }}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TEXT |= {"pad_token_id": 0, "eos_token_id": 0, "vocab_size": VOCAB_SIZE}
VISION = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 3, "patch_size": 8}
IMAGE = VOCAB_SIZE - len(ADDED)

TABLE = {"num_position_embeddings": 64}
DEEP = TABLE | {"deepstack_visual_indexes": [0, 2]}
TURNED_BY_THREE = {"rope": {"mrope_interleaved": True}}
HYBRID = {"rope": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
HYBRID |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
HYBRID |= {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
OF_LAYERS = {"hidden_size_per_layer_input": 32, "global_head_dim": 32}
OF_LAYERS |= {"vocab_size_per_layer_input": VOCAB_SIZE}
SQUARE, LONGEST = {"height": SIDE, "width": SIDE}, {"longest_edge": 6 * SIDE}
LFM2 = {"encoder_patch_size": 8, "tile_size": SIDE, "min_tiles": 2, "max_tiles": 6}
LFM2 |= {"min_image_tokens": 3, "max_image_tokens": 10, "do_image_splitting": True}
LFM2 |= {"max_pixels_tolerance": 2.0, "resample": 2, "rescale_factor": 1 / 255}
LFM2 |= {"image_mean": [0.5] * 3, "image_std": [0.4] * 3, "use_thumbnail": True}
LFM2 |= {"do_resize": True, "do_rescale": True, "do_normalize": True}
EDGES = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
OF_IDEFICS = {"scale_factor": 2, "pad_token_id": 0}
IDEFICS = ({"image_size": SIDE}, {"model_type": "llama"}, OF_IDEFICS, EDGES)


def qwen(text, vision):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    marks = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    own = {mark: IMAGE + number for number, mark in enumerate(marks, 1)}
    fields = {"size": {"shortest_edge": 256, "longest_edge": 128 * 64}, "patch_size": 8}
    vision = {"num_hidden_layers": 3, "out_hidden_size": 64, **vision}
    text = {**text, "rope_parameters": {**rope, **text["rope"]}}
    return "Qwen2VL", vision, text, own, fields


def mistral(text):
    square = {"height": 16, "width": 16}  # as transformers' Processor gives it
    types = {"model_type": "pixtral"}, {"model_type": text}
    fields = {"size": LONGEST, "patch_size": square}
    return "Pixtral", *types, {"spatial_merge_size": 2}, fields


FAMILIES = {
    "smolvlm": ("SmolVLM", *IDEFICS),
    "idefics3": ("Idefics3", *IDEFICS),
    "internvl": (
        "GotOcr2",
        {"image_size": [SIDE, SIDE], "patch_size": [8, 8]},
        {"model_type": "qwen2"},
        {"image_seq_length": 4},
        {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
    ),
    "qwen3_vl": qwen(TURNED_BY_THREE, DEEP),
    "qwen3_vl_moe": qwen(TURNED_BY_THREE | EXPERTS, DEEP),
    "qwen2_5_vl": qwen({"rope": {}}, WINDOWS),
    "qwen3_5": qwen(HYBRID, TABLE),
    "qwen3_5_moe": qwen(HYBRID | EXPERTS, TABLE),
    "mistral3": mistral("mistral"),
    "mistral3, ministral3": mistral("ministral3"),
    "lfm2_vl": (
        "Lfm2Vl",
        {"model_type": "siglip2_vision_model", "num_patches": 16},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"projector_hidden_size": 40},
        LFM2,
    ),
    "gemma3": (
        "Gemma3",
        {"image_size": SIDE, "patch_size": 4},
        KINDS,
        {"mm_tokens_per_image": 16},
        {"size": SQUARE},
    ),
    "gemma4": (
        "Gemma4",
        {"pooling_kernel_size": 2, "head_dim": 16, "num_key_value_heads": 3},
        KINDS | OF_LAYERS | {"use_bidirectional_attention": "vision"},
        {"boi_token_id": 7, "eoi_token_id": 8},
        {"max_soft_tokens": 70, "patch_size": 8, "pooling_kernel_size": 2},
    ),
}
"""The image processor, fields of the vision and the text config, of the config and of
the processor, by model type."""


def save(folder, family, **sizes):
    save_tokenizer(folder, added=ADDED)
    name, vision, text, own, fields = FAMILIES[family]
    configs = {"vision_config": VISION | vision, "text_config": TEXT | text}
    own = {"image_token_id": IMAGE, **configs, **own}
    config = transformers.AutoConfig.for_model(family.split(",")[0], **own)
    torch.manual_seed(0)
    config.text_config.update(sizes)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    # Else the tiny Gemma 4 says it, and transformers reads padding in its place.
    model.get_input_embeddings().weight.data[IMAGE] = 0
    model.save_pretrained(folder)
    place = PLACE if family == "gemma3" else MARKS[0]
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(MARKS[0], place))
    fields = {"image_processor_type": f"{name}ImageProcessor", **fields}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return config


def processor_of(source):
    """transformers' image processor, with Pillow's pixels, not torchvision's."""
    fields = json.loads((source / "preprocessor_config.json").read_text())
    if "Lfm2" not in fields["image_processor_type"]:
        return transformers.AutoImageProcessor.from_pretrained(source, backend="pil")

    def resize(_, images, size, resample, **__):
        pictures = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images]
        sized = [p.resize((size.width, size.height), resample) for p in pictures]
        return torch.from_numpy(np.stack(sized)).permute(0, 3, 1, 2)

    def normalize(_, images, mean, std, **__):
        return (images - mean[:, None, None]) / std[:, None, None]

    backend = image_processing_backends.TorchvisionBackend
    backend.resize, backend.normalize = resize, normalize
    kind = of_transformers("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor")
    return kind(**fields, return_row_col_info=True)


def of_transformers(module, name):
    """A class of transformers whose module imports torchvision, which is missing."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    fake = SimpleNamespace(functional=SimpleNamespace(InterpolationMode=None))
    with mock.patch.dict(sys.modules, dict.fromkeys(names, fake)):
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def text_by_transformers(processor, given):
    """What stands for a picture in a prompt; None where that takes a tokenizer."""
    name, own = type(processor).__name__, {"image_token": MARKS[0]}
    if name == "Lfm2VlImageProcessor":
        kind = of_transformers("lfm2_vl.processing_lfm2_vl", "Lfm2VlProcessor")
        own |= {"image_start_token": "<|image_start|>", "image_processor": processor}
        own |= {"image_end_token": "<|image_end|>"}
        own |= {"image_thumbnail_token": "<|img_thumbnail|>"}
    elif name == "PixtralImageProcessorPil":
        kind = of_transformers("pixtral.processing_pixtral", "PixtralProcessor")
        own |= {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
        own |= {"patch_size": 8, "spatial_merge_size": 2}
    else:
        return None
    made = object.__new__(kind)
    made.__dict__.update(own)
    return made.replace_image_token(given, 0, use_image_special_tokens=True)


def picture(seed, height=50, width=83):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def folder_of(once, family):
    """A folder that has a checkpoint, and its bundle with a drafter, once in a run."""

    def make(folder):
        (folder / "checkpoint").mkdir(parents=True)
        save(folder / "checkpoint", family)
        drafter = save_tokenizer(folder / "drafter", added=ADDED)
        config = transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 1})
        transformers.LlamaForCausalLM(config).save_pretrained(drafter)
        width = 12 if family == "gemma3" else 16  # fewer rows than an image has
        sizes = {"capacity": 256, "max_width": width}
        exported(folder / "checkpoint", folder / "bundle", drafter=drafter, **sizes)

    return once(f"sees-{family}", make)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, once):
    """A bundle's model, and transformers' model and image processor."""
    folder = folder_of(once, request.param)
    source = folder / "checkpoint"
    whole = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    processor = processor_of(source)
    with jetdraft.load(folder / "bundle", threads=1) as model:
        yield model, whole, processor


def asked(*parts):
    return [{"role": "user", "content": list(parts)}]


def text_of(text):
    return {"type": "text", "text": text}


def image_of(image):
    return {"type": "image", "image": image}


def wanted(both, messages, images, tokens=24):
    """The prompt's logits and the greedy text by transformers."""
    model, whole, processor = both
    ids, _ = model.parts.place_pictures(model.chat_prompt(messages), images)
    pictures = [Image.fromarray(image) for image in images]
    others = "num_patches rows cols image_rows image_cols num_crops "
    others += "num_soft_tokens_per_image "
    if whole.config.model_type in ("smolvlm", "idefics3"):
        pictures, others = [pictures], f"{others} pixel_attention_mask"
    if whole.config.model_type == "lfm2_vl":
        others += "image_sizes"
    given = {**processor(images=pictures, return_tensors="pt")}
    for name in others.split():
        given.pop(name, None)
    given["input_ids"] = torch.tensor([ids])
    is_row = (given["input_ids"] == whole.config.image_token_id).int()
    if "image_grid_thw" in given or "image_position_ids" in given:
        given["mm_token_type_ids"] = is_row
    if whole.config.model_type == "gemma3":
        given["token_type_ids"] = is_row
    with torch.no_grad():
        logits = whole(**given).logits[0, -1]
        text = whole.generate(**given, max_new_tokens=tokens, do_sample=False)
    return logits, text[0, len(ids) :].tolist()


SIZES = [(50, 83), (83, 50), (1, 1), (3, 500), (128, 128), (200, 90), (32, 32)]
SIZES += [(60, 10_000)]


def pictures_of(given):
    """The pictures [3, height, width] that a processor gives, whole or in patches."""
    pixels, shapes = given["pixel_values"], given.get("spatial_shapes")
    if "image_position_ids" in given:
        shapes = given["image_position_ids"].max(1)[:, ::-1] + 1
    if "image_grid_thw" in given:
        for _, height, width in given["image_grid_thw"]:  # two frames, in squares of 2
            squares = pixels.reshape(height // 2, width // 2, 2, 2, 3, 2, 8, 8)
            frame = squares[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
            yield frame.reshape(3, 8 * height, 8 * width)
    elif shapes is not None:
        for (height, width), patches in zip(shapes, pixels, strict=True):
            image = patches[: height * width].reshape(height, width, 8, 8, 3)
            image = image.transpose(4, 0, 2, 1, 3)
            yield image.reshape(3, 8 * height, 8 * width)
    else:
        yield from pixels.reshape(-1, *pixels.shape[-3:])


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_tiles_are_those_of_the_image_processor(both, height, width):
    model, _, processor = both
    vision, image = model.bundle.vision, picture(1, height, width)
    tiles = cut(image, vision)
    if len({tile.shape for tile in tiles.pixels}) > 1 and width == 10_000:
        pytest.skip("LFM2-VL's processor cannot stack tiles and so long a picture")
    given = processor(images=[Image.fromarray(image)], return_tensors="np")
    for tile, pixels in zip(tiles.pixels, pictures_of(given), strict=True):
        scaled = (tile / 255 - vision.mean) / vision.std
        assert np.allclose(scaled.transpose(2, 0, 1), pixels, atol=1e-5)
    assert text_by_transformers(processor, given) in (None, tiles.text)


def test_a_plan_has_the_rows_of_the_runtime(both):
    model, whole, _ = both
    source = Path(whole.config._name_or_path)
    encoder = count_work(str(source), [(width, height) for height, width in SIZES])
    stored = model.bundle.files[f"{model.bundle.vision.file}.data"]["bytes"]
    # A file aligns its tensors, and has some constants.
    assert encoder.weights * 4 == pytest.approx(stored, rel=0.25)
    assert encoder.row_size == model.bundle.target.contract.picture_size
    pictures = model.parts.target.pictures
    for (height, width), work in zip(SIZES, encoder.work, strict=True):
        model.forget()
        pictures.encode([], 0, [], list, bool)
        pictures._firsts, pictures._filled = {}, 0
        image = picture(20, height, width)
        assert model.encode_image(image)
        assert work.rows == pictures._filled, (height, width)
        ids, tiles = model.parts.place_pictures([model.parts.picture_place], [image])
        assert work.rows == ids.count(model.parts.picture_token)
        assert work.passes == len(tiles[0].pixels)
    assert encoder.work[0].gflop > 0
    words = ["plan", str(source), "--device", "orin-nx-16gb", "--provider", "cuda"]
    done = CliRunner().invoke(cli, [*words, "--json"])
    planned = json.loads(done.stdout)
    assert planned["memory_parts_mb"]["encoder"] > 0
    for row in planned["pictures"]:
        tiles = cut(picture(0, row["height"], row["width"]), model.bundle.vision)
        assert row["rows"] == tiles.rows
        assert row["ms"] > 0


METHODS = ["none", "auto", "lookup", "trigram", "draft", "cascade", "tree"]


@pytest.mark.parametrize("method", METHODS)
def test_texts_about_pictures_are_those_of_transformers(both, method):
    model, images = both[0], [picture(2), picture(3, 64, 20)]
    how = {"method": method}
    if method == "tree":
        if model.bundle.target.tree_file is None:
            pytest.skip("a hybrid drafts chains")
        how = {"method": "draft", "drafting": {"tree": "best"}, "num_draft_tokens": 6}
    messages = asked(image_of(images[0]), text_of("the"), image_of(images[1]))
    logits, text = wanted(both, messages, images)
    after, run = dict[int, np.ndarray](), Graph.run

    def keep_logits(graph, tokens, *args, **options):
        answer = run(graph, tokens, *args, **options)
        if graph is model.parts.target and len(answer.logits):
            after[graph.cache.length + len(tokens)] = answer.logits[-1].copy()
        return answer

    model.forget()
    with mock.patch.object(Graph, "run", keep_logits):
        chosen = model.chat(messages, max_new_tokens=24, logprobs=1, **how)
    assert chosen.token_ids == text
    rows = sum(cut(image, model.bundle.vision).rows for image in images)
    blind = rows if method in ("auto", "draft", "cascade", "tree") else 0
    counted = chosen.stats.to_json()
    assert (counted["picture_tokens"], counted["unseen_tokens"]) == (rows, blind)
    best = torch.log_softmax(logits.float(), -1)[text[0]].item()
    assert chosen.logprobs[0].logprob == pytest.approx(best, abs=1e-4)
    if method == "none":
        assert np.allclose(after[chosen.stats.prompt_tokens], logits, atol=1e-4)
    sampled = {"max_new_tokens": 24, "temperature": 0.8, "seed": 4}
    again = model.chat(messages, **sampled, **how)
    model.forget()
    assert again.token_ids == model.chat(messages, **sampled, method="none").token_ids


TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
ONE_LAYER = ("glide", "chimera", "falcon", "kangaroo")
HEADS = {
    **{name: getattr(layouts, name) for name in ("medusa", "hydra", "diffusion")},
    **{name: partial(layouts.one_layer, name) for name in ONE_LAYER},
    "eagle": layouts.eagle1,
    "eagle3": partial(layouts.eagle3, eagle_config=TAPS),
    "dflash": partial(layouts.dflash, outputs=(0, 1, 2), num_target_layers=4),
}


def head_of(layout, source, _):
    return {"head": layouts.write(source.with_name("head"), *layout())}


def assistant_of(source, config):
    return {"head": tiny.save_assistant(source.with_name("head"), config)}


def probes_of(settings, source, _):
    tiny.save_probes(source, settings)


STREAMS = partial(probes_of, StreamSettings(gamma=2, layers=1, lora_rank=4))
PROMPTS = partial(probes_of, PromptSettings(gamma=2, members=2, prefix=3))
OF_PICTURES = {
    **{kind: ("smolvlm", 4, partial(head_of, HEADS[kind])) for kind in HEADS},
    "kangaroo, deep": ("qwen3_vl", 2, partial(head_of, HEADS["kangaroo"])),
    "select": ("smolvlm", 4, lambda *_: {"select_kv": 32}),
    "mtp": ("qwen3_5", 2, add_mtp),
    "assistant": ("gemma4", 2, assistant_of),
    "stream": ("smolvlm", 4, STREAMS),
    "stream, turned": ("qwen3_vl", 3, STREAMS),
    "stream, deep": ("qwen3_vl", 2, STREAMS),
    "ppd": ("smolvlm", 4, PROMPTS),
    "ppd, deep": ("qwen3_vl", 2, PROMPTS),
}
BRANCHES = {
    **{name: [{"tree": "best"}] for name in ("kangaroo", "ppd", "eagle")},
    "stream": [{"tree": "best"}, {"tree": "best", "prune_threshold": 0.05}],
}


@pytest.mark.parametrize("kind", OF_PICTURES)
def test_drafts_about_pictures_change_no_token(kind, tmp_path):
    family, layers, make = OF_PICTURES[kind]
    config = save(tmp_path / "eyes", family, num_hidden_layers=layers).text_config
    own = make(tmp_path / "eyes", config) or {}
    bundle = exported(tmp_path / "eyes", tmp_path / "bundle", capacity=256, **own)
    with jetdraft.load(bundle.path, threads=1, store=tmp_path / "texts") as model:
        parts = image_of(picture(2)), text_of("the"), image_of(picture(3, 64, 20))
        names = {*model.methods} - {"none", "lookup", "trigram", "cascade", "draft"}
        assert {"recall"} < names, "a method of the target's too"
        target = model.bundle.target
        chat = partial(model.chat, asked(*parts))
        # The last row of a prompt is a picture's where nothing stands behind it.
        last = partial(model.generate, "the<image>", images=[picture(2)])
        sampled = {"temperature": 0.8, "seed": 4}
        for say, how, name in product((chat, last), ({}, sampled), names):
            model.forget()
            plain = say(method="none", max_new_tokens=24, **how)
            sizes = [{"rows": 4, "slots": 16}] if name == "ppd" else []
            shapes = [{}, *sizes, *(BRANCHES.get(name, ()) if target.tree_file else ())]
            if name == "stream" and target.halves is None:
                with pytest.raises(OptionError, match="is not cut in halves"):
                    say(method=name, drafting=shapes.pop())
            for drafting in shapes:
                model.forget()
                own = {"method": name, "num_draft_tokens": 4, "drafting": drafting}
                text = say(max_new_tokens=24, **how, **own)
                assert text.token_ids == plain.token_ids
                # The times of this machine decide whether a plan of `ppd` drafts.
                assert text.stats.drafted_tokens or (name == "ppd" and not drafting)


def test_rows_are_kept_for_the_same_picture_only(both, tmp_path):
    model, said = both[0], text_of("the")
    model.forget()
    kept = model.parts.target.pictures
    kept._firsts, kept._filled = {}, 0  # else the second picture has no room
    talk = jetdraft.Conversation(model, max_new_tokens=8, method="none")
    for piece in talk.say("what", images=[picture(4)]):
        assert piece
    rows = talk.last.stats.prompt_tokens
    assert all(talk.say("and", images=[picture(14, 20, 20)]))
    assert talk.last.stats.reused_tokens >= rows - 1
    later = talk.last.token_ids
    talk.save(tmp_path / "talk.json")
    talk.load(tmp_path / "talk.json")
    model.forget()
    del talk.messages[-2:]
    assert all(talk.say("and", images=[picture(14, 20, 20)]))
    assert talk.last.token_ids == later
    images = [picture(4), picture(14, 20, 20)]
    assert later == wanted(both, talk.messages[:-1], images, 8)[1]
    other = model.chat(asked(image_of(picture(5)), said), max_new_tokens=8)
    assert other.stats.reused_tokens < 10, "its picture is another"
    assert other.token_ids == wanted(both, asked(image_of(0), said), [picture(5)], 8)[1]


def test_many_pictures_do_not_wear_the_buffer_out(both):
    model = both[0]
    for seed in range(12):
        messages, image = asked(image_of(picture(seed)), text_of("a")), [picture(seed)]
        result = model.chat(messages, max_new_tokens=4)
        assert result.token_ids == wanted(both, messages, image, 4)[1]


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_files_are_read_as_transformers_reads_them(tmp_path):
    image = Image.fromarray(picture(6))
    turned = image.getexif()
    turned[0x0112] = 6  # EXIF: turn by 90 degrees.
    assert read_picture(encoded(image, exif=turned)).shape == (83, 50, 3)
    grey = read_picture(encoded(image.convert("L")))
    assert np.array_equal(grey, read_picture(np.asarray(image.convert("L"))))
    clear = image.convert("RGBA")
    clear.putalpha(0)
    (tmp_path / "x.png").write_bytes(encoded(clear))
    assert np.array_equal(read_picture(tmp_path / "x.png"), np.asarray(image))
    assert np.array_equal(read_picture(url_of(clear)), read_picture(clear))


@pytest.mark.parametrize("both", ["smolvlm"], indirect=True)
@cases("mode, alpha", ("RGBA", 0), ("RGBA", 99), ("LA", 99), ("P", 0), ("RGB", 0))
def test_transparency_is_that_of_the_image_processor(both, tmp_path, mode, alpha):
    """An alpha channel of a file is dropped; all other transparency is white."""
    image, file = Image.fromarray(picture(6)).convert(mode), tmp_path / "x.png"
    if "A" in mode:
        image.putalpha(alpha)
    image.save(file, transparency=alpha if mode == "P" else None)
    for given in (image, str(file)):
        ours = cut(read_picture(given), both[0].bundle.vision).pixels
        [theirs] = both[2](both[2].fetch_images(given))["pixel_values"]
        for tile, pixels in zip(ours, theirs, strict=True):
            vision = both[0].bundle.vision
            scaled = (tile / 255 - vision.mean) / vision.std
            assert np.allclose(scaled.transpose(2, 0, 1), pixels, atol=1e-5)


BAD = {
    "cannot be read .it is not an image": [b"", b"no picture"],
    "cannot be read": [encoded(Image.fromarray(picture(0)))[:999]],
    "at most": [encoded(Image.new("1", (1 << 14, 1 + MAX_PIXELS // (1 << 14))))],
    "more than": [encoded(Image.new("1", (20_000, 20_000)))],
    "/no/such.png: No such file": ["/no/such.png"],
    "must be uint8": [np.zeros((2, 2, 4), np.uint8), np.zeros((2, 2, 3))],
    "is not an image": [7],
}


@pytest.mark.parametrize(("fact", "given"), [(f, g) for f in BAD for g in BAD[f]])
def test_what_is_no_picture_is_refused(fact, given):
    with pytest.raises(OptionError, match=fact):
        read_picture(given)


def test_prompts_without_room_or_places_are_refused(both, toy_model):
    model = both[0]
    many = asked(*(image_of(picture(n)) for n in range(30)))
    other, plain = asked({"type": "img", "image": picture(7)}), asked(text_of("the"))
    for fact, say, given, options in (
        ("0 places for 1 images", model.generate, "the", {"images": [picture(7)]}),
        ("give fewer images", model.chat, many, {}),
        ("reads no images", toy_model.generate, "the", {"images": [picture(7)]}),
        ("a part of type 'img' has an image", model.chat, other, {}),
        ("images must be a list", toy_model.generate, "the", {"images": "meter.jpg"}),
        ("tools must be Tools", toy_model.chat, plain, {"tools": [{"type": "x"}]}),
    ):
        with pytest.raises(OptionError, match=fact):
            say(given, **options)


def test_graphs_of_the_standard_flavour_read_images(tmp_path):
    source, bundle = tmp_path / "eyes", tmp_path / "bundle"
    save(source, "qwen3_vl")
    exported(source, bundle, capacity=256, flavour="standard")
    graph = onnx.load(bundle / "target-vision.onnx", load_external_data=False)
    assert {opset.domain for opset in graph.opset_import} == {""}
    assert "Attention" in {node.op_type for node in graph.graph.node}
    whole = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    with jetdraft.load(bundle, threads=1) as model:
        messages, images = asked(image_of(picture(2)), text_of("the")), [picture(2)]
        text = wanted((model, whole, processor_of(source)), messages, images, 8)[1]
        assert model.chat(messages, max_new_tokens=8).token_ids == text


@pytest.mark.parametrize("both", ["gemma3"], indirect=True)
@pytest.mark.parametrize("text", ["a\n{0}b", "{0}\n\nb", "{0}{0}", "\n{0}\n{0}\n"])
def test_line_breaks_beside_a_picture_are_tokens_of_the_whole_text(both, text):
    parts, images = both[0].parts, [picture(1)] * text.count("{0}")
    placed, _ = parts.place_pictures(parts.text.encode(text.format(PLACE)), images)
    whole = text.format(cut(images[0], both[0].bundle.vision).text)
    assert placed == parts.text.encode(whole)


@pytest.mark.parametrize("both", ["gemma3"], indirect=True)
def test_the_token_of_a_row_is_no_place_beside_a_mark(both):
    with pytest.raises(OptionError, match="an image's row; write <start_of_im"):
        both[0].generate(f"{MARKS[0]} a {PLACE}", images=[picture(1)])


def test_the_kv_of_pictures_read_whole_are_floats(tmp_path):
    save(tmp_path / "eyes", "gemma3")
    said = r"see each other.*leave kv out of the recipe"
    refused(OptionError, said, tmp_path / "eyes", "int8-kv8")


@pytest.mark.parametrize("both", ["qwen3_vl"], indirect=True)
def test_a_picture_is_encoded_ahead_while_another_is_read(both):
    model, ahead = both[0], picture(11)
    for piece in model.stream("the", max_new_tokens=8):
        assert model.encode_image(ahead), piece
    before = model.parts.target.pictures.seconds
    messages = asked(image_of(ahead), text_of("a"))
    said = model.chat(messages, max_new_tokens=8)
    assert model.parts.target.pictures.seconds == before
    assert said.token_ids == wanted(both, messages, [ahead], 8)[1]


def rows_of_a_fake(answers, **fields):
    """Buffers of 8 rows, whose encoder gives the answers in turn, or raises them."""

    def run(*_):
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return (np.full((1, 4, 2), answer, np.float32),)

    encoder = SimpleNamespace(run=run)
    contract = StepContract(9, 8, 8, "float32", ((1, 16),), picture_size=2, **fields)
    return PictureRows(lambda: encoder, LONE, contract)


LONE = Vision(
    "f", "<image>", 9, 4, 8, WHOLE, 0, 1, 1, "bilinear", (0,) * 3, (1,) * 3, {}
)
TILES = [
    cut(picture(n), replace(LONE, text=dict.fromkeys(TEXTS, ""))) for n in range(4)
]
PROMPT = [0, *[5] * 4, 1]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError(), np.nan])
def test_an_encoder_that_fails_leaves_no_rows_behind(fault):
    """Else the next picture would get the ids of a picture that the buffers keep."""
    rows, forgotten = rows_of_a_fake(iter([1, 2, fault, 3, 4])), []

    def encode(tiles, must_end=lambda: False):
        return rows.encode(PROMPT, 5, [tiles], lambda: forgotten.append(1), must_end)

    kept = encode(TILES[0]), encode(TILES[1])
    assert kept[0][1:5] == [9, 10, 11, 12]
    with pytest.raises((KeyboardInterrupt, RuntimeError, ContractError)):
        encode(TILES[2])
    assert forgotten, "before their rows are written over"
    assert encode(TILES[3], must_end=lambda: True) == PROMPT
    assert encode(TILES[3])[1:5] == kept[0][1:5]
    assert (rows.values["pictures"].numpy()[:4] == 3).all()
    assert encode(TILES[1])[1:5] == kept[1][1:5]


def test_a_pass_never_cuts_a_picture_whose_rows_see_each_other():
    rows = rows_of_a_fake(iter([1]), whole_pictures=True)
    rows.encode(PROMPT, 5, TILES[:1], list, bool)
    assert [rows.next_rows(slot, 9) for slot in (0, 1, 5)] == [(1, 0), (4, 4), (9, 0)]
    assert [rows.boundary(kept) for kept in (1, 3, 5)] == [1, 1, 5]
    rows.encode([1, 2], 5, [], list, bool)
    assert rows.next_rows(0, 9) == (9, 0)


def test_turns_are_written_again_after_an_interrupt(monkeypatch):
    """A text alone must not turn like the prompt before it, whose picture is gone."""
    contract = StepContract(9, 16, 8, "float32", ((1, 4),), picture_size=2, turn_size=1)
    places = {"frequencies": (0.5,), "axes": (1,), "patch": 4}
    model = PictureRows(lambda: None, replace(LONE, **places), contract)
    plain = model.values["cosines"].numpy().copy()
    model._turn([(1, 4, 2)])
    assert (model.values["cosines"].numpy() != plain).any()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "tile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.encode([1, 2], 5, [], list, bool)
    monkeypatch.undo()
    model.encode([1, 2], 5, [], list, bool)
    assert (model.values["cosines"].numpy() == plain).all()


@cases(
    "fact, fields",
    ("do_pan_and_scan: True", {"do_pan_and_scan": True}),
    ("do_resize: False", {"do_resize": False}),
    ("scales by 1", {"rescale_factor": 1}),
)
def test_other_steps_of_an_image_processor_are_refused(tmp_path, fact, fields):
    kind = {"image_processor_type": "Gemma3ImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(kind | fields))
    with pytest.raises(UnsupportedModelError, match=fact):
        _read_processor(str(tmp_path))


def test_the_ratio_of_a_picture_in_patches_is_bounded():
    grid = {"tiling": GRID, "large": MAX_PIXELS, "tiles": (2, 6)}
    patches = replace(LONE, patch=4, most=640, **grid)
    with pytest.raises(OptionError, match="longer than 200 times"):
        cut(picture(1, 1, 201), patches)


def test_a_text_of_a_bundle_is_no_form():
    texts = {**dict.fromkeys(TEXTS, ""), "tile": "{row:>2000000000}{column}{x}{"}
    split = replace(LONE, tiling=SPLIT, edge=16, text=texts)
    assert "{row:>2000000000}1{x}{" in cut(picture(1), split).text


@cases(
    "wrong",
    {"first_row": 8},
    {"std": (1.0, 0.0, 1.0)},
    {"rows": 9},
    {"least": 2},
    {"side": 5000},
    {"axes": (0,)},
    {"tiling": SPLIT},
    {"text": {}},
    {"patch": 3},
    {"tiles": (1, 65)},
    {"tiles": (2, 1)},
    {"span": 600},
    {"patch": 4, "most": 63},
)
def test_fields_that_contradict_each_other_are_refused(wrong):
    right = replace(LONE, text=dict.fromkeys(TEXTS, ""))
    contract = StepContract(9, 8, 8, "float32", ((1, 16),), picture_size=2)
    right.check(contract)
    with pytest.raises(ValueError, match="pictures: "):
        replace(right, **wrong).check(contract)


EMPTY = dict.fromkeys(TEXTS, "")
ENDED = {"text": EMPTY | {"end": "x"}}
TURNED = {"rows": 1, "patch": 4, "most": 64, "frequencies": (0.5,), "axes": (1,)}
TURNED |= {"text": EMPTY}
OF_TURNED = {"rows": 2}, {"tiling": GRID}, {"patch": 0}
OF_WHOLE = (
    {"text": EMPTY},
    {"text": EMPTY | {"break": "x", "end": "x"}},
    {"tiling": GRID},
    {"rows": 7},
    {"rows": 1, "patch": 4, "most": 7 * 64},
)


@cases(
    "sizes, right, wrong",
    *(({"turn_size": 1}, TURNED, wrong) for wrong in OF_TURNED),
    *(({"whole_pictures": True}, ENDED, wrong) for wrong in OF_WHOLE),
)
def test_pictures_that_turn_or_are_read_whole_have_one_block(sizes, right, wrong):
    vision = replace(LONE, **right)
    contract = StepContract(9, 8, 6, "float32", ((1, 16),), picture_size=2, **sizes)
    vision.check(contract)
    with pytest.raises(ValueError, match=r"places|whole"):
        replace(vision, **wrong).check(contract)
