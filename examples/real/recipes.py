"""Long trainings of real and of example checkpoints, each one command.

    python examples/tasks/make.py -o tasks
    python examples/real/recipes.py sql --target folders/smollm2 --data tasks -o runs
    python examples/real/recipes.py sql --target folders/smollm2 --data tasks -o runs \
        --measure

trains what the recipe names, one stage after another, and then measures it. A stage
that has ended is skipped, and one that was stopped goes on. `runs/sql/minutes.json`
says how long each took. `--quantize q8_0` exports and measures bundles of another
recipe, in runs/sql/q8_0. `--list` prints the commands and runs none, and `--share 0.02`
takes that share of all steps, to see in minutes that every stage runs. `--gpu` takes
the steps that a GPU has time for, in runs/sql-gpu. Run nothing beside `--measure`.

- sql, data, dialogue, calls: streams, a drafter, a head and plain tuning of a
  checkpoint, on a task of examples/tasks
- chat: a drafter of at most 15 M parameters, on the texts of chat_texts.py
- code: a drafter for a model of code, on the functions of Python's library
- pycode: `train draft` and pycode/train.py, twenty minutes each
- distil: distilling and the text alone, for the example target on a task
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from jetdraft.errors import OptionError
from jetdraft.files import write_text
from jetdraft.recipe import Recipe

ROOT = Path(__file__).parent.parent.parent
PYCODE = ROOT / "examples/pycode"
QUANTIZE = "int4-rtn-b32-head8"
"""Measuring recipes would take longer than the training, and choose other ones."""

LENGTHS = "--steps", "--minutes", "--minutes-drafter"
"""The options that say how long a stage takes."""


@dataclass(frozen=True)
class Stage:
    """A command that makes `product`, a folder or a file; the times of some count."""

    product: Path
    command: Sequence[str | Path]
    is_timed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the product is there, and not that of a training under way."""
        return self.product.exists() and not (self.product / ".unfinished").exists()

    def shortened(self, share: float) -> Stage:
        """The stage with a share of its steps or minutes."""
        words = list(self.command)
        for place, word in enumerate(words[:-1]):
            if word in LENGTHS:
                wanted = share * float(words[place + 1])
                words[place + 1] = f"{max(1, round(wanted))}"
        return replace(self, command=words)


@dataclass(frozen=True)
class Inputs:
    """What a recipe is made of; stages lie in the folder `work`."""

    target: Path
    data: Path
    work: Path
    seed: int
    gpu: bool = False
    quantize: str = QUANTIZE

    def jetdraft(self, product: str, *arguments: str | Path) -> Stage:
        """A verb of jetdraft; trainings get the seed."""
        seed = ["--seed", str(self.seed)] if arguments[0] == "train" else []
        command = [sys.executable, "-m", "jetdraft", *arguments, *seed]
        return Stage(self.work / product, [*command, "-o", self.work / product])

    def script(self, product: str, script: str, *arguments: str | Path) -> Stage:
        """A script of the repository."""
        command = [sys.executable, ROOT / script, *arguments]
        return Stage(self.work / product, [*command, "-o", self.work / product])

    def bundle(self, name: str, source: Path, *drafter: str | Path) -> Stage:
        """The export of a checkpoint with its drafter or head."""
        how = ["--quantize", self.quantize, "--quantize-drafter", "int8-rtn-b32"]
        command = [sys.executable, "-m", "jetdraft", "export", source, *drafter, *how]
        return Stage(self.quantized / name, [*command, "-o", self.quantized / name])

    @property
    def quantized(self) -> Path:
        """The folder of bundles, and of what is measured with them."""
        return self.work if self.quantize == QUANTIZE else self.work / self.quantize

    def measured(self, product: str, bundle: str, test: Path, *arguments: str) -> Stage:
        """Every method of a bundle on a task's test file."""
        script, file = ROOT / "benchmarks/tasks.py", self.quantized / product
        command = [sys.executable, script, self.quantized / bundle, test, *arguments]
        return Stage(file, [*command, "--json", file], is_timed=True)


@dataclass(frozen=True)
class Lesson:
    """The steps of each training on a task, and the longest text in tokens.

    On two cores with products of bfloat16 the drafter and the head take about as many
    minutes as the streams do, some twenty.
    """

    drafter: int = 3000
    head: int = 550
    streams: int = 320
    plain: int = 160
    sequence_length: int = 160


