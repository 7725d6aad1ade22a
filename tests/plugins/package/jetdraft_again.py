"""Drafts what followed the last token the last time; all of it from outside."""

from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.errors import OptionError
from jetdraft.methods import LoadedBundle, Method, MethodOptions, Proposer, Rows, Traits


@dataclass(frozen=True)
class AgainOptions(MethodOptions):
    """`memory` is how many of the last tokens are searched."""

    memory: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 1:
            raise OptionError(
                f"memory {self.memory} is too small; give 1 or more", "drafting"
            )


class AgainProposer(Proposer):
    """Repeats the tokens after the last place of the last token."""

    traits = Traits("again", max_draft_tokens=8)

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def propose(
        self, context: Sequence[int], budget: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """At most `budget` tokens; none where the last token is new."""
        past = list(context[-self.memory - 1 :])
        last = past[-1]
        if last not in past[:-1]:
            return Rows.chain([last])
        place = len(past) - 2 - past[-2::-1].index(last)
        cycle = past[place + 1 :]
        return Rows.chain([last, *(cycle * budget)[:budget]])


def make(parts: LoadedBundle, options: AgainOptions) -> Proposer:
    """A proposer for any bundle."""
    return AgainProposer(options.memory)


METHOD = Method("again", "what followed the last token", make, AgainOptions)
