"""All processors give the same bits; qemu-user and SIMDe stand for those not here."""

import os
import platform
import re
import runpy
import sys
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from shutil import copy, copytree, which

import onnx
import pytest

from jetdraft import native
from jetdraft.cli.doctor import examine
from jetdraft.runtime.passes import session as sessions
from tests import cases
from tests.fuzz.damages import hash_again
from tests.programs import ROOT, assert_refused, jetdraft, printed, succeed
from tests.tiny import exported

SETUP = runpy.run_path(str(ROOT / "setup.py"))
FLAGS, FOLDER, SOURCES = (SETUP[name] for name in ("FLAGS", "FOLDER", "SOURCES"))
PROGRAM, LOADER, EMULATOR = (
    Path(__file__).with_name(n) for n in ("agreement.cpp", "load.c", "emulated.h")
)
QEMUS = {m: which(f"qemu-{m}-static") or which(f"qemu-{m}") for m in SOURCES}
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
INSTALL = "install jetdraft again on this machine, or export with --kernel onnxruntime"
UNKNOWN = "JETDRAFT_ISA='abacus' names no instructions of this processor; leave it out"


def compiled(folder, architecture, **changed):
    target = ["-target", f"{architecture}-linux-musl"]
    sources = {FOLDER / f"{n}.cpp": f for n, f in SOURCES[architecture].items()}
    sources |= {FOLDER / f"{n}.cpp": f for n, f in changed.items()} | {PROGRAM: ()}
    del sources[FOLDER / "library.cpp"]
    objects, speed = [], "-O0" if changed else "-O1"
    for source, flags in sources.items():
        objects.append(str(folder / f"{source.stem}.o"))
        names = [speed, *flags, "-c", str(source), "-o", objects[-1]]
        zig("c++", *target, *FLAGS, *names)
    zig("cc", *target, "-static", *objects, "-o", str(folder / "agreement"))
    return folder / "agreement"


def zig(*arguments):
    printed(sys.executable, "-m", "ziglang", *arguments)


def agreeing(*command):
    lines = printed(*command).splitlines()
    whole = r"(\w+): 450 products, 40 attentions, 80 states, 0 differ"
    return {match[1] for match in [re.fullmatch(whole, line) for line in lines]}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return cache(lambda name: compiled(tmp_path_factory.mktemp(name), name))


def test_this_processor_agrees_with_the_portable_code(programs):
    assert "portable" in agreeing(programs(platform.machine()))


@on_x86
def test_newer_processors_agree_with_the_portable_code(tmp_path):
    """With AVX2 in place of their instructions."""
    headers = distribution("cmeel-simde").locate_file("cmeel.prefix/include")
    flags = ["-include", str(EMULATOR), "-isystem", str(headers)]
    flags += SOURCES["x86_64"]["avx2"]
    program = compiled(tmp_path, "x86_64", avx512vnni=flags, avxvnni=flags)
    assert {"avx512vnni", "avxvnni", "portable"} < agreeing(program, "emulated")


@on_x86
@pytest.mark.parametrize("source", ["cpu", "library", "portable"])
def test_code_for_all_processors_has_no_newer_instructions(tmp_path, source):
    """None of AVX, whose mnemonics begin with v."""
    assembly = tmp_path / "source.s"
    target = ["-target", f"x86_64-linux-gnu.{SETUP['GLIBC']}"]
    names = ["-S", "-g0", str(FOLDER / f"{source}.cpp"), "-o", str(assembly)]
    zig("c++", *FLAGS, *SOURCES["x86_64"][source], *target, *names)
    found = set(re.findall(r"^\t([a-z]\w*)", assembly.read_text(), re.MULTILINE))
    assert {"ret", "retq"} & found
    assert not [name for name in found if name.startswith("v")]


@pytest.mark.skipif(
    "JETDRAFT_NEEDS_QEMU" not in os.environ
    and (None in QEMUS.values() or "QEMU_LD_PREFIX" not in os.environ),
    reason="no qemu-user, see scripts/qemu",
)
@cases(
    "machine, processor, found",
    ("x86_64", "Haswell", ["avx2", "portable"]),
    ("x86_64", "SandyBridge", ["portable"]),  # has only AVX
    ("x86_64", "Conroe", ["portable"]),
    ("aarch64", "max", ["i8mm", "dotprod", "portable"]),
    ("aarch64", "cortex-a57", ["portable"]),
)
def test_another_processor(programs, libraries, machine, processor, found):
    qemu = QEMUS[machine], "-cpu", processor
    assert agreeing(*qemu, programs(machine)) == set(found)
    assert printed(*qemu, *libraries(machine)) == f"{found[0]}\n"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    def built(machine):
        folder = tmp_path_factory.mktemp(machine)
        library, loader = SETUP["build"](folder, machine), folder / "load"
        target = f"{machine}-linux-gnu.{SETUP['GLIBC']}"
        zig("cc", "-target", target, str(LOADER), "-o", str(loader))
        return loader, library

    return cache(built)


