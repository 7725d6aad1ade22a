"""Which widths of a target agree bit by bit on this machine.

Widths whose rows are identical form a *class*; an exact generation stays inside one, so
that its text cannot depend on how rows were grouped into passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from jetdraft.contracts.constants import WIDEST
from jetdraft.contracts.step_contract import StepContract
from jetdraft.parsing import in_range, read_record

Width = Annotated[int, in_range(1, WIDEST)]


@dataclass(frozen=True)
class Widths:
    """Which passes of a target agree bit by bit on this machine, as far as is known.

    classes         lists of widths whose rows are bit for bit the same
    gaps[w]         the largest logit difference between width w and the exact class
    base            a width of the exact class; None for the largest class
    untried         widths that were not compared yet; no exact pass has such a width
    probes_agree    probes change no bit of the rows of an exact pass
    trees_agree     a branching pass gives a chain's rows the same bits
    prefills_agree  the wide passes that read a prompt give the bits of decoding;
                    None if they were not compared yet
    """

    classes: list[list[Width]]
    gaps: dict[Width, float]
    base: Width | None = None
    untried: tuple[Width, ...] = ()
    probes_agree: bool = True
    trees_agree: bool = True
    prefills_agree: bool | None = None

    @property
    def exact(self) -> list[int]:
        """The class of `base`, ascending; without a base the largest class.

        Of equal classes it is the class with the narrowest width.
        """
        if self.base is not None:
            return next(sorted(w) for w in self.classes if self.base in w)
        by_size = {(len(members), -min(members)): members for members in self.classes}
        return sorted(by_size[max(by_size)])

    def allowed(self, exact: bool) -> list[int]:
        """The widths that a generation may use, ascending."""
        return self.exact if exact else sorted({*self.gaps, *self.untried})

    @classmethod
    def from_json(cls, fields: Any) -> Widths:
        """Read its fields from JSON; raises `ValueError` where they are malformed."""
        known: Widths = read_record(cls, fields)
        widths = [width for members in known.classes for width in members]
        if sorted(widths) != sorted(known.gaps) or not all(known.classes):
            raise ValueError("the classes do not hold every measured width once")
        base, untried = known.base, {*known.untried}
        if not widths or untried & {*widths} or base not in (None, *widths):
            raise ValueError("the base or the untried widths do not fit the classes")
        return known


def prefill_widths(contract: StepContract) -> list[int]:
    """The widths of the passes that read a prompt, widest first.

    Multiples of the widest decoding pass, since kernels take rows in twos or fours.
    """
    wide, widths = contract.max_width, []
    while wide >= 2 * WIDEST:
        widths.append(wide - wide % WIDEST)
        wide //= 2
    return widths
