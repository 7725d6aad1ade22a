"""The operators for onnxruntime's CPU provider, which `setup.py` compiles."""

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path

from jetdraft.errors import ProviderError, as_error

DOMAIN = "jetdraft"
MULTIPLY, GATED = "MatMulPacked", "MatMulGated"
GATHER, EXPERTS = "GatherPacked", "MatMulExperts"
OPERATORS = (
    *(MULTIPLY, GATED, GATHER, EXPERTS),
    *("GroupQueryAttention", "LinearAttention", "CausalConvolution"),
)
# The file may be missing; a clone's library may lie where it was installed.
_PLACES = [Path(__file__).parent, *(Path(p, "jetdraft", "native") for p in sys.path)]
_FILES = [place / f"{platform.machine()}.so" for place in _PLACES]
LIBRARY = next(filter(Path.exists, _FILES), _FILES[0])


@functools.cache
def isa() -> str:
    """The instructions that products use here, like "avx2"; raises `ProviderError`."""
    fact = "jetdraft's library of operators does not load"
    fix = "install jetdraft again on this machine, or export with --kernel onnxruntime"
    with as_error(ProviderError, (OSError, AttributeError), fact, fix):
        library = ctypes.CDLL(str(LIBRARY))
        library.jetdraft_isa.restype = ctypes.c_char_p
    name: bytes | None = library.jetdraft_isa()
    if name is None:
        fact = f"JETDRAFT_ISA={os.environ['JETDRAFT_ISA']!r} names no instructions of"
        raise ProviderError(f"{fact} this processor; leave it out")
    return name.decode()
