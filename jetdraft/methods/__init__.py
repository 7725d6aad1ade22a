"""What a package needs to bring its own method of drafting.

Usage, in a package whose pyproject.toml names `my_package.repeat:METHOD` as an entry
point of the group `jetdraft.methods`:

    from jetdraft.methods import Method, Proposer, Rows, Traits

    class Repeat(Proposer):
        traits = Traits("repeat", max_draft_tokens=1)

        def propose(self, context, budget, parents=None):
            return Rows.chain([context[-1], context[-1]])

    METHOD = Method("repeat", "the last token, again", lambda parts, options: Repeat())
"""

from jetdraft.runtime.drafts.probes import Probing
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.target import Target
from jetdraft.runtime.planning.registry import methods, registered
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer, Seen, Traits
from jetdraft.runtime.proposers.tree_options import TreeOptions
from jetdraft.runtime.sampling.chooser import Chooser

__all__ = [
    "Answer",
    "Chooser",
    "Kind",
    "Method",
    "MethodOptions",
    "Parts",
    "Probing",
    "Proposer",
    "Rows",
    "Seen",
    "Target",
    "Traits",
    "TreeOptions",
    "methods",
    "registered",
]
