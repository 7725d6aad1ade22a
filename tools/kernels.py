"""Renews the tables of kernels in tools/forecast.

    python tools/kernels.py cuda 1.31.1          cuda.json, and contrib.json beside it
    python tools/kernels.py webgpu 1.32.0 0.4.0  webgpu.json; of onnxruntime and plugin
    python tools/kernels.py tensorrt FILE        tensorrt.json from onnx-tensorrt's
                                                 docs/operators.md

onnxruntime tells its own kernels, also without a GPU: the CUDA libraries that it loads
are stubs here, made with gcc, whose functions return 0. The WebGPU plugin needs an
adapter to load; a software adapter does (ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOM = Path(__file__).with_name("forecast")
DOMAINS = ("", "com.microsoft")
NO_LAST = 2**31 - 1
"""onnxruntime's last version of a kernel without a last version."""

WITH_INT64 = ("Add", "Cast", "Clip", "Concat", "Div", "Equal", "Expand", "Gather")
WITH_INT64 += ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul")
WITH_INT64 += ("Range", "ReduceSum", "Reshape", "Sub", "Tile", "Unsqueeze", "Where")
"""What WebGPU runs in int64 too with its option enableInt64, which jetdraft sets. The
plugin does not tell it: a session was opened for a graph of each operator."""

TRT_TYPES = {"FP32": "float", "FP16": "float16", "BF16": "bfloat16"}
TRT_TYPES |= {"FP8": "float8e4m3fn", "DOUBLE": "double"}
"""The parser's names that are not onnxruntime's names in capitals."""

TRT_FLOATS = "float float16 bfloat16"
TRT_LAST_OPSET = 24
TRT_SINCE_LIST = {
    "Attention": ("10.14", TRT_FLOATS),
    "RotaryEmbedding": ("10.15", TRT_FLOATS),
    "RMSNormalization": ("10.15", TRT_FLOATS),
    "TensorScatter": ("10.15", TRT_FLOATS),
    "Swish": ("11.0", TRT_FLOATS),
}
"""Operators newer than the list: from the release notes of onnx-tensorrt (pull requests
1043, 1048 and 1054), which name no types; the types are the types of
TensorRT's layers."""
TRT_NEWEST = "10.16"
"""The release that the table is for; newer operators are left out."""


def main(provider: str, *arguments: str) -> None:
    """Write the tables of one provider."""
    {"cuda": cuda, "webgpu": webgpu, "tensorrt": tensorrt}[provider](*arguments)


def cuda(version: str) -> None:
    """Load the released CUDA build over stubs, and write what it tells."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = installed(folder, f"onnxruntime-gpu=={version}")
        capi = next(folder.rglob("onnxruntime/capi"))
        make_stubs(folder, sorted(capi.glob("*.so")))
        kernels, schemas = query(python, TELL_ALL, LD_LIBRARY_PATH=str(folder))
    source = f"onnxruntime-gpu {version}"
    ours = [kernel for kernel in kernels if kernel[2] == "CUDAExecutionProvider"]
    write("cuda", {"source": source, "kernels": table(ours)})
    write("contrib", {"source": source, "operators": contrib(schemas)})


def webgpu(version: str, plugin: str) -> None:
    """Load the plugin, and write what it tells."""
    with tempfile.TemporaryDirectory() as name:
        packages = (f"onnxruntime=={version}", f"onnxruntime-ep-webgpu=={plugin}")
        python = installed(Path(name), *packages)
        kernels, _ = query(
            python, TELL_WEBGPU, ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER="1"
        )
    source = f"onnxruntime-ep-webgpu {plugin}"
    for row in kernels:
        types = row[4].get("T1" if row[0] == "Cast" else "T")
        if types is not None and row[0] in WITH_INT64 and not row[1]:
            types.append("tensor(int64)")
    write("webgpu", {"source": source, "kernels": table(kernels)})


def tensorrt(file: str) -> None:
    """Write the operators of the parser's list and of its release notes."""
    operators = {}
    row = re.compile(r"\| *(\w+) *\| *Y[^|]*\| *([A-Z0-9, ]*)")
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if match := row.match(line):
            names = match[2].replace("INF64", "INT64").replace(",", " ").split()
            types = " ".join(TRT_TYPES.get(name, name.lower()) for name in names)
            operators[match[1]] = types
    for name, (since, types) in TRT_SINCE_LIST.items():
        if release(since) <= release(TRT_NEWEST):
            operators[name] = types
    kernels = {
        # A condition comes first among Where's inputs.
        name: [[1, TRT_LAST_OPSET, {"1" if name == "Where" else "0": types}]]
        for name, types in sorted(operators.items())
    }
    source = f"the parser of TensorRT {TRT_NEWEST}"
    write("tensorrt", {"source": source, "kernels": {"": kernels}})


def release(text: str) -> tuple[int, ...]:
    """A release's numbers."""
    return tuple(map(int, text.split(".")))


