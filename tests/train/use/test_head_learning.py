"""Drafters learn from use: a head, whose states are computed again from the texts, and
a model whose requests move to another topic."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.parameters import store_weights_in
from jetdraft.errors import CheckpointError, OptionError
from jetdraft.export.drafters import drafter_arrays, head_arrays
from jetdraft.learning.lessons import VERDICT_TOKENS, Lesson, WeightSets, drafter_sha256
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.train.learning import Pace, UseOptions, UseTraining, publish
from jetdraft.train.students import UNROLLED_STEPS, load_student
from jetdraft.train.task import TrainingOptions
from tests.exports import exported
from tests.toy_drafter import save_drafter
from tests.train.periodic import PERIOD, made, nothing, write_periodic

QUICK = TrainingOptions(steps=12, batch_size=2, sequence_length=48, validate_every=12)
LAYERS = 4
SETTINGS = EagleSettings(draft_vocabulary=40)


@pytest.fixture(scope="module")
def world(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    text = write_periodic(folder / "text.txt")
    made(EagleTask, target, folder / "head", [text], SETTINGS, QUICK).run(nothing)
    options = {"drafter_recipe": "int8-rtn", "capacity": 128, "max_width": 32}
    exported(target, folder / "bundle", head=folder / "head", **options)
    return folder


def test_an_export_of_the_same_head_changes_nothing(world, target):
    bundle, checkpoint = Bundle.open(world / "bundle"), load(target)
    head = load_head(str(world / "head"), checkpoint, torch.float32)
    assert head_arrays(bundle, checkpoint, head) == {}


def load(target):
    return Checkpoint.load(target, torch.float32)


def test_a_wrong_place_counts_in_each_step_that_reaches_it(world):
    """Row t of step i says what a draft from row t says of token t + 2 + i."""
    student = load_student(Bundle.open(world / "bundle"))
    head = student.load({})
    tokens = np.arange(1, 20)
    _, first, *_ = student.bundle.draft_vocabulary()
    ids, logits = np.array([[first, 0]]), np.array([[2.0, 1.0]], np.float32)
    assert [
        student.missed(head, [Lesson(tokens, np.array([place]), ids, logits)]).places
        for place in (1, 2, 4, 12)
    ] == [0, 1, 3, UNROLLED_STEPS]


def test_it_learns_and_the_text_stays(world):
    """More of its tokens are accepted after the swap, as in the training's figures."""
    bundle, learned = Bundle.open(world / "bundle"), world / "learned"
    prompts = [(PERIOD * 3)[start:60] for start in range(0, 40, 2)]
    how = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    drafted = {"method": "eagle", "num_draft_tokens": 3, **how}
    with jetdraft.load(world / "bundle", threads=1, learn=learned) as model:
        plain = [model.generate(p, method="none", **how).token_ids for p in prompts]

        def rate():
            results = [model.generate(p, **drafted) for p in prompts]
            assert [result.token_ids for result in results] == plain
            shares = [r.stats.by_method["eagle"] for r in results]
            return sum(s.accepted_tokens for s in shares) / sum(
                s.evaluated_tokens for s in shares
            )

        before = rate()
        options = UseOptions(steps=60, learning_rate=1e-2)
        figures = UseTraining(load_student(bundle), learned, options).run(Pace())
        assert figures.after.right > figures.before.right
        assert figures.name is not None
        rates = [rate() for _ in range(3)]
        assert model.parts.learning.weights.version > 0
    assert max(rates) > before + 0.1


def test_what_it_needs(world, target):
    bundle = Bundle.open(world / "bundle")
    with pytest.raises(CheckpointError, match=r"name it with --target"):
        load_student(bundle, target=str(world / "no"))
    with pytest.raises(CheckpointError, match=r"name it with --from"):
        load_student(bundle, str(world / "no"))
    with pytest.raises(CheckpointError):
        load_student(bundle, target)
    graphs = {name: graph for name, graph in bundle.graphs.items() if name == "target"}
    with pytest.raises(OptionError, match="only a drafter model, or a head"):
        load_student(replace(bundle, graphs=graphs))


# Online Speculative Decoding (2310.07177) reports that acceptance rises by 0.1 to 0.65.

ROUNDS = 2500
"""The rounds after the shift in which acceptance must be back."""

