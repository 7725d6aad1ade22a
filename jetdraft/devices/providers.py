"""The execution providers: what they can run, and which have run on this machine.

    python -m jetdraft.devices.providers CUDAExecutionProvider

is a trial run of a provider, in a process of its own: a broken driver may end it, and
onnxruntime names a missing library on stderr only.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.bundle import CONTRIB, STANDARD
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices import webgpu
from jetdraft.errors import OptionError, ProviderError, check_choice
from jetdraft.ort import ort
from jetdraft.recipe import KERNELS

OFF = "off"  # The value of `drafter_provider` that leaves the drafter out.
AUTO = "auto"  # Asks for the fastest of `PROVIDERS` that runs a bundle on this machine.
PROVIDER_FIX = "choose --provider cpu, or see jetdraft doctor"
TRIAL_SECONDS = 120.0  # TensorRT builds an engine in a trial.
GRAPH = Path(__file__).with_name("trial.onnx")  # The graph of a small product, float32.
HALF_GRAPH = Path(__file__).with_name("trial-half.onnx")
# Lines of a trial on stdout: the last if it succeeded, and about the adapter.
RAN, SOFTWARE, NO_HALF = "ran", "on a software adapter", "without half precision"
REASON = "reason: "  # Begins the line on stderr that says why not.


@dataclass(frozen=True)
class Provider:
    """An execution provider, onnxruntime's names for it, and defaults of exports."""

    name: str
    full: str
    memory: str
    flavour: str
    dtype: str

    def kernel(self, flavour: str | None, dtype: str | None) -> str:
        """Whose operators multiply and attend in its graphs, of `KERNELS`."""
        runs = self.name, flavour or self.flavour, dtype or self.dtype
        return KERNELS[runs != ("cpu", CONTRIB, "fp32")]

    def refusal(self, flavour: str, dtype: str, only_on_cpu: str = "") -> str:
        """Return why it cannot run such graphs; "" if it can."""
        if only_on_cpu and self.name != "cpu":
            return only_on_cpu
        if self.name == "tensorrt" and flavour == CONTRIB:
            fact = "TensorRT cannot read contrib operators"
            return f"{fact}; export with --flavour standard"
        if self.name == "cuda" and (flavour, dtype) == (CONTRIB, "float32"):
            fact = "GroupQueryAttention has no fp32 kernel on CUDA"
            return f"{fact}; export with --dtype fp16 or --flavour standard"
        if self.name == "webgpu" and flavour != CONTRIB:
            fact = "WebGPU has no kernels for the standard operators of attention"
            return f"{fact}; export with --flavour contrib"
        return ""


# All providers by name, the fastest first.
_TABLE = (
    ("tensorrt", "TensorrtExecutionProvider", "cuda", STANDARD, "fp16"),
    ("cuda", "CUDAExecutionProvider", "cuda", CONTRIB, "fp16"),
    ("webgpu", "WebGpuExecutionProvider", "webgpu", CONTRIB, "fp32"),
    ("cpu", "CPUExecutionProvider", "cpu", CONTRIB, "fp32"),
)
PROVIDERS = {row[0]: Provider(*row) for row in _TABLE}
# Work that only the CPU does; see `check_on_cpu`.
HALVES, SELECTION = "the halves of a target run", "KV rows are selected"


def check_on_cpu(work: str, provider: str, fix: str, field: str = "") -> None:
    """Raise `OptionError` for a `provider` that cannot do `work` of the CPU."""
    if provider != "cpu":
        raise OptionError(f"{work} on the CPU, not on {provider}; {fix}", field)


ProviderOptions = dict[str, str]  # By onnxruntime's names; "1" is true.
CUDA_OPTIONS: ProviderOptions = {
    "device_id": "0",
    "enable_cuda_graph": "1",
    # An arena that grows by the requested sizes leaves a Jetson's shared memory to
    # other programs. Without TF32, an fp32 graph computes in fp32.
    "arena_extend_strategy": "kSameAsRequested",
    "use_tf32": "0",
}
WEBGPU_OPTIONS: ProviderOptions = {"enableInt64": "1", "enableGraphCapture": "0"}


def provider_named(name: str) -> Provider:
    """The provider of that name; raises `ProviderError` for an unknown name."""
    check_choice(ProviderError, "provider", name, PROVIDERS)
    return PROVIDERS[name]