LONG = Lesson(drafter=1703, head=1400, streams=494, plain=247)
LESSONS_OF_GPU = {
    "sql": LONG,
    "data": LONG,
    "dialogue": LONG,
    "calls": Lesson(
        drafter=1034, head=850, streams=300, plain=150, sequence_length=296
    ),
}
"""The steps that one H200 was given; docs/log/training.md has their times."""

LESSONS = {
    "sql": Lesson(),
    "data": Lesson(),
    "dialogue": Lesson(),
    "calls": Lesson(sequence_length=296),
}


def task(name: str, inputs: Inputs) -> list[Stage]:
    """The paper's table for a task: streams, and what they are compared with."""
    work, test = inputs.work, inputs.data / name / "test.jsonl"
    lesson = (LESSONS_OF_GPU if inputs.gpu else LESSONS)[name]
    return [
        *_task_trainings(inputs, inputs.data / name / "train.jsonl", lesson),
        inputs.bundle("base-bundle", inputs.target),
        inputs.bundle("plain-bundle", work / "plain"),
        inputs.bundle(
            "streams-bundle", work / "streams", "--drafter", work / "drafter"
        ),
        inputs.bundle("head-bundle", work / "tuned", "--head", work / "head"),
        inputs.measured("base.json", "base-bundle", test, "--methods", "auto"),
        inputs.measured("plain.json", "plain-bundle", test, "--methods", "auto"),
        inputs.measured("streams.json", "streams-bundle", test),
        inputs.measured("head.json", "head-bundle", test),
    ]


def _task_trainings(inputs: Inputs, train: Path, lesson: Lesson) -> list[Stage]:
    """Streams and plain tuning read the same examples."""
    work, run = inputs.work, inputs.jetdraft
    texts = ["--data", train, "--validation-share", "0.02"]
    texts += ["--sequence-length", f"{lesson.sequence_length}"]
    many = ["--batch-size", "16"]
    cache = ["--cache", work / "labels", "--cache-tokens", "32"]
    teacher = [] if inputs.gpu else cache  # a GPU computes labels faster
    return [
        run(
            *("streams", "train", "stream", inputs.target, *texts, "--mode", "shared"),
            *("--gamma", "4", "--layers", "6", "--lora-rank", "16"),
            *("--batch-size", "8", "--steps", f"{lesson.streams}"),
            *("--learning-rate", "2e-3"),
        ),
        inputs.script("tuned", "examples/tasks/merge.py", work / "streams"),
        inputs.script(
            *("plain", "examples/tasks/tune.py", inputs.target, *texts, *many),
            *("--steps", f"{lesson.plain}", "--learning-rate", "1e-4"),
            *("--seed", str(inputs.seed)),
        ),
        run(
            *("drafter", "train", "draft", work / "tuned", *texts, *many),
            *teacher,
            *("--layers", "1", "--hidden-size", "256", "--draft-vocab", "4096"),
            *("--steps", f"{lesson.drafter}", "--learning-rate", "4e-3"),
            *(["--half"] if inputs.gpu else []),
        ),
        run(
            *("head", "train", "eagle", work / "tuned", *texts, *many),
            *("--draft-vocab", "4096", "--unrolled", "4", "--half"),
            *("--steps", f"{lesson.head}", "--learning-rate", "1e-3"),
        ),
    ]


def chat(inputs: Inputs) -> list[Stage]:
    """A drafter of at most 15 M parameters for a chat model."""
    work, test = inputs.work, inputs.data / "test.jsonl"
    drafting = ["--methods", "draft,cascade,auto", "--num-draft-tokens", "1,2,3,4"]
    shape = ["--layers", "2", "--hidden-size", "256", "--draft-vocab", "12288"]
    stages = [
        *(_chat_on_gpu(inputs, shape) if inputs.gpu else _chat_on_cpu(inputs, shape)),
        inputs.bundle("bundle", inputs.target, "--drafter", work / "drafter"),
    ]
    for temperature in ("0", "0.7"):
        more = [*drafting, "--temperature", temperature, "--prompts", "24"]
        file = f"t{temperature}.json"
        stages.append(inputs.measured(file, "bundle", test, *more))
    return stages


