"""jetdraft: speculative decoding on ONNX Runtime for small devices.

Usage:

    import jetdraft

    model = jetdraft.load("bundle")
    result = model.generate("def fib(n):", max_new_tokens=64)
    print(result.text, result.stats.tokens_per_pass)
"""

from jetdraft.bundle import Bundle
from jetdraft.errors import (
    BundleError,
    CheckError,
    CheckpointError,
    ContractError,
    DataError,
    DeviceError,
    JetdraftError,
    OptionError,
    OutputError,
    PairError,
    ProviderError,
    StoreError,
    TrainingError,
    UnsupportedModelError,
)
from jetdraft.runtime.async_stream import AsyncStream
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.pool import Pool
from jetdraft.runtime.sampling.logprobs import Logprob
from jetdraft.runtime.text_stream import Stream

__version__ = "0.1.0"

__all__ = [
    "AsyncStream",
    "Bundle",
    "BundleError",
    "CheckError",
    "CheckpointError",
    "ContractError",
    "Conversation",
    "DataError",
    "DeviceError",
    "JetdraftError",
    "Logprob",
    "Model",
    "OptionError",
    "Options",
    "OutputError",
    "PairError",
    "Piece",
    "Pool",
    "ProviderError",
    "Result",
    "Stats",
    "StoreError",
    "Stream",
    "TrainingError",
    "UnsupportedModelError",
    "load",
]
