"""The rows of a pass, the walk that verifies them, and their probes, in short lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.noise import Distribution

Tokens = Sequence[int]  # Token ids: the prompt and what follows it.


def gapless_length(path: Sequence[int]) -> int:
    """How many rows at the start of a path lie side by side in the buffer."""
    return next((i for i, row in enumerate(path) if row != i), len(path))


class Kind(Enum):
    """How the children of a row were picked; it decides which verifiers are exact.

    `DETERMINISTIC` by their rank, `COUPLED` with the target's own noise, `REPLACED` by
    independent draws, `DISTINCT` by draws without replacement, `TOP_AND_ONE` the
    drafter's best tokens and, last, one token drawn from the others.
    """

    DETERMINISTIC = "deterministic"
    COUPLED = "coupled"
    REPLACED = "with-replacement"
    DISTINCT = "without-replacement"
    TOP_AND_ONE = "top-and-one"


@dataclass(frozen=True)
class Rows:
    """A root, row 0 with the parent -1, and the draft below it; parents come first.

    `drawn_from` has the distribution that a row's children were drawn from. `probes` is
    the number of probes that each row must carry; None leaves it to the controller.

        Rows.chain([5, 8, 9]).depths  # [0, 1, 2]
    """

    tokens: list[int]
    parents: list[int]
    kind: Kind = Kind.DETERMINISTIC
    drawn_from: Mapping[int, Distribution] = field(default_factory=dict)
    probes: tuple[int, ...] | None = None

    @classmethod
    def chain(cls, tokens: list[int], kind: Kind = Kind.DETERMINISTIC) -> Rows:
        """Rows of which each is the child of the row before."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), kind)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """How many rows were drafted: all but the root."""
        return len(self.tokens) - 1

    def cut(self, drafted: int) -> Rows:
        """The root and the first `drafted` rows below it."""
        return self.only(range(min(drafted, self.drafted) + 1))

    def only(self, order: Sequence[int]) -> Rows:
        """The rows of `order`, renumbered; parents must come before their children."""
        if list(order) == list(range(len(self.tokens))):
            return self
        place = {row: i for i, row in enumerate(order)}
        probes = self.probes
        return Rows(
            [self.tokens[row] for row in order],
            [-1] + [place[self.parents[row]] for row in order[1:]],
            self.kind,
            {place[row]: q for row, q in self.drawn_from.items() if row in place},
            None if probes is None else tuple(probes[row] for row in order),
        )

    def under(self, path: list[int]) -> Rows:
        """Put the rows below a chain of `path` tokens, the first of them the root."""
        if not path:
            return self
        shift = len(path)
        parents = [*range(-1, shift), *(parent + shift for parent in self.parents[1:])]
        drawn = {row + shift: q for row, q in self.drawn_from.items()}
        probes = None if self.probes is None else (*[0] * shift, *self.probes)
        return Rows(path + self.tokens, parents, self.kind, drawn, probes)

    def depth_first(self) -> Rows:
        """The same tree with each row's first child right after it, without a gap."""
        if self.is_chain:
            return self
        order, waiting = [], [0]
        while waiting:
            row = waiting.pop()
            order.append(row)
            waiting += reversed(self.children(row))
        return self.only(order)

    def check(self) -> None:
        """Raise `OptionError` unless this is a tree with parents before children."""
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise DraftingError("a draft needs a root, and a parent for every row")
        for row, parent in enumerate(self.parents):
            if (parent != -1) if row == 0 else not 0 <= parent < row:
                fact = f"row {row} of the draft has parent {parent}"
                fix = "the root's is -1 and parents come before their children"
                raise DraftingError(f"{fact}; {fix}")

    @property
    def ancestors(self) -> list[list[int]]:
        """Each row's ancestors, root first."""
        ancestors: list[list[int]] = [[]]
        for parent in self.parents[1:]:
            ancestors.append([*ancestors[parent], parent])
        return ancestors

    @property
    def paths(self) -> list[list[int]]:
        """For each row, the tokens from below the root down to the row itself."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            paths.append([*paths[parent], token])
        return paths

    def children(self, row: int) -> list[int]:
        """The rows below `row`, in the order they were drafted."""
        return [i for i, parent in enumerate(self.parents) if parent == row]

    @property
    def is_chain(self) -> bool:
        """Whether each row is the child of the row before."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """The distance of each row from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def ranks(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """For each step of a path: (rank of the next row, number of children).

        The last pair is (n, n) if the path ends above n wrong children.
        """
        below = [self.children(row) for row in path]
        steps = zip(below, path[1:], strict=False)
        ranks = [(siblings.index(row), len(siblings)) for siblings, row in steps]
        left = len(below[-1])
        return [*ranks, (left, left)] if left else ranks

    def walk(self, chosen: Sequence[int]) -> list[int]:
        """The accepted rows, root first: always the child with the `chosen` token."""
        path = [0]
        for row in range(1, len(self.tokens)):
            here = path[-1]
            if self.parents[row] == here and self.tokens[row] == chosen[here]:
                path.append(row)
        return path


@dataclass(frozen=True)
class Probes:
    """Probes of one pass, for the next draft: row i carries `counts[i]` streams."""

    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def carriers(self) -> list[int]:
        """The rows that carry probes."""
        return [row for row, count in enumerate(self.counts) if count]

    @property
    def rows(self) -> list[int]:
        """The carrier of each probe."""
        return [row for row, count in enumerate(self.counts) for _ in range(count)]

    @property
    def ids(self) -> list[int]:
        """The stream of each probe."""
        return [stream for count in self.counts for stream in range(count)]

    def visible(
        self, ancestors: Sequence[Sequence[int]], members: int = 1, prefix: int = 0
    ) -> list[list[int]]:
        """The slots that each slot after the rows attends to, itself left out.

        First come the `prefix` slots, which attend to nothing, then `members` slots for
        each probe. A member attends to the prefix, its carrier, the carrier's
        `ancestors`, and its like in lower streams (2405.18628, figure 4).
        """
        if not self.total:
            return []
        rows = len(ancestors)
        known, first = list(range(rows, rows + prefix)), rows + prefix
        seen: list[list[int]] = [[] for _ in known]
        for row, count in enumerate(self.counts):
            above = [*ancestors[row], row, *known]
            for slot in range(count * members):
                below = range(first + slot % members, first + slot, members)
                seen.append([*above, *below])
            first += count * members
        return seen


NO_PROBES = Probes()


@dataclass(frozen=True)
class Probing:
    """Which rows of a pass carry `streams` probes: all, or the last; or by `counts`."""

    streams: int = 0
    last_only: bool = False
    counts: tuple[int, ...] = ()

    def of(self, rows: int) -> Probes:
        """The probes of a pass over `rows` rows."""
        if self.counts:
            return Probes(self.counts[:rows])
        if not self.streams:
            return NO_PROBES
        counts = [0 if self.last_only else self.streams] * (rows - 1)
        return Probes((*counts, self.streams))


NO_PROBING = Probing()
