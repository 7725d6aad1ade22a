"""What drafters, prompt tokens and forecasts say before and after their growth."""

from pathlib import Path

import inflate
import inflate_head
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetdraft.checkpoints.checkpoint import load_probes, read_settings
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.streams import FORECAST, PromptSettings
from jetdraft.methods.chimera.task import ChimeraTask
from jetdraft.methods.falcon.task import FalconTask
from jetdraft.methods.glide.task import GlideTask
from jetdraft.methods.kangaroo.task import KangarooTask
from jetdraft.train.blocks import Blocks
from jetdraft.train.data import Batch
from jetdraft.train.prompts import prompt_logits
from jetdraft.train.task import TrainingOptions
from jetdraft.train.teacher import load_target
from tests.tiny import llama_config, save_checkpoint, save_prompts
from tests.train.periodic import made, nothing, write_periodic

SIZES = {
    "--hidden-size": 256, "--layers": 5, "--heads": 16, "--kv-heads": 8,
    "--intermediate-size": 416,
}  # fmt: skip
TASKS = {
    "kangaroo": KangarooTask,
    "glide": GlideTask,
    "chimera": ChimeraTask,
    "falcon": FalconTask,
}


def said_by_drafter(kind: str, folder: Path, target: Path, output: Path) -> Tensor:
    """The logits of a drafter's rows over a text, in the places of its training."""
    texts = [write_periodic(output.with_suffix(".txt"))]
    run = made(TASKS[kind], str(target), output, texts)
    drafter = load_head(str(folder), run.target, torch.float32).eval()
    run.task.config = drafter.config
    ids, logits = torch.arange(1, 61)[None], []
    lesson = run.task.target_lesson(run, Batch(ids, ids))
    drafter.lm_head.register_forward_hook(lambda *call: logits.append(call[-1]))
    run.task.sums(drafter, lesson, 1, learns=False)
    return torch.cat(logits)


def said_by_probes(folder: Path) -> Tensor:
    """The logits of prompt tokens behind each fourth row of a text."""
    checkpoint, _ = load_target(str(folder))
    probed = load_probes(checkpoint.model, read_settings(folder), folder, 1.0)
    ids = torch.arange(1, 61)[None]
    # The target runs as it is, without the hooks that add the probes.
    plain, _ = load_target(str(folder))
    cache = plain.model(input_ids=ids, use_cache=True).past_key_values
    places = Blocks.spread(Batch(ids, ids), 15)
    return prompt_logits(
        probed.prompts, plain.model, places.anchors, ids.shape[1], cache
    )


def run(command, *arguments: object) -> None:
    result = CliRunner().invoke(command, [str(part) for part in arguments])
    assert result.exit_code == 0, result.output


def enlarged(small: Path, large: Path, *options: object) -> Path:
    sizes = [part for pair in SIZES.items() for part in pair]
    run(inflate.main, small, "-o", large, *sizes, *options)
    return large


@pytest.fixture(autouse=True)
def without_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("small") / "target", llama_config())


@pytest.fixture(scope="module")
def large(target, tmp_path_factory) -> Path:
    """A larger target, of which one trained layer lies below the extra layers."""
    return enlarged(target, tmp_path_factory.mktemp("l") / "target", "--lowest", 1)


@pytest.mark.parametrize("kind", TASKS)
def test_an_enlarged_drafter_says_the_same(kind, target, large, tmp_path):
    """Its numbers matter: they are random, not those with which training begins."""
    small, text = tmp_path / "small", write_periodic(tmp_path / "text.txt")
    options = TrainingOptions(steps=1, sequence_length=32, seed=0)
    made(TASKS[kind], str(target), small, [text], None, options).run(nothing)
    tensors = load_file(small / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in tensors.items():
        if weight.ndim > 1:
            tensors[name] = weight + 0.1 * torch.randn_like(weight)
    save_file(tensors, small / "model.safetensors")
    run(inflate_head.main, small, target, large, "-o", tmp_path / "large")
    expected = said_by_drafter(kind, small, target, tmp_path / "a")
    assert expected.std() > 0.5
    actual = said_by_drafter(kind, tmp_path / "large", large, tmp_path / "b")
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        PromptSettings(gamma=2, members=2, ranks=((0.5,), (0.25,))),
        PromptSettings(gamma=2, prefix=5, mode=FORECAST),
    ],
    ids=["prompt tokens", "forecasts"],
)
def test_enlarged_probes_say_the_same(settings, tmp_path):
    small = save_checkpoint(tmp_path / "small", llama_config())
    save_prompts(small, settings)
    big = enlarged(small, tmp_path / "large", "--lowest", 1)
    expected = said_by_probes(small)
    assert expected.std() > 0.5
    torch.testing.assert_close(said_by_probes(big), expected, rtol=0.0, atol=1e-2)
    assert read_settings(big).ranks == settings.ranks
