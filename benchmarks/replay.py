"""Replays recorded texts with the real controller, in seconds instead of hours.

    python benchmarks/replay.py record BUNDLE prompts/code.jsonl -o code.json
    python benchmarks/replay.py play code.json

`record` decodes plainly and notes at each place what drafter and lookup would draft.
Their tokens do not depend on what was drafted before, so `play` knows how many tokens
of any draft are right, and adds up the times of passes and drafted tokens.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft.methods import Method, MethodOptions, Proposer, Rows, Traits, registered
from jetdraft.runtime.measured.curve import Curve
from jetdraft.runtime.measured.rates import Acceptance
from jetdraft.runtime.measured.stats import Round
from jetdraft.runtime.planning.controller import Adaptive
from jetdraft.runtime.proposers.draft import drafter_of
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.sampling.chooser import Chooser

RECORDER = "recorder"
LONGEST = 15
PASS_MS = "1:33.6,2:43.7,3:55.5,4:67.5,5:77,6:87,7:97,8:107,9:117,10:127,12:147,16:187"


class Recorder(Proposer):
    """Notes what both would draft, and drafts nothing."""

    traits = Traits(RECORDER, max_draft_tokens=1)

    def __init__(self, parts: Parts, places: list[dict[str, Any]]) -> None:
        self._drafter, self._lookup = drafter_of(parts, "draft"), LookupProposer()
        self._places = places

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last text."""
        self._chooser = chooser
        self._drafter.begin(prompt)
        self._lookup.begin(prompt, chooser)

    def propose(
        self, context: Sequence[int], budget: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """The root alone."""
        answer = self._drafter.follow(context)
        rows = self._lookup.propose(context, LONGEST)
        place = {
            "place": len(context),
            "draft": self._chooser.choose(answer, [len(context)])[0],
            "lookup": [int(token) for token in rows.tokens[1:]],
            "evidence": self._lookup.evidence,
        }
        self._places.append(place)
        return Rows.chain([context[-1]])


class Replayed(Proposer):
    """A proposer of a recorded text."""

    def __init__(self, traits: Traits, text: dict[str, Any]) -> None:
        self.traits = traits
        self._tokens = [*text["prompt"], *text["tokens"]]
        self._places = {place["place"]: place for place in text["places"]}

    def propose(
        self, context: Sequence[int], budget: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """What was recorded; behind the drafter's first wrong token all are wrong."""
        start = len(context)
        if self.traits.name == "lookup":
            place = self._places[start]
            self.evidence = place["evidence"]
            return Rows.chain([context[-1], *place["lookup"][:budget]])
        drafted: list[int] = []
        while len(drafted) < budget:
            here = start + len(drafted)
            guess = self._places[here]["draft"] if here in self._places else -1
            drafted.append(guess)
            if here >= len(self._tokens) or guess != self._tokens[here]:
                drafted += [-1] * (budget - len(drafted))
        return Rows.chain([context[-1], *drafted])


class Replay:
    """Plays texts one after the other; what was learned stays, as in a process."""

    def __init__(self, methods: Sequence[str], curve: Curve) -> None:
        self.methods, self.curve = methods, curve
        self.acceptance: dict[str, Acceptance] = defaultdict(Acceptance)
        self.choices: Counter[str] = Counter()
        self.tokens, self.ms = 0, 0.0

    def play(self, text: dict[str, Any]) -> None:
        """Decode one text from its second token on."""
        limits = {"lookup": 16, "draft": 31}
        proposers = [Replayed(Traits(m, limits[m]), text) for m in self.methods]
        widths = list(self.curve.passes)
        controller = Adaptive(proposers, self.curve, self.acceptance, widths, LONGEST)
        whole = [*text["prompt"], *text["tokens"]]
        here = len(text["prompt"]) + 1
        last = max(place["place"] for place in text["places"])
        while here <= last:
            here += self._round(controller, whole, here)

    def _round(self, controller: Adaptive, whole: list[int], here: int) -> int:
        """One round before the token at `here`; gives the number of its tokens."""
        offers: dict[Proposer, Rows] = {}
        name, drafted, evidence, room = "none", list[int](), 0, len(whole) - here
        while room > 0:
            counts = {p: rows.drafted for p, rows in offers.items()}
            assignment = controller.assign(min(room, LONGEST - 1), counts)
            proposer, budget = assignment.proposer, assignment.budget
            if proposer is None:
                break
            if proposer not in offers:
                offers[proposer] = proposer.propose(whole[:here], budget)
                if proposer.evidence or offers[proposer].drafted < budget:
                    continue
            name, evidence = proposer.traits.name, proposer.evidence
            drafted = offers[proposer].tokens[1 : budget + 1]
            break
        right = 0
        while right < len(drafted) and drafted[right] == whole[here + right]:
            right += 1
        spent = {
            p.traits.name: (
                rows.drafted,
                1e-3 * rows.drafted * self.curve.drafts[p.traits.name],
            )
            for p, rows in offers.items()
        }
        width = next(w for w in self.curve.passes if w > len(drafted))
        seconds = 1e-3 * self.curve.passes[width]
        draft_seconds = sum(own for _, own in spent.values())
        wrong = [(1, 1)] if right < len(drafted) else []
        ranks = [(0, 1)] * right + wrong
        controller.observe(
            Round(
                name, width, len(drafted), ranks, seconds, draft_seconds,
                asked=spent, evidence=evidence,
            )
        )  # fmt: skip
        self.choices[f"{name}:{len(drafted)}"] += 1
        self.tokens += right + 1
        self.ms += 1e3 * (seconds + draft_seconds)
        return right + 1


@click.group()
def main() -> None:
    """Record texts, and play them."""


@main.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--new-tokens", default=128, show_default=True)
def record(
    bundle: Path, prompts: Path, output: Path, temperature: float, new_tokens: int
) -> None:
    """Record the texts of PROMPTS, a file with `token_ids` in each line."""
    places: list[dict[str, Any]] = []
    method: Method[MethodOptions] = Method(
        RECORDER, "notes", lambda parts, options: Recorder(parts, places)
    )
    texts = []
    with registered(method), jetdraft.load(bundle) as model:
        for seed, line in enumerate(prompts.read_text().splitlines()):
            prompt = json.loads(line)["token_ids"]
            places.clear()
            tokens = model.generate(
                token_ids=prompt,
                method=RECORDER,
                num_draft_tokens=1,
                max_new_tokens=new_tokens,
                ignore_eos=True,
                temperature=temperature,
                seed=seed,
                exact=False,
            ).token_ids
            text = {"prompt": prompt, "tokens": [int(t) for t in tokens]}
            texts.append({**text, "places": list(places)})
    output.write_text(json.dumps(texts) + "\n")


@main.command()
@click.argument("recorded", type=click.Path(exists=True, path_type=Path))
@click.option("--pass-ms", default=PASS_MS, show_default=True, help="ms by width.")
@click.option("--draft-ms", default=12.5, show_default=True)
def play(recorded: Path, pass_ms: str, draft_ms: float) -> None:
    """Play RECORDED with lookup, draft and both; speeds over plain decoding."""
    passes = dict(pair.split(":") for pair in pass_ms.split(","))
    for methods in (["lookup"], ["draft"], ["lookup", "draft"]):
        curve = Curve({int(w): float(ms) for w, ms in passes.items()})
        curve.drafts = {"draft": draft_ms, "lookup": 0.0}
        plain_ms, replay = curve.passes[1], Replay(methods, curve)
        for text in json.loads(recorded.read_text()):
            replay.play(text)
        ratio = replay.tokens * plain_ms / replay.ms
        print(f"{'+'.join(methods):14} {ratio:.3f}x", *replay.choices.most_common(6))


if __name__ == "__main__":
    main()
