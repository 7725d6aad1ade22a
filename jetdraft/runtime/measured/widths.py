"""Which widths of a target agree bit by bit on this machine, and files of profiles."""

import json
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import WIDEST
from jetdraft.devices.detection import detect_machine, processor_digest, processor_name
from jetdraft.errors import ProviderError
from jetdraft.files import replacing
from jetdraft.manifest import SEAL, seal_hash
from jetdraft.native import isa
from jetdraft.ort import ort
from jetdraft.parsing import in_range, read_json_file, read_record
from jetdraft.runtime.measured.cost_model import Curve

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
    skips_agree     and a row that skips slots in the buffer has the bits of a row that
                    does not, so an exact commit may move rows
    prefills_agree  the wide passes that read a prompt give the bits of decoding;
                    None if they were not compared yet
    """

    classes: list[list[Width]]
    gaps: dict[Width, float]
    base: Width | None = None
    untried: tuple[Width, ...] = ()
    probes_agree: bool = True
    trees_agree: bool = True
    skips_agree: bool = False
    prefills_agree: bool | None = None

    @property
    def exact(self) -> list[int]:
        """The class of `base`, ascending, or the largest; of equals the narrowest."""
        if self.base is not None:
            return next(sorted(w) for w in self.classes if self.base in w)
        by_size = {(len(members), -min(members)): members for members in self.classes}
        return sorted(by_size[max(by_size)])

    def allowed(self, exact: bool) -> list[int]:
        """The widths that a generation may use, ascending."""
        return self.exact if exact else sorted({*self.gaps, *self.untried})

    def ends_at_gap(self, exact: bool) -> bool:
        """Whether a generation commits a path only up to its first gap."""
        return exact and not self.skips_agree

    @classmethod
    def from_json(cls, fields: Any) -> "Widths":
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
    """The widths of the passes that read a prompt, widest first."""
    wide, widths = contract.max_width, []
    while wide >= 2 * WIDEST:
        widths.append(wide - wide % WIDEST)
        wide //= 2
    return widths


MAX_THREADS = 1024  # The most threads of a drafter that a tuning file may give.
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)


class Profiles:
    """Reads and writes measurements of the target, or of it with an `adapter`.

    The `provider` of a pair can be "cuda+cpu".
    """

    def __init__(
        self, bundle: Bundle, provider: str, threads: int, adapter: str | None = None
    ) -> None:
        folder, name = bundle.path / "profiles", f"{provider}-{threads}"
        target, own = bundle.sha256, ""
        if adapter is not None:
            target, own = f"{target} with {adapter}", f"-adapter-{adapter}"
        self.file = folder / f"{name}{own}.json"
        self.tuning_file = folder / f"{name}{own}-tuning.json"
        self.acceptance_file = folder / f"acceptance{own}.npz"
        self.machine: dict[str, Any] = {
            "processor": processor_name(),
            "features": processor_digest(),
            "provider": provider,
            "threads": threads,
            "onnxruntime": ort.__version__,
            "bundle": target,
        }
        with suppress(ProviderError):
            self.machine["isa"] = isa()
        if provider != "cpu":
            self.machine["gpu"] = detect_machine().gpu

    def read_survey(self) -> tuple[Widths, Curve] | None:
        """Read widths and curve; None if damaged, or of another machine."""
        with suppress(*_READ_ERRORS):
            fields = read_json_file(self.file)
            if fields["machine"] != self.machine or fields[SEAL] != seal_hash(fields):
                return None
            return Widths.from_json(fields["widths"]), Curve.from_json(fields["curve"])
        return None

    def write_survey(self, widths: Widths, curve: Curve) -> None:
        """Write widths and times for later loads; warns if that fails."""
        fields = {"widths": asdict(widths), "curve": asdict(curve)}
        # As JSON has them: widths that are keys become text.
        whole = json.loads(json.dumps({"machine": self.machine, **fields}))
        self.keep(self.file, **fields, **{SEAL: seal_hash(whole)})

    def read_tuning(self) -> Curve | None:
        """The curve that `jetdraft tune` measured; warns if it is of no use here."""
        if not self.tuning_file.exists():
            return None
        try:
            fields = read_json_file(self.tuning_file)
            machine, curve = fields["machine"], Curve.from_json(fields["curve"])
            if machine == self.machine:
                return curve
            other = machine if isinstance(machine, dict) else {}
            differences = ", ".join(
                f"{name} {other.get(name)!r} instead of {value!r}"
                for name, value in self.machine.items()
                if other.get(name) != value
            )
            reason = f"it was measured elsewhere: {differences}"
        except _READ_ERRORS as error:
            reason = f"it is malformed ({error})"
        fact = f"{self.tuning_file} is not used: {reason}; run jetdraft tune again"
        warnings.warn(fact, stacklevel=5)
        return None

    def drafter_threads(self) -> int | None:
        """The drafter's threads, as `jetdraft tune` chose them here, or None."""
        with suppress(*_READ_ERRORS):
            fields = read_json_file(self.tuning_file)
            chosen, machine = fields["drafter_threads"], fields["machine"]
            is_usable = type(chosen) is int and 1 <= chosen <= MAX_THREADS
            return chosen if is_usable and machine == self.machine else None
        return None

    def keep(self, file: Path, **fields: Any) -> None:
        """Write fields and facts of this machine to a file; warn if that fails."""
        text = json.dumps({"machine": self.machine, **fields}, indent=2)
        try:
            file.parent.mkdir(exist_ok=True)
            with replacing(file) as partial:
                partial.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            fact = f"the measurement could not be kept in {file} ({error.strerror}), "
            fact += "so it is repeated next time; make the folder writable"
            warnings.warn(fact, stacklevel=5)
