"""Options of a method are read from text and from Python; methods are registered."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from jetdraft.errors import OptionError
from jetdraft.methods import (
    Method,
    MethodOptions,
    Proposer,
    Rows,
    Traits,
    methods,
    registered,
)
from jetdraft.runtime.planning.drafting import Drafting


@dataclass(frozen=True)
class EveryType(MethodOptions):
    count: int = 1
    share: float = 0.5
    eager: bool = False
    file: Path | None = None
    levels: tuple[int, ...] | None = None
    threshold: float | str | None = None
    name: str = ""


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("count", "3", 3),
        ("count", 3, 3),
        ("count", "-2", -2),
        ("share", "0.25", 0.25),
        ("share", "1", 1.0),
        ("share", 2, 2.0),
        ("eager", "true", True),
        ("eager", "false", False),
        ("eager", True, True),
        ("file", "notes.npz", Path("notes.npz")),
        ("file", Path("notes.npz"), Path("notes.npz")),
        ("file", None, None),
        ("levels", "3,2,1", (3, 2, 1)),
        ("levels", "4", (4,)),
        ("levels", [3, 2], (3, 2)),
        ("levels", (3, 2), (3, 2)),
        ("levels", None, None),
        ("threshold", "0.05", 0.05),
        ("threshold", 0.05, 0.05),
        ("threshold", "auto", "auto"),
        ("threshold", None, None),
        ("name", "12", "12"),
        ("verifier", "typical", "typical"),
    ],
)
def test_a_value_is_read_as_its_type(key, value, expected):
    read = getattr(EveryType.of({key: value}), key)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("count", "many", "an integer"),
        ("count", "1.5", "an integer"),
        ("count", 1.5, "an integer"),
        ("count", True, "an integer"),
        ("count", None, "an integer"),
        ("share", "half", "a number"),
        ("share", True, "a number"),
        ("share", [0.5], "a number"),
        ("eager", "yes", "true or false"),
        ("eager", "", "true or false"),
        ("eager", 1, "true or false"),
        ("file", 7, "a path"),
        ("levels", "3,x", "a list of integers, for example 2,1"),
        ("levels", "", "a list of integers"),
        ("levels", 3, "a list of integers"),
        ("levels", [2.5], "a list of integers"),
        ("levels", [True], "a list of integers"),
        ("threshold", [0.1], "a number or a text"),
        ("name", 5, "a text"),
        ("verifier", 5, "a text"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, words):
    pattern = rf"drafting option {key} cannot be .*; give {words}"
    for make in (EveryType.of, lambda settings: EveryType(**settings)):
        with pytest.raises(OptionError, match=pattern) as refusal:
            make({key: value})
        assert refusal.value.field == "drafting"


def test_a_field_of_a_type_that_no_option_has_is_refused():
    @dataclass(frozen=True)
    class Odd(MethodOptions):
        names: frozenset[str] = frozenset()

    with pytest.raises(OptionError, match="names has a field of type frozenset"):
        Method("odd", "an odd field", lambda parts, options: None, Odd)


def test_an_unknown_key_is_refused_with_all_keys():
    keys = (
        "verifier, user, select_kv, top, tolerance, count, share, eager, file, levels, "
        "threshold, name"
    )
    with pytest.raises(OptionError, match=f"option 'size'; choose {keys}$") as refusal:
        EveryType.of({"size": 1})
    assert refusal.value.field == "drafting"


@pytest.mark.parametrize("name", ["", "auto", "none", "a,b", "a b", "-"])
def test_names_that_cannot_be(name):
    with pytest.raises(OptionError, match="cannot name a method") as refusal:
        Method(name, "nothing", lambda parts, options: None)
    assert refusal.value.field == "method"


class Same(Proposer):
    traits = Traits("same", max_draft_tokens=4)

    def __init__(self, token):
        self.token = token
        self.asked = 0

    def propose(self, context, budget, parents=None):
        self.asked += 1
        return Rows.chain([context[-1], *[self.token] * budget])


def same(proposer, name="same"):
    return Method(name, "one token", lambda parts, options: proposer, EveryType)


def test_a_registered_method_is_there_for_a_while():
    before = dict(methods())
    with registered(same(Same(5))):
        assert [*methods()] == [*before, "same"]
        assert isinstance(Drafting("same").options["same"], EveryType)
    assert [*methods().items()] == [*before.items()]
    with pytest.raises(OptionError, match="unknown method 'same'"):
        Drafting("same")


def test_the_registry_is_restored_after_an_error_and_a_replacement():
    """Nobody can change it otherwise."""
    before = dict(methods())
    other = same(Same(5), "lookup")
    with registered(other):
        assert methods()["lookup"] is other
    with pytest.raises(KeyError, match="moon"), registered(same(Same(5))):
        methods()["moon"]
    assert [*methods().items()] == [*before.items()]
    with pytest.raises(TypeError):
        methods()["same"] = same(Same(5))


def test_each_method_of_a_name_has_its_own_proposer(model):
    """One after the other, for example in a test or a benchmark."""
    how = {"max_new_tokens": 8, "num_draft_tokens": 2, "ignore_eos": True}
    plain = model.generate(token_ids=[5, 8], method="none", max_new_tokens=8)
    for proposer in (Same(5), Same(6)):
        with registered(same(proposer)):
            assert "same" in model.methods
            found = model.generate(token_ids=[5, 8], method="same", **how)
        assert proposer.asked > 0
        assert found.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert "same" not in model.methods


def test_a_proposer_lives_on_with_its_options(model):
    made = []

    def make(parts, options):
        made.append(options.count)
        return Same(options.count)

    how = {"max_new_tokens": 4, "num_draft_tokens": 2, "method": "same"}
    with registered(Method("same", "one token", make, EveryType)):
        for count in (1, 2, 1, 2):
            model.generate(token_ids=[5, 8], drafting={"count": count}, **how)
    assert made == [1, 2]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OptionError("no moon; export it", "method"), "no method 'moon': no moon; "),
        (OptionError("no moon; export it", ""), "no method 'moon': no moon; export it"),
        (KeyError("boom"), "method 'moon' failed"),
    ],
    ids=repr,
)
def test_a_method_that_cannot_be_made_is_left_out_of_auto(model, error, words):
    with registered(Method("moon", "the moon", Mock(side_effect=error))):
        assert "moon" not in model.methods
        how = {"token_ids": [5, 8], "max_new_tokens": 4}
        assert model.generate(method="auto", **how).token_ids
        with pytest.raises(OptionError, match=words) as refusal:
            model.generate(method="moon", **how)
        assert refusal.value.field == "method"


def test_auto_refuses_wrong_options_of_a_method(model):
    def make(parts, options):
        if options.count > 4:
            raise OptionError("count is too large for this bundle; give 4", "drafting")
        return Same(5)

    with registered(Method("same", "one token", make, EveryType)):
        with pytest.raises(OptionError, match="count is too large") as refusal:
            model.generate(token_ids=[5, 8], drafting={"count": 5})
        assert refusal.value.field == "drafting"
        model.generate(token_ids=[5, 8], drafting={"count": 4}, max_new_tokens=4)


def test_auto_leaves_out_who_wants_to_be_left_out(model):
    with registered(replace(same(Same(5)), in_auto=lambda options: options.eager)):
        for eager in (True, False):
            lineup = model.planner.proposer_set(Drafting(settings={"eager": eager}))
            names = [proposer.traits.name for proposer in lineup.proposers]
            assert ("same" in names) == eager
