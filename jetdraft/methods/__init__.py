"""The methods of drafting, a folder each, and what a package needs to bring its own.

Usage, in a package whose pyproject.toml names `my_package.repeat:METHOD` as an entry
point of the group `jetdraft.methods`:

    from jetdraft.methods import Method, Proposer, Rows, Traits

    class Repeat(Proposer):
        traits = Traits("repeat", max_draft_tokens=1)

        def propose(self, context, budget, parents=None):
            return Rows.chain([context[-1], context[-1]])

    METHOD = Method("repeat", "the last token, again", lambda loaded, options: Repeat())
"""

from jetdraft.runtime.drafts.rows import Kind, Probing, Rows
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Answer, Target
from jetdraft.runtime.planning.registry import methods, registered
from jetdraft.runtime.proposers.method import Method, MethodOptions, TreeOptions
from jetdraft.runtime.proposers.proposer import Proposer, Seen, Traits
from jetdraft.runtime.sampling.chooser import Chooser

__all__ = ["Answer", "Chooser", "Kind", "LoadedBundle", "Method", "MethodOptions"]
__all__ += ["OWN", "Probing", "Proposer", "Rows", "Seen", "Target", "Traits"]
__all__ += ["TreeOptions", "methods", "registered"]

OWN = (
    *("lookup", "draft", "eagle", "kangaroo", "glide", "chimera", "falcon", "select"),
    *("medusa", "dflash", "diffusion", "block", "stream", "ppd", "forecast", "recall"),
    *("trigram", "cascade"),
)
"""The folders of jetdraft's methods, in the order of tables; each has a `method.py`."""
