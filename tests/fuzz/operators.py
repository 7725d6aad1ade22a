"""Packed operators with damaged sizes, types, attributes and ids, under sanitizers."""

from __future__ import annotations

import platform
import runpy
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from jetdraft import native
from jetdraft.quant.grids import GRIDS
from tests.fuzz.subject import Subject
from tests.native.operators import ARRAYS, random_matrix, session
from tests.programs import ROOT

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NUMBERS = (-1, 0, 1, 31, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))


class Operators(Subject):
    """Damages what an operator reads, and runs it; a light one needs no sanitizers."""

    name = "operators"

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        if light:
            return
        setup, objects = runpy.run_path(str(ROOT / "setup.py")), list[Path]()
        for source, flags in setup["SOURCES"][platform.machine()].items():
            objects.append(folder / f"{source}.o")
            names = "-O1", "-c", setup["FOLDER"] / f"{source}.cpp", "-o", objects[-1]
            command = ["g++", *setup["FLAGS"], *SANITIZERS, *flags, *names]
            subprocess.run(command, check=True)
        native.LIBRARY = folder / "sanitized.so"
        command = ["g++", "-shared", *SANITIZERS, *objects, "-o", native.LIBRARY]
        subprocess.run(command, check=True)

    @classmethod
    def environment(cls) -> dict[str, str]:
        """The sanitizer's own library comes first in a process; Python itself leaks."""
        command = ["g++", "-print-file-name=libasan.so"]
        library = subprocess.check_output(command, text=True).strip()
        return {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}

    def run(self, draw: Random) -> str:
        """An operator over a matrix with damage, or without any."""
        columns, rows = draw.randint(1, 40), draw.choice((1, 31, 64, 256, 300))
        matrix = random_matrix(draw.choice(GRIDS), columns, rows, draw.randrange(99))
        kind = draw.choice(("MatMulPacked", "GatherPacked"))
        changed: dict[str, Any] = {}
        for _ in range(draw.choice((0, 1, 1, 2))):
            name = draw.choice(("N", "K", "format", "layout", *ARRAYS))
            changed[name] = draw.choice((*NUMBERS, draw.randint(1, 999)))
            if name in ARRAYS:
                array = matrix.packed()[ARRAYS.index(name)]
                size = draw.choice((0, 8, array.size - 8, array.size))
                array = np.resize(array, size).view(draw.choice(("u1", "i1", "f4")))
                changed[name] = array.reshape(draw.choice(((-1,), (1, -1), (-1, 1, 1))))
        shape = [draw.choice((0, 1, 1, 1, 2)) for _ in range(draw.randint(0, 9))]
        if kind == "GatherPacked":
            ids = *range(columns), *draw.sample(NUMBERS, draw.choice((0, 0, 1)))
            x = np.array(draw.choices(ids, k=int(np.prod(shape)))).reshape(shape)
        else:
            width = draw.choice((rows, rows, rows, 0, 1, rows + 1))
            number = draw.choice((0, 1.5, np.nan, np.inf))
            x = np.full((*shape[:8], width), number, np.float32)
        try:
            session(kind, matrix, threads=draw.randint(1, 3), **changed).run(
                None, {"x": x}
            )
        except Exception as error:  # onnxruntime's exceptions have no common base
            return "refused by jetdraft" if "export the" in str(error) else "refused"
        return "computed damage" if changed else "computed"