Form = tuple[str, str]  # The flavour and the dtype of a graph.


def choose_provider(
    name: str, graphs: Iterable[Form], only_on_cpu: str = ""
) -> Provider:
    """Choose the provider that runs graphs of these flavours and dtypes.

    "auto" is the fastest that can; other names are checked. `only_on_cpu` is a reason
    against all other providers, or "". Raises `ProviderError` with the reason.
    """
    graphs = list(graphs)
    check_choice(ProviderError, "provider", name, (*PROVIDERS, AUTO))
    for candidate in PROVIDERS if name == AUTO else [name]:
        reason = _why_unable(PROVIDERS[candidate], graphs, only_on_cpu)
        if not reason and (name != AUTO or not _is_software(candidate)):
            return PROVIDERS[candidate]
    raise ProviderError(f"provider {name!r} cannot run this bundle here: {reason}")


def fastest_provider() -> str:
    """The name of the fastest provider that runs on this machine; may run trials."""
    return choose_provider(AUTO, ()).name


def _is_software(name: str) -> bool:
    """Whether a provider computes on the CPU, more slowly than the CPU provider."""
    return name != "cpu" and try_provider(name).software


def _why_unable(provider: Provider, graphs: list[Form], only_on_cpu: str) -> str:
    """Return why a provider cannot run the graphs; "" if it can. May run a trial."""
    refusals = (provider.refusal(*graph, only_on_cpu) for graph in graphs)
    if reason := next(filter(None, refusals), ""):
        return reason
    # The CPU provider is always present, and a trial takes time at every load.
    if provider.name == "cpu":
        return ""
    state = try_provider(provider.name)
    if not state.half and any(dtype == "float16" for _, dtype in graphs):
        return "its adapter has no half precision; export with --dtype fp32"
    return state.reason and f"{state.reason}; {PROVIDER_FIX}"


def installed_providers() -> list[str]:
    """The installed providers, the fastest first; raises `ProviderError`."""
    return [name for name in PROVIDERS if not _why_absent(name)]


def _why_absent(name: str) -> str:
    if name == "webgpu":
        return webgpu.MISSING_MESSAGE if find_spec(webgpu.PLUGIN) is None else ""
    full = PROVIDERS[name].full
    if full in ort.get_available_providers():
        return ""
    return f"this onnxruntime was built without {full}"


@dataclass(frozen=True)
class Presence:
    """Whether a provider runs, and the `reason` why it does not.

    A `software` adapter computes on the CPU. Without `half` it has no float16.
    """

    name: str
    compiled: bool
    runs: bool
    reason: str = ""
    software: bool = False
    half: bool = True


