"""Each mistake that an engine has made with a published head lowers its acceptance."""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.methods.eagle.module import Eagle
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.train.teacher import Lesson
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.conftest import watched
from tests.checkpoints.heads.layouts import LAYERS, VD, H, write
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint
from tests.train.periodic import descend, teach

SYMBOLS, ORDER = 5, 3
TAPS = [0, 1, 2]
DRAFTED = 3
# The part of the text that is drafted.
FIRST, LAST = 30, 130
# Tokens a round that a mistake costs at least.
FALL = 0.2
ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}


def text() -> Tensor:
    """Tokens of which any three in a row occur once, and then their beginning again."""
    order = [0] * SYMBOLS * ORDER
    letters: list[int] = []

    def extend(place: int, period: int) -> None:
        if place > ORDER:
            letters.extend(order[1 : period + 1] if ORDER % period == 0 else ())
            return
        order[place] = order[place - period]
        extend(place + 1, period)
        for letter in range(order[place - period] + 1, SYMBOLS):
            order[place] = letter
            extend(place + 1, place)

    extend(1, 1)
    return torch.tensor([10 + 3 * letter for letter in letters + letters[:30]])


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate") / "target"
    config = llama_config(
        num_hidden_layers=LAYERS,
        tie_word_embeddings=False,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    save_checkpoint(folder, config, tokenizer=False)
    model, ids = AutoModelForCausalLM.from_pretrained(folder), text()[None]
    teach(model, ids, 130)
    model.save_pretrained(folder)
    target = Checkpoint.load(str(folder), torch.float32)
    target.model.set_attn_implementation("eager")
    streams, out = watched(target.model, ids)
    right = out.logits[0, FIRST:LAST].argmax(-1) == ids[0, FIRST + 1 : LAST + 1]
    assert right.float().mean() > 0.95, "the text must be the target's own"
    known = {"streams": streams, "final": out.hidden_states[-1], "logits": out.logits}
    return SimpleNamespace(target=target, ids=ids, **known)


def eagle3(taught, folder) -> Eagle:
    norms = dict.fromkeys(("norm_output", "fc_norm", "norm_before_residual"), True)
    taps = {"eagle_aux_hidden_state_layer_ids": TAPS}
    config, tensors = layouts.speculators(**norms, **taps)
    config["transformer_layer_config"]["rope_parameters"] = ROPE
    # A layer norms what is recycled, so that even weights here would do nothing.
    tensors["norm.weight"] = torch.linspace(0.2, 3.0, H)
    known = text().unique()
    ids = torch.cat([known, torch.arange(150, 150 + VD - len(known))])
    tensors["d2t"] = ids - torch.arange(VD)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    tensors["t2d"][ids] = True
    return load_head(write(folder, config, tensors), taught.target, torch.float32)


def eagle1(taught, folder) -> Eagle:
    config, tensors = layouts.eagle1(embedding=False)
    return load_head(write(folder, config, tensors), taught.target, torch.float32)


def learn(head: Eagle, taught, part: str = "", steps: int = 100) -> None:
    own = {id(weight) for weight in taught.target.model.parameters()}
    named = head.named_parameters()
    weights = [w for name, w in named if id(w) not in own and part in name]
    for weight in weights:
        weight.requires_grad_(True)
    ids = taught.ids
    logits = taught.logits if head.ids is None else taught.logits[..., head.ids]
    known = torch.ones(ids.shape, dtype=torch.bool)
    lesson = Lesson(ids, ids, taps_of(head, taught), taught.final, logits, known)
    task = EagleTask(EagleSettings(unrolled=DRAFTED))
    pupil = task.pupil(head)
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    for _ in range(steps):
        sums = pupil(lesson)
        descend(optimizer, task.total(sums, sums.places))
    head.requires_grad_(False).eval()


def taps_of(head: Eagle, taught) -> list[Tensor]:
    return [taught.streams[tap] for tap in head.config.taps] or [taught.final]


@dataclass
class Loop:
    """Draft, verify, catch up; `shift` and `keeps` are mistakes (EAGLE, section 2)."""

    head: Eagle
    taps: list[Tensor]
    offset: int = 0
    shift: int = 0
    keeps: bool = False

    def tokens_per_round(self) -> float:
        features, words = self.head.fuse(self.taps)[0], text().tolist()
        self.cache = DynamicCache()
        place, fed, rounds = FIRST, 0, 0
        while place < LAST:
            self._crop(min(fed, place - 1))
            rows = range(self.cache.get_seq_length(), place)
            token, carried = self._run(
                [words[row + 1] for row in rows], features[rows], rows
            )
            draft = [token]
            for step in range(DRAFTED - 1):
                at = [place + step + self.shift]
                token, carried = self._run(draft[-1:], carried, at)
                draft.append(token)
            accepted = 0
            while accepted < DRAFTED and draft[accepted] == words[place + 1 + accepted]:
                accepted += 1
            fed = place + accepted if self.keeps else place
            place, rounds = place + accepted + 1, rounds + 1
        return (place - FIRST) / rounds

    def _run(self, tokens, features, positions) -> tuple[int, Tensor]:
        places = torch.tensor([[self.offset + position for position in positions]])
        hidden, carried = self.head(
            torch.tensor([tokens]), features[None], places, self.cache
        )
        best = int(self.head.lm_head(hidden)[0, -1].argmax())
        ids = self.head.ids
        return best if ids is None else int(ids[best]), carried[0, -1:]

    def _crop(self, length: int) -> None:
        surplus = self.cache.get_seq_length() - length
        if surplus > 0:
            self.cache.crop(-surplus)


@pytest.fixture(scope="module")
def trained(taught, tmp_path_factory):
    folder, heads = tmp_path_factory.mktemp("gate-heads"), {}
    for make in (eagle3, eagle1):
        torch.manual_seed(8)
        heads[make] = make(taught, folder / make.__name__)
        learn(heads[make], taught)
    return heads


def embedding_after_the_feature(loop, _):
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(loop.head.stack.layers[0].self_attn, name).weight
        weight.data = weight.data.roll(H, dims=1)


def flagged(**flags):
    def change(loop, _):
        loop.head.config = replace(loop.head.config, **flags)

    return change


def tapped(change):
    return lambda loop, taught: setattr(loop, "taps", change(loop.taps, taught.streams))


MISTAKES = {
    "taps off by one": tapped(lambda _, all_: [all_[t + 1] for t in TAPS]),
    "taps in another order": tapped(lambda taps, _: taps[::-1]),
    "features shifted by a row": tapped(lambda taps, _: [t.roll(1, 1) for t in taps]),
    "residual flag flipped": lambda loop, _: setattr(
        loop.head.first_layer, "norm_before_residual", False
    ),
    "recycled state not normed": flagged(carries_normed=False),
    "embedding after the feature": embedding_after_the_feature,
    "offsets read as ids": lambda loop, _: setattr(
        loop.head, "ids", loop.head.ids - torch.arange(VD)
    ),
    "rope of the target": lambda loop, taught: setattr(
        loop.head.stack, "rotary", taught.target.model.model.rotary_emb
    ),
    "drafts at other positions": lambda loop, _: setattr(loop, "shift", 1),
    "drafted rows kept": lambda loop, _: setattr(loop, "keeps", True),
}
OF_EAGLE1 = {
    "state before the final norm": tapped(lambda _, all_: [all_[-1]]),
    "feature before the embedding": flagged(hidden_first=True),
    "drafted rows of EAGLE-1 kept": MISTAKES["drafted rows kept"],
}


def loop_of(trained, taught, kind) -> Loop:
    head = trained[kind]
    taps = taps_of(head, taught)
    # A mistake must not change the head of the next test, nor copy the target.
    own = {id(module): module for module in taught.target.model.modules()}
    return Loop(copy.deepcopy(head, memo=own), taps)


@pytest.mark.parametrize("kind", [eagle3, eagle1], ids=lambda k: k.__name__)
def test_a_trained_head_drafts_the_text(trained, taught, kind):
    with torch.no_grad():
        assert loop_of(trained, taught, kind).tokens_per_round() > 2.5


@pytest.mark.parametrize("mistake", [*MISTAKES, *OF_EAGLE1])
def test_a_mistake_lowers_the_acceptance(trained, taught, mistake):
    loop = loop_of(trained, taught, eagle1 if mistake in OF_EAGLE1 else eagle3)
    with torch.no_grad():
        right = loop.tokens_per_round()
        (MISTAKES | OF_EAGLE1)[mistake](loop, taught)
        assert loop.tokens_per_round() < right - FALL


@pytest.mark.parametrize("offset", [1, 7])
def test_all_positions_may_be_off_by_the_same(trained, taught, offset):
    """Some count a row by its token, some by its feature: only differences matter."""
    loop = loop_of(trained, taught, eagle3)
    with torch.no_grad():
        right = loop.tokens_per_round()
        loop.offset = offset
        assert loop.tokens_per_round() == right