def _chat_on_cpu(inputs: Inputs, shape: list[str]) -> list[Stage]:
    return [
        inputs.jetdraft(
            *("drafter", "train", "draft", inputs.target, *shape),
            *("--data", inputs.data / "train.jsonl", "--sequence-length", "320"),
            *("--cache", inputs.work / "labels", "--cache-tokens", "32"),
            *("--batch-size", "8", "--steps", "1500", "--learning-rate", "4e-3"),
        )
    ]


def _chat_on_gpu(inputs: Inputs, shape: list[str]) -> list[Stage]:
    """Two stages, of which the second begins where the first has ended.

    Its seed is another one, so some of its validation texts are known to the drafter:
    believe the figures of the first stage, and those of test prompts.
    """
    texts = ["--data", inputs.data / "train.jsonl", "--sequence-length", "320"]
    texts += ["--validation-share", "0.005", "--validate-every", "200", "--half"]
    first = inputs.jetdraft(
        *("first", "train", "draft", inputs.target, *texts, *shape),
        *("--batch-size", "64", "--steps", "1200", "--learning-rate", "4e-3"),
    )
    last = replace(inputs, seed=inputs.seed + 1).jetdraft(
        *("drafter", "train", "draft", inputs.target, *texts),
        *("--from", inputs.work / "first"),
        *("--batch-size", "64", "--steps", "900", "--learning-rate", "3e-3"),
    )
    return [first, last]


def code(inputs: Inputs) -> list[Stage]:
    """A drafter for a model of code, measured on HumanEval."""
    work, prompts = inputs.work, inputs.work / "prompts.jsonl"
    bundle, report = inputs.quantized / "bundle", inputs.quantized / "bench.json"
    bench = [sys.executable, "-m", "jetdraft", "bench", bundle]
    bench += ["--prompts", work / "tests/code.jsonl", "--methods", "draft,auto"]
    return [
        inputs.script(
            *("prompts.jsonl", "examples/real/code_prompts.py", "--count", "1536")
        ),
        inputs.jetdraft(
            *("drafter", "train", "draft", inputs.target, "--data", prompts),
            *("--layers", "2", "--hidden-size", "384", "--draft-vocab", "16384"),
            *("--sequence-length", "512", "--batch-size", "16", "--steps", "1200"),
            *("--learning-rate", "4e-3", "--half"),
        ),
        inputs.bundle("bundle", inputs.target, "--drafter", work / "drafter"),
        inputs.script("tests", "benchmarks/real_prompts.py", bundle),
        Stage(report, [*bench, "--repeats", "1", "--output", report], is_timed=True),
    ]


def pycode(inputs: Inputs) -> list[Stage]:
    """Twenty minutes of the example's own recipe, and of `train draft`."""
    work, target = inputs.work, PYCODE / "target"
    own = [sys.executable, PYCODE / "train.py", "--target", target]
    own += ["--minutes-drafter", "20", "--threads", "1", "--seed", str(inputs.seed)]
    own += ["--output", work / "own", "--work", work / "own-work"]
    pairs = [
        ["--bundle", name, "draft", inputs.quantized / f"{name}-bundle"]
        for name in ("own", "drafter")
    ]
    heads = [sys.executable, ROOT / "benchmarks/heads.py", *pairs[0], *pairs[1]]
    report = inputs.quantized / "pairs.json"
    heads += ["--prompts", PYCODE / "prompts.jsonl", "--json", report]
    texts = [sys.executable, PYCODE / "texts.py", "--minutes", "5", "--stride", "4"]
    texts += ["--corpus", work / "corpus.txt", "-o", work / "texts.jsonl"]
    shape = ["--layers", "2", "--hidden-size", "192", "--learning-rate", "4e-3"]
    first = ["--data", work / "corpus.txt", "--steps", PYCODE_STEPS[0], *shape]
    last = ["--data", work / "texts.jsonl", "--steps", PYCODE_STEPS[1], "--half"]
    last += ["--sequence-length", "257"]  # the texts' 256 tokens, and their end
    return [
        Stage(work / "own/drafter", own),
        Stage(work / "texts.jsonl", texts),
        inputs.jetdraft("first", "train", "draft", target, *first),
        inputs.jetdraft(
            *("drafter", "train", "draft", target, "--from", work / "first", *last),
            *("--learning-rate", "2e-3"),
        ),
        inputs.bundle("own-bundle", target, "--drafter", work / "own/drafter"),
        inputs.bundle("drafter-bundle", target, "--drafter", work / "drafter"),
        Stage(report, heads, is_timed=True),
    ]