def installed(folder: Path, *packages: str) -> Path:
    """Install packages into a new environment; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True)
    return python


def make_stubs(folder: Path, libraries: Iterable[Path]) -> None:
    """Compile libraries with all CUDA and TensorRT functions that `libraries` miss."""
    functions: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        for line in lines("objdump", "-p", library):
            if (words := line.split())[:1] == ["NEEDED"] and is_nvidia(words[1]):
                functions[words[1]]  # a library may be needed for its name only
        for line in lines("nm", "-D", "--undefined-only", library):
            name, _, version = line.split()[-1].replace("@@", "@").partition("@")
            if is_nvidia(version):
                functions[version].add(name)
            elif not version and name.startswith("cu"):
                functions["libcuda.so.1"].add(name)
            elif not version and re.match("(create|get)[A-Z]", name):
                functions["libnvinfer.so.10"].add(name)
    for library_name, names in functions.items():
        compile_stub(folder, library_name, names)


def compile_stub(folder: Path, library: str, functions: Iterable[str]) -> None:
    """Compile functions that return 0, under the symbol version of their library."""
    source, script = folder / "stub.c", folder / "stub.map"
    code = [f"long {name}(void) {{ return 0; }}\n" for name in sorted(functions)]
    source.write_text("".join(code) or "int nothing;\n")
    script.write_text(f"{library} {{ global: *; }};\n")
    plain = ("libcuda.so", "libnvinfer", "libnvonnxparser")
    version = [] if library.startswith(plain) else [f"-Wl,--version-script={script}"]
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", folder / library, source]
    subprocess.run([*command, f"-Wl,-soname,{library}", *version], check=True)


def is_nvidia(library: str) -> bool:
    """Whether a library is NVIDIA's."""
    return library.startswith(("libcu", "libnv"))


def lines(*command: str | Path) -> list[str]:
    """What a command prints, in lines that are not empty."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.strip()]


TELL = """
import json, sys
from onnxruntime.capi import onnxruntime_pybind11_state as state
def tell(kernels):
    rows = [[k.op_name, k.domain, k.provider, list(k.version_range), k.type_constraints]
            for k in kernels]
    side = lambda group: [[p.name, p.typeStr, str(p.option)] for p in group]
    schemas = [[s.name, s.domain, side(s.inputs), side(s.outputs)]
               for s in state.get_all_operator_schema()]
    json.dump([rows, schemas], open(sys.argv[1], "w"))
"""
TELL_ALL = TELL + "tell(state.get_all_opkernel_def())"
TELL_WEBGPU = (
    TELL
    + """
import onnxruntime, onnxruntime_ep_webgpu
library = onnxruntime_ep_webgpu.get_library_path()
onnxruntime.register_execution_provider_library("webgpu", library)
tell(state.get_registered_ep_kernel_defs("WebGpuExecutionProvider"))
"""
)


def query(python: Path, code: str, **environment: str) -> Any:
    """The kernels and operators of another onnxruntime, from a process of its own."""
    with tempfile.NamedTemporaryFile() as answer:
        command = [python, "-c", code, answer.name]
        subprocess.run(command, check=False, env={**os.environ, **environment})
        # Stubs may crash at exit, after the answer.
        return json.load(answer)


def table(kernels: Iterable[Any]) -> dict[str, dict[str, list[Any]]]:
    """The rows [first, last, types] of each operator, by domain."""
    rows: dict[str, dict[str, list[Any]]] = {domain: {} for domain in DOMAINS}
    for kind, domain, _, (first, last), types in sorted(kernels, key=json.dumps):
        if domain not in rows:
            continue
        allowed = {name: frozenset(map(bare, t)) for name, t in types.items()}
        row = [first, None if last == NO_LAST else last, allowed]
        rows[domain].setdefault(kind, []).append(row)
    for kinds in rows.values():
        for kind, unmerged in kinds.items():
            kinds[kind] = [
                [first, last, {name: " ".join(sorted(t)) for name, t in types.items()}]
                for first, last, types in merged(unmerged)
            ]
    return rows


def merged(rows: list[Any]) -> list[Any]:
    """The rows, of which pairs that differ in one type variable are made one."""
    done: list[Any] = []
    for row in rows:
        for other in done:
            differing = differences(row, other)
            if differing is not None and len(differing) <= 1:
                for name in differing:
                    other[2][name] |= row[2][name]
                break
        else:
            done.append(row)
    return done if len(done) == len(rows) else merged(done)


def differences(row: list[Any], other: list[Any]) -> list[str] | None:
    """The variables in which two rows differ; None if they differ in more."""
    if row[:2] != other[:2] or row[2].keys() != other[2].keys():
        return None
    return [name for name in row[2] if row[2][name] != other[2][name]]


def contrib(schemas: Iterable[Any]) -> dict[str, dict[str, list[str]]]:
    """The formal parameters of the operators that only onnxruntime defines."""
    operators: dict[str, dict[str, list[str]]] = {domain: {} for domain in DOMAINS}
    of_onnx = {row[0] for row in schemas if row[1] == "" and in_onnx(row[0])}
    for kind, domain, inputs, outputs in schemas:
        if domain in operators and not (domain == "" and kind in of_onnx):
            operators[domain][kind] = [parameters(inputs), parameters(outputs)]
    return operators


def in_onnx(kind: str) -> bool:
    """Whether onnx defines an operator."""
    import onnx

    return bool(onnx.defs.has(kind))


def parameters(formals: Iterable[tuple[str, str, str]]) -> str:
    """Formal parameters as a text like "A:T1 B:T2*"; a star repeats."""
    return " ".join(
        f"{name}:{bare(kind)}{'*' * option.endswith('Variadic')}"
        for name, kind, option in formals
    )


def bare(kind: str) -> str:
    """The type of a tensor's elements; other types stay as they are."""
    match = re.fullmatch(r"tensor\((.*)\)", kind)
    return match[1] if match else kind.replace(" ", "")


def write(name: str, fields: Mapping[str, Any]) -> None:
    """Write a table, with a line for each operator."""
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    text = re.sub(r'(?<=[\]}],)(?="[A-Z])|(?<={)(?="[A-Z]\w+":\[)', "\n", text)
    (ROOM / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
