import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.export.measures import QUESTIONS, REPLY_TOKENS, sample_text
from jetdraft.quant.calibration import own_attention
from jetdraft.quant.choice import (
    DRAFTER_CHOICES,
    MIX_SHARE,
    choose_drafter_recipe,
    choose_recipe,
)
from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import RUNGS, Recipe
from tests.tiny import drafter_config, llama_config, save_checkpoint

ORT, OURS = "onnxruntime", "jetdraft"
*FOUR_BITS, EIGHT_BITS, SAFE = RUNGS[ORT]


class Known:
    """A divergence whose figures are given; the bytes follow from the bits."""

    units = {str(layer): {} for layer in range(10)} | {"head": {}}
    drop_blocks = staticmethod(lambda: None)

    def __init__(self, kl, layer=0.0, eight_bits=((64, 0.002), (32, 0.001))):
        self.kl, self.layer, self.eight_bits = kl, layer, dict(eight_bits)

    def mean_kl(self, recipe):
        if recipe.has_grids:
            return self.kl[recipe.scheme] - self.layer * len(recipe.raised)
        if recipe.scheme == "int8":
            return self.eight_bits[recipe.block_size]
        return self.kl[recipe.block_size] - self.layer * len(recipe.raised)

    def kl_of_units(self, recipes, batches=None):
        return self.layer * (int(*recipes) + 1) if "head" not in recipes else 0.0

    def bytes_of_unit(self, unit, recipe):
        return recipe.bits

    def bytes_of(self, recipe):
        return sum(recipe.of_unit(unit).bits for unit in self.units)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ({32: 0.001, 64: 0.002, 128: 0.003}, FOUR_BITS[0]),
        ({32: 0.01, 64: 0.02, 128: 0.04}, FOUR_BITS[1]),
        ({32: 0.02, 64: 0.04, 128: 0.05}, FOUR_BITS[2]),
    ],
)
def test_the_largest_blocks_that_keep_the_text(kl, expected):
    recipe, measured = choose_recipe(Known(kl), ORT, bound=0.03)
    assert recipe == Recipe.parse(expected)
    assert measured == kl[recipe.block_size]


def test_a_mix_where_rounding_is_not_enough():
    worse = dict.fromkeys((64, 128), 1.0)
    recipe, kl = choose_recipe(Known({32: 0.06, **worse}, layer=0.01), ORT, bound=0.03)
    assert recipe.name == "int4-rtn-b32-up7.8.9-head8", "the worst layers first"
    assert kl == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("kl", "layer", "expected"),
    [
        ({"q4_k": 0.02}, 0.0, "q4_k-headq6_k"),
        ({"q4_k": 0.06, "q5_k": 0.01}, 0.01, "q4_k-up7.8.9-headq6_k"),
        ({"q4_k": 0.06, "q5_k": 0.01}, 0.003, "q5_k-headq6_k"),
        ({"q4_k": 1.0, "q5_k": 0.5, "q6_k": 0.2, "q8_0": 0.1}, 0.0, "q8_0"),
    ],
)
def test_types_of_llama_cpp_from_the_cheapest_up(kl, layer, expected):
    recipe, measured = choose_recipe(Known(kl, layer), OURS, bound=0.03)
    assert recipe.name == expected
    assert measured == pytest.approx(kl[recipe.scheme] - layer * len(recipe.raised))


def test_eight_bits_where_a_mix_saves_nothing():
    known = Known({32: 0.09, **dict.fromkeys((64, 128), 1.0)}, layer=0.0065)
    eight_bits = Recipe.parse(EIGHT_BITS)
    assert choose_recipe(known, ORT, bound=0.03) == (eight_bits, 0.002)
    mix = Recipe.parse("int4-b32-up0.1.2.3.4.5.6.7.8.9-head8")
    assert known.bytes_of(mix) > MIX_SHARE * known.bytes_of(eight_bits)
    hopeless = Known(dict.fromkeys((32, 64, 128), 9.0), layer=0.0)
    assert choose_recipe(hopeless, ORT, bound=0.03)[0] == eight_bits