@functools.cache
def try_provider(name: str) -> Presence:
    """Run a small graph on a provider in a process of its own, once per process."""
    if reason := _why_absent(name):
        return Presence(name, False, False, reason)
    command = [sys.executable, "-m", "jetdraft.devices.providers", PROVIDERS[name].full]
    try:
        how: Any = {"capture_output": True, "text": True, "timeout": TRIAL_SECONDS}
        done = subprocess.run(command, check=False, **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Presence(name, True, False, f"a small graph did not run ({error})")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines[-1:] == [RAN]:
        return Presence(name, True, True, "", SOFTWARE in lines, NO_HALF not in lines)
    return Presence(name, True, False, failure_reason(done.returncode, done.stderr))


def run_trial(provider: str) -> None:
    """Multiply two small matrices on `provider` alone; print `RAN` if it is right."""
    _check_product(provider, GRAPH, np.float32)
    if provider == webgpu.EP_NAME:
        if webgpu.find_adapter().software:
            print(SOFTWARE)
        try:
            _check_product(provider, HALF_GRAPH, np.float16)
        except Exception:  # onnxruntime's exceptions have no common base
            print(NO_HALF)
    print(RAN)


def _check_product(provider: str, graph: Path, dtype: type[np.floating[Any]]) -> None:
    options = ort.SessionOptions()
    if provider != PROVIDERS["cpu"].full:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    providers: list[str] | None = [provider]
    if provider == webgpu.EP_NAME:
        webgpu.add_adapter(options, {})
        providers = None
    session = ort.InferenceSession(str(graph), options, providers=providers)
    if session.get_providers()[0] != provider:
        sys.exit(f"{provider} could not be created")
    [product] = session.run(None, {"x": np.array([[1.0, 2.0]], dtype)})
    if not np.array_equal(product, [[7.0, 10.0]]):
        sys.exit(f"{provider} computed {product.tolist()} instead of [[7, 10]]")


# Patterns in the stderr of a failed trial, and the reasons that they stand for.
_REASONS = {
    f"^{REASON}(.+)$": "{}",
    r"error: (\S+): cannot open shared object file": "it needs {}, which the loader "
    "does not find",
    "(no kernel image|NoKernelImageForDevice)": "this build of onnxruntime holds no "
    "code for this GPU",
    "(no CUDA-capable device|CUDA failure 100)": "there is no CUDA device, or its "
    "driver is not loaded",
    "(driver version is insufficient|CUDA failure 35)": "the GPU's driver is older "
    "than this build's CUDA",
}


def failure_reason(code: int, stderr: str) -> str:
    """Return why a trial failed, from its exit code and its stderr."""
    for pattern, fact in _REASONS.items():
        if known := re.search(pattern, stderr, re.MULTILINE):
            return fact.format(known[1])
    if code < 0:
        return f"a small graph ended the process with signal {-code}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"a small graph failed: {(lines or ['no message'])[-1][:200]}"


ENGINE_WIDTHS = (2, 4, 8)  # Each has an engine, which holds a copy of the weights.
_MACHINE_FILE = "made-by.json"  # Where the engines of a folder were built.


def engine_options(
    contract: StepContract, width: int | None, folder: Path | None
) -> ProviderOptions:
    """Return TensorRT's options for an engine of a `width`, kept in a `folder`."""
    streams, most = contract.streams, contract.max_width
    if width is not None:
        sizes = [(width, width, count * width) for count in (0, streams, streams)]
    else:
        sizes = [(1, 1, 0), (most, 1, 0), (most, most, most * streams)]
    least, usual, largest = (_shapes(contract, size) for size in sizes)
    cache = "" if folder is None else str(folder / f"width-{width or 'any'}")
    is_kept = str(int(folder is not None))
    # One profile: onnxruntime 1.31 never leaves the first (pull request 31624).
    return {
        "trt_fp16_enable": str(int(contract.dtype == "float16")),
        **{"trt_engine_cache_enable": is_kept, "trt_timing_cache_enable": is_kept},
        **{"trt_engine_cache_path": cache, "trt_timing_cache_path": cache},
        "trt_profile_min_shapes": least,
        "trt_profile_opt_shapes": usual,
        "trt_profile_max_shapes": largest,
        "device_id": "0",
    }


def _shapes(contract: StepContract, sizes: tuple[int, int, int]) -> str:
    """Return the shapes of dynamic inputs, such as "input_ids:1x4,answer_rows:4"."""
    counts = *sizes, contract.members, contract.prefix
    named = [s for s in contract.inputs if any(isinstance(a, str) for a in s.shape)]
    shapes = (f"{s.name}:{'x'.join(map(str, s.shape_for(*counts)))}" for s in named)
    return ",".join(shapes)


def engine_folder(folder: Path, machine: dict[str, str]) -> Path | None:
    """Make the folder of engines, emptied for another `machine`; warn and give None."""
    stamp, made_by = folder / _MACHINE_FILE, None
    with suppress(OSError, ValueError):
        made_by = json.loads(stamp.read_text(encoding="utf-8"))
    try:
        if made_by != machine:
            if folder.exists():
                fact = f"the TensorRT engines in {folder} belong to another bundle, "
                fact += "GPU or version; they are built again, which takes minutes"
                warnings.warn(fact, stacklevel=4)
                shutil.rmtree(folder)
            # Width classes measured on the old engines do not hold for new ones.
            for measured in folder.parent.glob("tensorrt*.json"):
                measured.unlink()
            folder.mkdir(parents=True)
            stamp.write_text(json.dumps(machine, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        fact = f"TensorRT engines cannot be kept in {folder} ({error.strerror})"
        warnings.warn(f"{fact}; they are built at every load", stacklevel=4)
        return None
    return folder


if __name__ == "__main__":
    try:
        run_trial(sys.argv[1])
    except ProviderError as error:
        sys.exit(f"{REASON}{error}")
