"""Our operators with damaged sizes, types, attributes and ids, under sanitizers."""

import platform
import runpy
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from jetdraft import native
from jetdraft.quant.grids import GRIDS
from tests.fuzz import Subject
from tests.native.operators import ARRAYS, Attending, random_matrix, session
from tests.programs import ROOT

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NUMBERS = (-1, 0, 1, 31, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))


class Operators(Subject):
    name = "operators"

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        if light:
            return
        setup, objects = runpy.run_path(str(ROOT / "setup.py")), list[Path]()
        for source, flags in setup["SOURCES"][platform.machine()].items():
            objects.append(folder / f"{source}.o")
            # g++ marks the stack with AVX-512 even where it asks for AVX-512.
            stack = f"--param=asan-stack={int(not flags)}"
            names = "-c", setup["FOLDER"] / f"{source}.cpp", "-o", objects[-1]
            quiet = "-O1", "-w", "-Wno-psabi"
            options = *setup["FLAGS"], *SANITIZERS, *quiet, stack, *flags
            subprocess.run(["g++", *options, *names], check=True)
        native.LIBRARY = folder / "sanitized.so"
        command = ["g++", "-shared", *SANITIZERS, *objects, "-o", native.LIBRARY]
        subprocess.run(command, check=True)

    @classmethod
    def environment(cls) -> dict[str, str]:
        """The sanitizer comes first in a process, with C++; Python itself leaks."""
        names = [f"-print-file-name={name}.so" for name in ("libasan", "libstdc++")]
        files = [subprocess.check_output(["g++", n], text=True).strip() for n in names]
        return {"LD_PRELOAD": " ".join(files), "ASAN_OPTIONS": "detect_leaks=0"}

    def run(self, draw: Random) -> str:
        return draw.choice((self._multiply, self._attend))(draw)

    def _attend(self, draw: Random) -> str:
        heads, size, rows = map(draw.choice, ((1, 2, 6), (2, 8, 20), (0, 1, 9)))
        kv_heads, packed, rotates = draw.choice((1, heads)), *draw.choices((0, 1), k=2)
        case = Attending(heads, kv_heads, size, 40, packed, do_rotary=rotates)
        bias = draw.choice((None, np.zeros((1, heads, rows, 30), np.float32)))
        feeds = case.feeds(range(rows), draw.randrange(20), case.buffers(30), bias)
        attributes, damage = case.attributes, draw.choice((0, 1, 1, 2))
        for name in draw.sample([*feeds, *attributes], damage):
            number = draw.choice((*NUMBERS, *range(12)))
            if name in attributes:
                attributes[name] = type(attributes[name])(number)
            elif feeds[name].dtype != np.float32 and draw.random() < 0.7:
                feeds[name] = np.full_like(feeds[name], np.array(number).astype("i4"))
            else:
                shape = [draw.choice((n, n, n + 1, 0)) for n in feeds[name].shape]
                feeds[name] = np.resize(feeds[name], shape[draw.choice((0, 0, 1)) :])
        try:
            case.session(feeds, threads=draw.randint(1, 3)).run(None, feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base
            return "refused by jetdraft" if "attention" in str(error) else "refused"
        return "computed damage" if damage else "computed"

    def _multiply(self, draw: Random) -> str:
        columns, rows = draw.randint(1, 40), draw.choice((1, 31, 64, 256, 300))
        made = random_matrix(draw.choice(GRIDS), columns, rows, draw.randrange(99))
        kind = draw.choice(("MatMulPacked", "MatMulGated", "GatherPacked"))
        is_gated = kind == "MatMulGated"
        factors = {"linear": 1.0, "cubic": draw.choice((0.0, 0.1, np.nan, 3e38))}
        other: dict[str, Any] = factors if is_gated else {}
        if kind != "GatherPacked" and draw.random() < 0.5:
            other["bias"] = np.ones(columns + draw.choice((0, 0, 0, 1)), np.float32)
        whole = len(other)
        for _ in range(draw.choice((0, 1, 1, 2))):
            name = draw.choice(("N", "K", "format", "layout", *ARRAYS))
            other[name] = draw.choice((*NUMBERS, *range(2, 9), columns + 1))
            if name in ARRAYS:
                array = made.packed()[ARRAYS.index(name)]
                size = draw.choice((0, 8, array.size - 8, array.size))
                array = np.resize(array, size).view(draw.choice(("u1", "i1", "f4")))
                other[name] = array.reshape(draw.choice(((-1,), (1, -1), (-1, 1, 1))))
        shape = draw.choices((0, 1, 1, 1, 2), k=draw.choice((0, 1, 2, 3, 9)))
        if kind == "GatherPacked":
            ids = *range(columns), *draw.sample(NUMBERS, draw.choice((0, 0, 1)))
            drawn = draw.choices(ids, k=int(np.prod(shape)))
            x = np.array(drawn, np.int64).reshape(shape)
        else:
            rows *= 2 if is_gated else 1
            width = draw.choice((*[rows] * 6, 0, 1, rows + 1))
            number = draw.choice((0, 1.5, np.nan, np.inf))
            x = np.full((*shape[:8], width), number, np.float32)
        try:
            session(kind, made, threads=draw.randint(1, 3), **other).run(None, {"x": x})
        except Exception as error:  # onnxruntime's exceptions have no common base
            return "refused by jetdraft" if "export the" in str(error) else "refused"
        return "computed damage" if len(other) > whole else "computed"