@pytest.mark.parametrize("finest", [0.02, 0.05])
def test_smaller_blocks_where_eight_bits_are_not_enough(finest):
    fine = ((64, 0.04), (32, finest))
    known = Known(dict.fromkeys((32, 64, 128), 9.0), eight_bits=fine)
    assert choose_recipe(known, ORT, bound=0.03) == (Recipe.parse(SAFE), finest)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    configs = {"target": llama_config(), "drafter": drafter_config()}
    return {
        name: Checkpoint.load(
            str(save_checkpoint(folder / name, config)), torch.float32
        )
        for name, config in configs.items()
    }


def test_a_model_writes_its_own_text(pair):
    target, before = pair["target"], torch.random.get_rng_state()
    steps = []
    text = sample_text(target, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (REPLY_TOKENS, REPLY_TOKENS)
    assert text.ids.shape[0] == len(QUESTIONS)
    assert text.scored == REPLY_TOKENS < text.ids.shape[1]
    assert torch.equal(text.ids, sample_text(target).ids)
    assert torch.equal(before, torch.random.get_rng_state())
    logits = target.model
    with own_attention(logits), torch.no_grad():
        rows = logits(text.ids, use_cache=False).logits.log_softmax(-1)
    chosen = rows[:, :-1].gather(-1, text.ids[:, 1:, None])[:, -REPLY_TOKENS + 1 :]
    uniform = -torch.tensor(float(rows.shape[-1])).log()
    assert chosen.mean() > uniform + 0.1, "more likely than random tokens"


def test_only_the_scored_tokens_are_compared(pair):
    target, text = pair["target"].model, sample_text(pair["target"])
    recipe = Recipe("int4", 16)
    with own_attention(target):
        kl = Divergence(target, text, {}).mean_kl(recipe)
        text.scored = text.ids.shape[1]
        whole = Divergence(target, text, {})
        compared = whole.scored * sum(map(len, whole.batches))
        assert compared > REPLY_TOKENS * len(QUESTIONS)
        assert whole.mean_kl(recipe) != kl > 0


def test_overlap_is_the_acceptance_of_sampled_drafts(pair):
    text = sample_text(pair["target"])
    models = {}
    for name, checkpoint in pair.items():
        with own_attention(checkpoint.model):
            models[name] = Divergence(checkpoint.model, text, {})
    target, drafter = models["target"], models["drafter"]
    floats = Recipe("none")
    with own_attention(target.model), own_attention(drafter.model):
        assert target.overlap(floats, target) == pytest.approx(1.0, abs=1e-5)
        p, q = (torch.cat(m._logprobs).exp() for m in (target, drafter))
        expected = float(torch.minimum(p, q).sum(-1).mean())
        assert drafter.overlap(floats, target) == pytest.approx(expected, abs=1e-5)
        ids = torch.tensor([3, 7, 9])
        part = float(torch.minimum(p[:, ids], q[:, ids]).sum(-1).mean())
        # As though the drafter's head had all rows and theirs were the first.
        first = drafter.overlap(floats, target, torch.arange(p.shape[1]))
        assert 0 < part < first == pytest.approx(expected, abs=1e-5)
        choice = choose_drafter_recipe(target, drafter, Recipe("int8", 32), ORT)
    assert choice.recipe.name in (*DRAFTER_CHOICES[ORT], "int8-rtn-b32-head4")
    assert choice.full_overlap == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("size", "lost", "head_lost", "expected"),
    [
        (1e6, 0.10, 0.02, "int8-rtn-b32"),  # a pass takes its fixed time in any case
        (1e6, 0.10, 0.009, "int8-rtn-b32-head4"),
        (1e3, 0.009, 0.0, "int4-rtn-b32"),
        (5e8, 0.03, 0.0, "int4-rtn-b32"),
        (5e8, 0.60, 0.02, "int8-rtn-b32"),
    ],
)
def test_a_drafter_gets_the_bits_that_make_the_pair_fast(
    size, lost, head_lost, expected
):
    class Target:
        bytes_of = staticmethod(lambda recipe: 3 * size)

    def overlap(recipe, other, ids):
        head = head_lost if recipe.head == "int4" else 0.0
        return 0.8 - (lost if recipe.bits == 4 else head)

    class Drafter:
        drop_blocks = staticmethod(lambda: None)
        bytes_of = staticmethod(lambda recipe: size * recipe.bits / 8)

    Drafter.overlap = staticmethod(overlap)
    choice = choose_drafter_recipe(Target(), Drafter(), Recipe(), ORT)
    assert choice.recipe.name == expected
    assert choice.full_overlap == 0.8
