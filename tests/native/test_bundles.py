"""A bundle that needs the library, where the library or the bundle is damaged."""

import runpy
import shutil

import onnx
import pytest

from jetdraft import native
from jetdraft.cli.doctor import examine
from jetdraft.runtime.passes import session as sessions
from tests.cli.running import assert_refused, jetdraft, succeed
from tests.exports import exported
from tests.fuzz.damages import hash_again

INSTALL = "install jetdraft again on this machine, or export with --kernel onnxruntime"
UNKNOWN = "the instructions that JETDRAFT_ISA names; leave it out"


@pytest.fixture(scope="module")
def packed(pair, once):
    return make(pair, once, "q4_0")


def make(pair, once, recipe, kernel=None):
    how = {"recipe": recipe, "capacity": 256, "kernel": kernel}
    return once(f"{recipe}-{kernel}", lambda to: exported(pair.target, to, **how).path)


def test_a_clone_finds_the_installed_library(tmp_path):
    """Python in a clone imports its files, which have no library beside them."""
    module = shutil.copy(native.__file__, tmp_path)
    assert runpy.run_path(module)["LIBRARY"].samefile(native.LIBRARY)


@pytest.fixture
def own(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "bundle")


@pytest.fixture(params=["missing", "empty", "another processor's", "unknown"])
def fault(request, tmp_path, monkeypatch):
    """A library that does not load; what the message says of it."""
    library = tmp_path / native.LIBRARY.name
    whole = native.LIBRARY.read_bytes()
    content, said = {
        "missing": (None, "No such file"),
        "empty": (b"", "file too short"),
        "another processor's": (
            # The number of the machine in the header of an ELF file.
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


def test_a_bundle_says_what_it_lacks(packed, pair, once, fault):
    """For products and attention, or for attention alone."""
    fix = () if fault == UNKNOWN else (INSTALL,)
    for bundle in (packed, make(pair, once, "int8-b16")):
        assert_refused(generated(bundle), fault, *fix)


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
    """Give a product of a bundle's target other attributes, under new hashes."""
    for file in (bundle / "target.onnx", bundle / "target-tree.onnx"):
        model = onnx.load(file, load_external_data=False)
        products = [n for n in model.graph.node if n.op_type == native.MULTIPLY]
        for attribute in products[0].attribute:
            attribute.i = attributes.get(attribute.name, attribute.i)
        onnx.save(model, file)
    hash_again(bundle)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"layout": 2}, "packed in layout 2, and this version reads layout 1"),
        ({"format": 99}, "unknown format of a matrix"),
        ({"format": 4}, "a packed matrix has another size"),
        ({"K": 2**40}, "a matrix has a size out of range"),
        ({"K": 33}, "the rows have another width than the matrix"),
        ({"K": 97}, "a packed matrix has another size"),
        ({"N": 16}, "a packed matrix has another size"),
    ],
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