PYCODE_STEPS = "540", "360"
"""Nine minutes along the corpus, and six along the target's own texts, whose writing
takes the other five."""


def distil(inputs: Inputs) -> list[Stage]:
    """Distilling beside the text alone: the same drafter, texts and steps."""
    name, work, target = "data", inputs.work, inputs.work / "tuned"
    train, test = (inputs.data / name / f"{part}.jsonl" for part in ("train", "test"))
    stages = [
        inputs.script(
            *("tuned", "examples/tasks/tune.py", PYCODE / "target", "--data", train),
            *("--steps", "300", "--batch-size", "16", "--seed", str(inputs.seed)),
        )
    ]
    for loss in ("forward-kl", "text"):
        stages += [
            inputs.jetdraft(
                *(loss, "train", "draft", target, "--data", train),
                *("--layers", "2", "--hidden-size", "192", "--loss", loss),
                *("--batch-size", "16", "--sequence-length", "160"),
                *("--steps", "400", "--learning-rate", "4e-3", "--half"),
            ),
            inputs.bundle(f"{loss}-bundle", target, "--drafter", work / loss),
        ]
    for temperature in ("0", "1"):
        for loss in ("forward-kl", "text"):
            file = f"{loss}-t{temperature}.json"
            more = ["--methods", "draft,auto", "--temperature", temperature]
            stages.append(inputs.measured(file, f"{loss}-bundle", test, *more))
    return stages


NAMES: dict[str, Callable[[Inputs], list[Stage]]] = {
    **{name: lambda i, name=name: task(name, i) for name in LESSONS},  # type: ignore[misc]
    "chat": chat,
    "code": code,
    "pycode": pycode,
    "distil": distil,
}


FOR_A_GPU = (*LESSONS, "chat")
"""The recipes with other steps on a GPU."""


def run(stage: Stage, threads: int, minutes: Path) -> None:
    """Run a stage, and note how long it took, whatever ends it."""
    others = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *others])}
    if not stage.is_timed:
        environment["OMP_NUM_THREADS"] = str(threads)
    began = time.monotonic()
    process = subprocess.Popen(list(map(str, stage.command)), env=environment)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C reached it too, and it may have steps to save
        raise
    finally:
        spent = json.loads(minutes.read_text()) if minutes.exists() else {}
        name = stage.product.relative_to(minutes.parent).as_posix()
        spent[name] = round(spent.get(name, 0) + (time.monotonic() - began) / 60, 2)
        write_text(minutes, json.dumps(spent, indent=2) + "\n")
    if process.returncode:
        sys.exit(process.returncode)


@click.command()
@click.argument("name", type=click.Choice(list(NAMES)))
@click.option("--target", type=click.Path(path_type=Path), default=PYCODE / "target")
@click.option("--data", type=click.Path(path_type=Path), default=Path("tasks"))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
)
@click.option("--measure", is_flag=True, help="Measure what has been trained.")
@click.option("--seed", default=1, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of a training.")
@click.option("--share", default=1.0, show_default=True, help="Of all steps.")
@click.option("--gpu", is_flag=True, help="Steps of a GPU.")
@click.option("--quantize", default=QUANTIZE, show_default=True, help="Of bundles.")
@click.option("--list", "listed", is_flag=True, help="Print the commands only.")
def main(
    name: str,
    target: Path,
    data: Path,
    output: Path,
    measure: bool,
    seed: int,
    threads: int,
    share: float,
    gpu: bool,
    quantize: str,
    listed: bool,
) -> None:
    """Run the trainings of the recipe NAME, or with --measure its measurements."""
    if gpu and name not in FOR_A_GPU:
        raise click.UsageError(f"{name} has no other steps on a GPU; leave --gpu out")
    try:
        Recipe.parse(quantize)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    work = (output / (f"{name}-gpu" if gpu else name)).absolute()
    inputs = Inputs(target.absolute(), data.absolute(), work, seed, gpu, quantize)
    for stage in [whole.shortened(share) for whole in NAMES[name](inputs)]:
        if stage.is_timed != measure or (stage.is_done and not listed):
            continue
        click.echo("$ " + " ".join(map(str, stage.command)), err=True)
        if not listed:
            work.mkdir(parents=True, exist_ok=True)
            run(stage, threads, work / "minutes.json")


if __name__ == "__main__":
    main()
