"""Who may propose in a generation, and who decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from jetdraft.errors import DraftError, MethodError
from jetdraft.runtime.measured.curve import Costs
from jetdraft.runtime.measured.rates import Acceptance
from jetdraft.runtime.measured.widths import Calibration, prefill_widths
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.planning.controller import Adaptive, Controller, Fixed
from jetdraft.runtime.planning.drafting import AUTO, MAX_DRAFT_TOKENS
from jetdraft.runtime.planning.options import NONE, Options
from jetdraft.runtime.planning.tuning import Tuning
from jetdraft.runtime.proposers import (
    DraftProposer,
    Proposer,
    StreamProposer,
    TreeProposer,
)
from jetdraft.runtime.proposers.draft_stops import (
    STOPPING,
    AcceptanceHead,
    Learned,
    Stopping,
)
from jetdraft.runtime.proposers.follower import Follower
from jetdraft.runtime.sampling.verifiers import check_kind


class Planner:
    """Knows a bundle's proposers and what they cost and earn on this machine.

    What it learns lives on from one generation to the next. `unasked` are the
    proposers that "auto" picks from; `head` reads the learned acceptance head.

        proposers = planner.choose(options)
        controller = planner.controller(options, proposers)
    """

    def __init__(
        self,
        target: Graph,
        follower: Follower | None,
        calibration: Calibration,
        proposers: dict[str, Proposer],
        unasked: Collection[str],
        head: Callable[[], AcceptanceHead],
    ) -> None:
        self.calibration = calibration
        self.proposers = proposers
        self.acceptance: dict[str, Acceptance] = defaultdict(Acceptance)
        self.costs = Costs(
            target=dict(calibration.target_ms),
            draft={name: p.ms_per_token for name, p in proposers.items()},
            probe=calibration.probe_ms,
        )
        self._target = target
        self._follower = follower
        self._unasked = unasked
        self._head = head

    @property
    def methods(self) -> tuple[str, ...]:
        """What `method` may be, "auto" aside."""
        return (NONE, *self.proposers)

    @property
    def drafts_trees(self) -> bool:
        """Whether target and drafter can run branching drafts."""
        drafter = None if self._follower is None else self._follower.graph
        graphs = (self._target, drafter)
        return all(graph is not None and graph.contract.tree for graph in graphs)

    def plan_with(self, found: Tuning) -> None:
        """Believe what `jetdraft tune` measured."""
        # The load-time curve has only the widths that a controller plans.
        known = self.costs.target.keys() & found.chain_ms.keys()
        self.costs.target.update({width: found.chain_ms[width] for width in known})
        for name in self.costs.draft.keys() & found.draft_ms.keys():
            self.costs.draft[name] = found.draft_ms[name]
        self.costs.tree = dict(found.tree_ms)
        self.costs.compaction = found.compaction_ms

    def widths(self, options: Options) -> Sequence[int]:
        """The pass widths a generation may use."""
        if options.exact:
            return self.calibration.exact_widths
        return sorted(self.calibration.target_ms)

    @property
    def prefills(self) -> list[int]:
        """The widths to read prompts in, so that their rows are those of decoding.

        None where no wide pass has such rows.
        """
        if not self.calibration.prefills_agree:
            return []
        return prefill_widths(self._target.contract)

    def choose(self, options: Options) -> dict[str, Proposer]:
        """Who may propose in a generation; raises `MethodError`."""
        names, probes = options.methods, self._probes(options)
        for unknown in set(names) - {NONE, AUTO, *self.proposers}:
            raise self._no_method(unknown)
        if "stream" in names and not probes:
            raise MethodError(
                "on this machine probes change the last bits of the rows beside them; "
                "choose another method or add --no-exact"
            )
        if not options.drafting.is_chain:
            if not self._trees(options):
                raise MethodError(
                    "on this machine passes that branch change the last bits of their "
                    "rows; choose tree chain or add --no-exact"
                )
            return {names[0]: self._tree_proposer(names[0], options)}
        if names == (AUTO,):
            names = tuple(n for n in self._unasked if probes or n != "stream")
        chosen = {name: self.proposers[name] for name in names if name != NONE}
        stopping = self._stopping(options)
        if stopping is None:
            return chosen
        if self._follower is None or "draft" not in chosen:
            raise MethodError(
                f"stopping {options.stopping!r} ends a drafter's drafts and there is "
                "none here; leave it out"
            )
        cost = self.costs.draft["draft"]
        chosen["draft"] = DraftProposer(self._follower, cost, stopping)
        return chosen

    def controller(
        self, options: Options, proposers: dict[str, Proposer]
    ) -> Controller:
        """Who decides: a fixed plan, or measured times and running acceptance."""
        names, count = options.methods, options.num_draft_tokens
        name = names[0]
        if name == NONE:
            return Fixed(None, 0)
        for proposer in proposers.values():
            check_kind(options.drafting.checker, proposer.kind)
        if not options.drafting.is_chain:
            self._check_fits(options)
            return Fixed(proposers[name], count or options.drafting.rows)
        if name != AUTO and len(names) == 1 and count is not None:
            return Fixed(proposers[name], count)
        if options.prune_threshold is not None:
            # Its pass times are not those that are known of the whole target.
            return Fixed(proposers[name], proposers[name].streams)
        return Adaptive(
            list(proposers.values()),
            self.costs,
            self.acceptance,
            self.widths(options),
            count or MAX_DRAFT_TOKENS,
            options.exact,
            options.drafting.may_branch and self._trees(options),
        )

    def _probes(self, options: Options) -> bool:
        """Whether rows may carry streams."""
        return self.calibration.probes_agree or not options.exact

    def _trees(self, options: Options) -> bool:
        """Whether passes may branch."""
        return self.calibration.trees_agree or not options.exact

    def _tree_proposer(self, name: str, options: Options) -> Proposer:
        shape, kind = options.drafting.shape, options.drafting.kind
        if name == "stream":
            return StreamProposer(self._target, shape, kind)
        if self._follower is None or not self.drafts_trees:
            raise MethodError(
                "the bundle verifies chains only, since a model of it attends in "
                "sliding windows; leave the tree out"
            )
        cost = self.calibration.drafter_ms[1]
        return TreeProposer(self._follower, shape, kind, cost)

    def _stopping(self, options: Options) -> Stopping | None:
        """What ends a drafter's drafts early."""
        if options.stopping is None:
            return None
        if options.stopping != Learned.name:
            return STOPPING[options.stopping](options.stop_threshold)
        return Learned(self._head(), options.stop_threshold)

    def _no_method(self, name: str) -> MethodError:
        if name == "recall":
            return MethodError(
                "recall needs a store of earlier responses; give --store FILE "
                "(store=), and if you do, export the bundle again with this version"
            )
        known = ", ".join((AUTO, *self.methods))
        hint = {
            "draft": "; draft needs a drafter: export with --drafter, turn it not off",
            "cascade": "; cascade needs a drafter, as draft does",
            "stream": "; for stream export a checkpoint that jetdraft train streams "
            "wrote",
        }.get(name, "")
        return MethodError(f"the bundle has no method {name!r}; choose {known}{hint}")

    def _check_fits(self, options: Options) -> None:
        """A tree of a given size must fit into a pass whole."""
        drafting, widest = options.drafting, max(self.widths(options))
        sized = drafting.branching is not None or drafting.tree_parents is not None
        if sized and drafting.rows > widest - 1:
            raise DraftError(
                f"the tree has {drafting.rows} rows, a pass of this bundle holds "
                f"{widest - 1} beside the root; make it smaller or export with a "
                "larger --max-width"
            )
