"""A text that repeats, and targets that know it: cheap to learn, easy to draft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jetdraft.train.task import Task, TrainingOptions
from jetdraft.train.training import Training
from tests.tiny import llama_config, save_checkpoint

QUICK = TrainingOptions(steps=4, batch_size=2, sequence_length=32, validate_every=2)
LONGER = replace(
    QUICK, steps=100, sequence_length=48, learning_rate=1e-2, validate_every=100
)
PERIOD = "for self in range print return "


def write_periodic(file: Path) -> Path:
    file.write_text(PERIOD * 100)
    return file


def interrupt(step: int) -> Any:
    def report(progress: Any) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return report


def made(
    task: type[Task],
    target: str,
    output: Path,
    data: list[Path],
    settings: Any = None,
    options: TrainingOptions | None = None,
    **more: Any,
) -> Training:
    return Training(task(settings), target, output, data, options, **more)


def learned_target(folder: Path, layers: int) -> str:
    base = save_checkpoint(folder / "base", llama_config(num_hidden_layers=layers))
    return tuned(str(base), write_periodic(folder / "text.txt"), folder / "tuned")


def teach(model: Any, ids: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        descend(optimizer, model(input_ids=ids, labels=ids).loss)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def tuned(target: str, text: Path, folder: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target)
    words = AutoTokenizer.from_pretrained(target)
    teach(model, torch.tensor([words(text.read_text())["input_ids"][:96]]), 120)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)
