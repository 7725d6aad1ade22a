"""jetdraft: speculative decoding on ONNX Runtime for small devices.

Usage:

    import jetdraft

    model = jetdraft.load("bundle")
    result = model.generate("def fib(n):", max_new_tokens=64)
    print(result.text, result.stats.tokens_per_pass)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetdraft.bundle import Bundle as Bundle
    from jetdraft.errors import *  # noqa: F403
    from jetdraft.export.request import export as export
    from jetdraft.runtime.conversation import Conversation as Conversation
    from jetdraft.runtime.measured.stats import Stats as Stats
    from jetdraft.runtime.model import Model as Model
    from jetdraft.runtime.model import load as load
    from jetdraft.runtime.passes.opener import LoadOptions as LoadOptions
    from jetdraft.runtime.piece import Piece as Piece
    from jetdraft.runtime.piece import Result as Result
    from jetdraft.runtime.planning.drafting import Drafting as Drafting
    from jetdraft.runtime.planning.options import GenerateOptions as GenerateOptions
    from jetdraft.runtime.planning.options import Options as Options
    from jetdraft.runtime.pool import Pool as Pool
    from jetdraft.runtime.sampling.chooser import Logprob as Logprob
    from jetdraft.runtime.sampling.chooser import Sampling as Sampling
    from jetdraft.runtime.sampling.processors import Penalties as Penalties
    from jetdraft.runtime.speech.segments import Segment as Segment
    from jetdraft.runtime.speech.segments import Transcript as Transcript
    from jetdraft.runtime.speech.transcription import (
        TranscribeOptions as TranscribeOptions,
    )
    from jetdraft.runtime.speech.transcription import Transcription as Transcription
    from jetdraft.runtime.stream import AsyncStream as AsyncStream
    from jetdraft.runtime.stream import Stream as Stream
    from jetdraft.runtime.text.constraint import Constraint as Constraint
    from jetdraft.runtime.text.stops import Ending as Ending
    from jetdraft.runtime.text.tools import ToolCall as ToolCall
    from jetdraft.runtime.text.tools import Tools as Tools

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "bundle": ("Bundle",),
    "errors": (
        *("BundleError", "CheckError", "CheckpointError", "ConstraintError"),
        *("ContractError", "DataError", "DeviceError", "DraftingError"),
        *("JetdraftError", "LengthError", "OptionError"),
        *("OutputError", "PairError", "ProviderError", "StoreError", "TrainingError"),
        "UnsupportedModelError",
    ),
    # `jetdraft.export` is a package and a function too, see its `__init__`.
    "export": ("export",),
    "runtime.conversation": ("Conversation",),
    "runtime.measured.stats": ("Stats",),
    "runtime.model": ("Model", "load"),
    "runtime.passes.opener": ("LoadOptions",),
    "runtime.piece": ("Piece", "Result"),
    "runtime.planning.drafting": ("Drafting",),
    "runtime.planning.options": ("GenerateOptions", "Options"),
    "runtime.pool": ("Pool",),
    "runtime.sampling.chooser": ("Logprob", "Sampling"),
    "runtime.sampling.processors": ("Penalties",),
    "runtime.speech.segments": ("Segment", "Transcript"),
    "runtime.speech.transcription": ("TranscribeOptions", "Transcription"),
    "runtime.stream": ("AsyncStream", "Stream"),
    "runtime.text.constraint": ("Constraint",),
    "runtime.text.stops": ("Ending",),
    "runtime.text.tools": ("ToolCall", "Tools"),
}

__all__ = sorted(name for names in _PUBLIC_NAMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    for place, names in _PUBLIC_NAMES.items():
        if name in names:
            module = import_module(f"jetdraft.{place}")
            value = module if name == place else getattr(module, name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'jetdraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