DRAFTED = {
    "method": "draft", "num_draft_tokens": 4, "max_new_tokens": 48, "temperature": 0.0,
    "ignore_eos": True,
}  # fmt: skip
SENSORS = ("battery", "temperature", "pressure", "speed", "distance", "light")
ASKED = ("What is the {}?", "Tell me the {}.", "How is the {}?", "Read the {} sensor.")
WHO = ("The robot", "A robot", "The red robot", "The small robot", "A man", "The cat")
DOES = ("sees", "moves", "finds", "takes", "follows", "likes")


class Traffic:
    """Generates texts of a topic again and again, and counts what was accepted."""

    def __init__(self, model, prompts):
        self.model, self.prompts = model, itertools.cycle(prompts)
        self.rounds = 0

    def rate(self, tokens):
        accepted = evaluated = 0
        while evaluated < tokens:
            share = self.one()
            accepted += share.accepted_tokens
            evaluated += share.evaluated_tokens
        return accepted / evaluated

    def one(self):
        stats = self.model.generate(token_ids=next(self.prompts), **DRAFTED).stats
        self.rounds += stats.by_method["draft"].rounds
        return stats.by_method["draft"]


def learn_first_topic(source, texts):
    """Matrices of a drafter that knows no other texts, by name."""
    model = Checkpoint.load(str(source), torch.float32).model
    store_weights_in(model, torch.float32)
    model.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    matrices = {n: w for n, w in model.named_parameters() if "proj" in n}
    for weight in matrices.values():
        weight.normal_(0, 0.1).requires_grad_(True)
    optimizer = torch.optim.AdamW(matrices.values(), lr=5e-3)
    rows = torch.tensor([text[: min(map(len, texts))] for text in texts])
    for _ in range(30):
        batch = rows[torch.randint(len(rows), (8,))]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in matrices.items()}


def test_acceptance_comes_back_after_a_shift(toy, tmp_path):
    bundle, learned = Bundle.open(toy), tmp_path / "learned"
    source = save_drafter(toy, tmp_path / "drafter")
    with jetdraft.load(toy, threads=1, learn=learned) as model:
        first = [
            model.chat_prompt([{"role": "user", "content": ask.format(sensor)}])
            for sensor, ask in itertools.product(SENSORS, ASKED)
        ]
        second = [
            model.prompt(" ".join(words)).tolist()
            for words in itertools.product(WHO, DOES)
        ]
        plain = {**DRAFTED, "method": "none", "num_draft_tokens": None}
        texts = [[*p, *model.generate(token_ids=p, **plain).token_ids] for p in first]
        wanted = [model.generate(token_ids=p, **plain).token_ids for p in second]
        put_first_topic(bundle, learned, source, texts)

        before = Traffic(model, first).rate(2 * VERDICT_TOKENS)
        traffic = Traffic(model, second)
        shifted = traffic.rate(6 * VERDICT_TOKENS)
        student = load_student(bundle, str(source))
        training = UseTraining(student, learned, UseOptions(steps=300))
        rates = [shifted]
        while rates[-1] <= before and traffic.rounds <= ROUNDS:
            figures = training.run(Pace())
            assert figures.after.right > figures.before.right
            traffic.rate(2 * VERDICT_TOKENS)  # the rate before the trial, and the trial
            assert training.sets.read_choice().before is None, "judged"
            rates.append(traffic.rate(2 * VERDICT_TOKENS))
        print(f"{before:.3f} before, {rates}, {traffic.rounds} rounds")
        assert shifted < before - 0.1
        assert rates[-1] > before
        assert traffic.rounds <= ROUNDS
        again = [model.generate(token_ids=p, **DRAFTED).token_ids for p in second]
        assert again == wanted


def put_first_topic(bundle, learned, source, texts):
    matrices = learn_first_topic(source, texts)
    checkpoint = Checkpoint.load(str(source), torch.float32)
    for name, weight in checkpoint.model.named_parameters():
        if name in matrices:
            weight.copy_(matrices[name])
    arrays = drafter_arrays(bundle, checkpoint, torch.tensor(texts[0]))
    sets = WeightSets(learned, drafter_sha256(bundle))
    sets.settle(publish(sets, arrays, matrices, ""), keep=True)
