"""The layout in which the library `jetdraft.native` reads a matrix.

`native/format.h` describes it. The formats are llama.cpp's types, with their own
integers and scales: nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

Bytes = npt.NDArray[np.uint8]

GROUP, BLOCK = 16, 32
"""Columns of a group, and numbers of a block."""