@pytest.fixture(scope="module")
def packed(pair, once):
    return make(pair, once, "q4_0")


def make(pair, once, recipe, kernel=None):
    how = {"recipe": recipe, "capacity": 256, "max_width": 64, "kernel": kernel}
    return once(f"{recipe}-{kernel}", lambda to: exported(pair.target, to, **how).path)


def test_a_clone_finds_the_installed_library(tmp_path):
    """Python in a clone imports its files, which have no library beside them."""
    module = copy(native.__file__, tmp_path)
    assert runpy.run_path(module)["LIBRARY"].samefile(native.LIBRARY)


@pytest.fixture
def own(packed, tmp_path):
    return copytree(packed, tmp_path / "bundle")


@pytest.fixture(params=["missing", "empty", "another processor's", "unknown"])
def fault(request, tmp_path, monkeypatch):
    library, whole = tmp_path / native.LIBRARY.name, native.LIBRARY.read_bytes()
    content, said = {
        "missing": (None, "No such file"),
        "empty": (b"", "file too short"),
        # The number of the machine in the header of an ELF file is another's.
        "another processor's": (
            whole[:18] + b"\xf3\0" + whole[20:],
            "cannot open shared object file",
        ),
        "unknown": (whole, UNKNOWN),
    }[request.param]
    if content is not None:
        library.write_bytes(content)
    for module in (native, sessions):
        monkeypatch.setattr(module, "LIBRARY", library)
    if request.param == "unknown":
        monkeypatch.setenv("JETDRAFT_ISA", "abacus")
    native.isa.cache_clear()
    yield said
    native.isa.cache_clear()


def generated(bundle):
    return jetdraft("generate", bundle, "-p", "the", "-n", 4, "-t", 1)


def test_a_bundle_says_what_it_lacks(packed, bundle, fault):
    fix = () if fault == UNKNOWN else (INSTALL,)
    for folder in (packed, bundle):
        assert_refused(generated(folder), fault, *fix)


def test_other_bundles_do_without(pair, once, fault):
    assert fault
    assert generated(make(pair, once, "int8-b16", "onnxruntime")).exit_code == 0


def test_doctor_says_what_is_lacking(fault):
    (finding,) = (each for each in examine() if each.what == "products")
    assert fault in f"{finding.found}; {finding.fix}"
    assert finding.fix
    assert not finding.wrong


def test_doctor_names_the_instructions(monkeypatch):
    monkeypatch.setenv("JETDRAFT_ISA", "portable")
    native.isa.cache_clear()
    assert "products           portable\n" in jetdraft("doctor").stdout
    native.isa.cache_clear()


def test_a_bundle_runs_on_any_instructions(packed, monkeypatch):
    texts = []
    for name in ("portable", native.isa()):
        monkeypatch.setenv("JETDRAFT_ISA", name)
        texts.append(succeed("generate", packed, "-p", "the", "-n", 12, "-t", 1).stdout)
    assert texts[0] == texts[1]


def change_product(bundle, **attributes):
    for file in (bundle / "target.onnx", bundle / "target-tree.onnx"):
        model = onnx.load(file, load_external_data=False)
        products = [n for n in model.graph.node if n.op_type == native.MULTIPLY]
        for attribute in products[0].attribute:
            attribute.i = attributes.get(attribute.name, attribute.i)
        onnx.save(model, file)
    hash_again(bundle)


@cases(
    "attributes, said",
    ({"layout": 2}, "packed in layout 2, and this version reads layout 1"),
    ({"format": 99}, "unknown format of a matrix"),
    ({"format": 4}, "a packed matrix has another size"),
    ({"K": 2**40}, "a matrix has a size out of range"),
    ({"K": 33}, "the rows have another width than the matrix"),
    ({"K": 97}, "a packed matrix has another size"),
    ({"N": 16}, "a packed matrix has another size"),
)
def test_another_layout_or_size_is_refused(own, attributes, said, capfd):
    change_product(own, **attributes)
    result = generated(own)
    *before, last = result.stderr.splitlines()
    assert result.exit_code == 2
    assert last.startswith("error: ")
    assert said in last
    assert "export the bundle again" in last
    # Only a pass finds a wrong width, and the first ones are announced.
    assert ("onnxruntime cannot load" in last) == (not before) == ("width" not in said)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("hashed", [False, True])
def test_weights_that_are_cut_off_are_refused(own, hashed):
    weights = own / "target.onnx.data"
    weights.write_bytes(weights.read_bytes()[:-4000])
    if hashed:
        hash_again(own)
    assert_refused(generated(own), str(own), "the bundle")
