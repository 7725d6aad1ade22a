from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetdraft import Drafting, Options
from jetdraft.contracts.step_contract import StepContract
from jetdraft.methods import Method, registered
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.proposers.model_proposer import ModelProposer
from jetdraft.runtime.proposers.proposer import Traits
from jetdraft.runtime.text.codec import TextStream
from jetdraft.runtime.text.stops import Ending, StopWatcher
from jetdraft.testing import toy_bundle
from tests import toy_graphs
from tests.toy_graphs import COMMON, GUESSES, IDS, SIZE, WIDTH, toy_block, toy_eagle

GLIDE = StepContract(**COMMON, reads=((0, 1, SIZE),))
CHIMERA = StepContract(
    **COMMON, feature_input=WIDTH, carried_size=WIDTH, recent=2, draft_vocab=len(IDS)
)
NAME = "fake"


def _toy(folder: Path, method: str) -> None:
    toy_bundle(folder)


def handmade(folder: Path, method: str, guesses: Any = GUESSES) -> None:
    if method == "eagle":
        toy_eagle(folder, guesses)
    elif method in ("glide", "chimera"):
        toy_graphs.write_toy(
            folder, {"glide": GLIDE, "chimera": CHIMERA}[method], guesses
        )
    else:
        toy_block(folder, method, guesses)


def _exported(folder: Path, method: str) -> None:
    import torch

    from jetdraft.checkpoints.streams import FORECAST, PromptSettings
    from tests.checkpoints.heads import layouts
    from tests.tiny import exported, llama_config, save_checkpoint, save_probes

    torch.manual_seed(3)
    checkpoint, options = folder.with_name(f"{method}-checkpoint"), {}
    layers = 2 if method == "kangaroo" else 1
    save_checkpoint(checkpoint, llama_config(num_hidden_layers=layers))
    source = None
    if method == "ppd":
        ranks = ((0.5, 0.2), (0.4, 0.2), (0.3, 0.1))
        save_probes(checkpoint, PromptSettings(gamma=3, ranks=ranks))
    elif method == "forecast":
        save_probes(checkpoint, PromptSettings(gamma=3, prefix=4, mode=FORECAST))
    elif method == "select":
        options = {"select_kv": 16}
    else:
        head = (*layouts.medusa(), "medusa_lm_head.pt")
        if method != "medusa":
            head = layouts.one_layer(method)
        source = layouts.write(folder.with_name(f"{method}-head"), *head)
    exported(checkpoint, folder, "int4", head=source, capacity=96, **options)


def _encoder_decoder(folder: Path, method: str) -> None:
    from tests.sources import CONFIGS, save, save_drafter
    from tests.tiny import exported

    target = save(folder.with_name("t5"), CONFIGS["t5"])
    drafter = save_drafter(folder.with_name("t5-drafter"), target, 5)
    exported(target, folder, head=drafter)


MAKE: dict[str, Callable[[Path, str], Any]] = {
    **dict.fromkeys(("lookup", "draft", "trigram", "cascade", "recall"), _toy),
    **dict.fromkeys(("eagle", "glide", "chimera", "dflash", "diffusion"), handmade),
    **dict.fromkeys(("kangaroo", "falcon", "select", "medusa"), _exported),
    **dict.fromkeys(("ppd", "forecast"), _exported),
    "block": _encoder_decoder,
    "stream": lambda folder, method: toy_graphs.streamed_bundle(folder),
}
"""How the bundle of each method is made."""


class MethodBundles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, method: str) -> Path:
        make = MAKE[method]
        bundle = self._folder / ("toy" if make is _toy else method)
        if not bundle.exists():
            make(bundle, method)
        return bundle


def pieces_of(
    model,
    prompt,
    sampling,
    proposer=None,
    length=7,
    tokens=200,
    eos=(),
    exact=True,
    widths=None,
    verifier=None,
):
    method = Method(NAME, "what a test proposes", lambda parts, options: proposer)
    with registered(method):
        drafting = Drafting("none", exact=exact)
        if proposer is not None:
            drafting = Drafting(NAME, length, exact)
        options = Options(sampling, drafting=drafting, ending=Ending(tokens))
        ids = [int(token) for token in prompt]
        generation = Generation(model.parts, model.planner, ids, options)
        generation.watcher = StopWatcher(TextStream(None, [], eos), eos)
        generation.widths = widths or generation.widths
        generation.verifier = verifier or generation.verifier
        model.parts.prefix.forget()
        try:
            return list(generation.run()), generation.stats
        finally:
            model.parts.prefix.forget()


def tokens_of(model, prompt, sampling, proposer=None, **options):
    pieces, stats = pieces_of(model, prompt, sampling, proposer, **options)
    return [token for piece in pieces for token in piece.token_ids], stats


def drafter_of(graph, name="draft"):
    widest = graph.contract.max_width - 1
    return ModelProposer(DraftCache(graph), Traits(name, widest, Kind.COUPLED))
