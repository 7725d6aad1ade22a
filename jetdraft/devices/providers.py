"""The execution providers: what each is good for, and which really run here.

onnxruntime's own list is of what was compiled in. A provider counts as present once a
graph has run on it; if it does not, the reason is worth more than the fact: a missing
library, or a GPU that the build holds no code for.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from jetdraft.bundle import CONTRIB, STANDARD
from jetdraft.devices.probe import RAN
from jetdraft.errors import ProviderError
from jetdraft.ort import ort

AUTO = "auto"
"""The first of `PROVIDERS`, from the fastest down, that runs a bundle here."""

AT_HAND = "choose --provider cpu, or see jetdraft doctor"
"""What to do where a provider does not run."""

PATIENCE = 120.0
"""Seconds: TensorRT builds an engine for the graph."""


@dataclass(frozen=True)
class Provider:
    """An execution provider of onnxruntime.

    `full` is onnxruntime's name and `memory` where its tensors lie. `flavour` and
    `dtype` are what a bundle is exported in for it unless the user says otherwise.
    """

    name: str
    full: str
    memory: str
    flavour: str
    dtype: str

    def refusal(self, flavour: str, dtype: str) -> str:
        """Why it cannot run graphs of a flavour and a numpy dtype; empty if it can."""
        if self.name == "tensorrt" and flavour == CONTRIB:
            return (
                "TensorRT imports no contrib operators; export with --flavour standard"
            )
        if self.name == "cuda" and (flavour, dtype) == (CONTRIB, "float32"):
            return (
                "GroupQueryAttention has no fp32 kernel on CUDA; export with --dtype "
                "fp16 or --flavour standard"
            )
        return ""


PROVIDERS = {
    each.name: each
    for each in (
        Provider("tensorrt", "TensorrtExecutionProvider", "cuda", STANDARD, "fp16"),
        Provider("cuda", "CUDAExecutionProvider", "cuda", CONTRIB, "fp16"),
        Provider("cpu", "CPUExecutionProvider", "cpu", CONTRIB, "fp32"),
    )
}
"""By name, the fastest first."""


@dataclass(frozen=True)
class CudaOptions:
    """What the CUDA provider is told; see onnxruntime's names.

    An arena that grows by what is asked keeps a Jetson's shared memory for others, and
    without TF32 an fp32 graph computes in fp32.
    """

    device_id: int = 0
    enable_cuda_graph: bool = True
    arena_extend_strategy: str = "kSameAsRequested"
    use_tf32: bool = False


@dataclass(frozen=True)
class TensorrtOptions:
    """What the TensorRT provider is told; see onnxruntime's names.

    Shapes are "name:1x4,other:4"; a session has one profile, since onnxruntime 1.31
    never leaves the first one (its pull request 31624).
    """

    trt_engine_cache_path: str
    trt_timing_cache_path: str
    trt_profile_min_shapes: str
    trt_profile_opt_shapes: str
    trt_profile_max_shapes: str
    trt_fp16_enable: bool
    device_id: int = 0
    trt_engine_cache_enable: bool = True
    trt_timing_cache_enable: bool = True


def as_options(options: CudaOptions | TensorrtOptions) -> dict[str, str]:
    """The texts that onnxruntime takes."""
    return {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in asdict(options).items()
    }


def known(name: str) -> Provider:
    """The provider of that name, or a `ProviderError`."""
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}; choose {', '.join(PROVIDERS)}")
    return PROVIDERS[name]


def choose(name: str, graphs: Iterable[tuple[str, str]]) -> Provider:
    """The provider to run graphs of these flavours and numpy dtypes on.

    Raises `ProviderError` with the reason if it cannot; "auto" takes the fastest that
    can instead.

        choose("auto", [("contrib", "float32")]).name    # "cpu"
    """
    graphs = list(graphs)
    if name not in (AUTO, *PROVIDERS):
        names = ", ".join((*PROVIDERS, AUTO))
        raise ProviderError(f"unknown provider {name!r}; choose {names}")
    tried = list(PROVIDERS) if name == AUTO else [name]
    for each in tried:
        reason = _unfit(PROVIDERS[each], graphs)
        if not reason:
            return PROVIDERS[each]
    raise ProviderError(f"provider {name!r} cannot run this bundle here: {reason}")


def fastest() -> str:
    """The name of the fastest provider that runs on this machine."""
    return next(name for name in PROVIDERS if name == "cpu" or presence(name).runs)


def _unfit(provider: Provider, graphs: list[tuple[str, str]]) -> str:
    refusals = (provider.refusal(*graph) for graph in graphs)
    if reason := next(filter(None, refusals), ""):
        return reason
    # What is always there need not be tried out at every load.
    found = "" if provider.name == "cpu" else presence(provider.name).reason
    return found and f"{found}; {AT_HAND}"


@dataclass(frozen=True)
class Presence:
    """Whether a provider runs; `reason` says why not, in one line."""

    name: str
    compiled: bool
    runs: bool
    reason: str = ""


@functools.cache
def presence(name: str) -> Presence:
    """Run a small graph on a provider of `PROVIDERS`, once per process.

    presence("cuda").reason
    """
    full = PROVIDERS[name].full
    if full not in ort.get_available_providers():
        return Presence(
            name, False, False, f"this onnxruntime was built without {full}"
        )
    command = [sys.executable, "-m", "jetdraft.devices.probe", full]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Presence(name, True, False, f"a small graph did not run ({error})")
    if done.returncode == 0 and done.stdout.split()[-1:] == [RAN]:
        return Presence(name, True, True)
    return Presence(name, True, False, reason_of(done.returncode, done.stderr))


def reason_of(code: int, said: str) -> str:
    """What is wrong, out of what a failed run left on stderr."""
    library = re.search(r"error: (\S+): cannot open shared object file", said)
    if library:
        return f"it needs {library[1]}, which the loader does not find"
    if "no kernel image" in said or "NoKernelImageForDevice" in said:
        return "this build of onnxruntime holds no code for this GPU"
    if "no CUDA-capable device" in said or "CUDA failure 100" in said:
        return "there is no CUDA device, or its driver is not loaded"
    if "driver version is insufficient" in said or "CUDA failure 35" in said:
        return "the GPU's driver is older than this build's CUDA"
    if code < 0:
        return f"a small graph ended the process with signal {-code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"a small graph failed: {(lines or ['no message'])[-1][:200]}"
