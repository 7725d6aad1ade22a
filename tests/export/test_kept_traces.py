from dataclasses import replace
from functools import partial

import onnx_ir as ir
import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export import tracer
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.step import Step, buffer_sizes
from jetdraft.export.tracer import MAX_TRACES, KeptTraces, fingerprint
from jetdraft.recipe import Recipe
from tests.tiny import drafter_config, save_checkpoint

SIZES = {"capacity": 64, "max_width": 16}


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    kinds, original = [], tracer._export_step

    def exported(step, weights):
        kinds.append(type(step).__name__)
        return original(step, weights)

    monkeypatch.setattr(tracer, "_export_step", exported)
    monkeypatch.setattr(tracer, "KEPT_TRACES", KeptTraces())
    return kinds


def test_one_trace_serves_other_weights_and_other_recipes(tmp_path, traced):
    for seed in (0, 1):
        save_checkpoint(tmp_path / f"model-{seed}", drafter_config(), seed=seed)

    def exported(seed, recipe, name):
        options = ExportOptions(Recipe.parse(recipe), **SIZES)
        return export(str(tmp_path / f"model-{seed}"), tmp_path / name, None, options)

    exported(0, "none", "floats")
    kept = exported(1, "int8-rtn-b32", "kept")
    assert traced == ["Step"]
    tracer.KEPT_TRACES = KeptTraces()  # the fixture puts the old store back
    again = exported(1, "int8-rtn-b32", "again")
    assert traced == ["Step", "Step"]
    assert kept.files == again.files


def step_of(folder, seed=0, change=None, **config) -> Step:
    save_checkpoint(folder, drafter_config(**config), seed, tokenizer=False)
    model = Checkpoint.load(str(folder), torch.float32).model
    contract = StepContract(288, 64, 16, "float32", buffer_sizes(model).kv_shapes)
    step = Step(model, contract)
    if change is not None:
        change(step)
    return step


def hook(step, number):
    head = step.model.lm_head
    head.register_forward_hook(lambda module, args, output: output * number)


def other_contract(step, **sizes):
    step.contract = replace(step.contract, **sizes)


def untied(step):
    head = step.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


CONFIGS = {
    "layers": {"num_hidden_layers": 2},
    "frequencies": {"rope_theta": 5e4},
    "epsilon": {"rms_norm_eps": 1e-3},
}
CHANGES = {
    "capacity": partial(other_contract, capacity=128),
    "width": partial(other_contract, max_width=8),
    "hidden": partial(other_contract, hidden_size=32),
    "cut": lambda step: setattr(step, "cut", 1),
    "hook": partial(hook, number=2.0),
    "number": partial(hook, number=3.0),
    "partial": lambda step: setattr(step, "part", partial(print, 1)),
    "buffer": lambda step: step.model.model.rotary_emb.inv_freq[0].add_(1e-3),
    "ids": lambda step: setattr(step, "ids", torch.arange(9)),
    "type": lambda step: step.model.lm_head.half(),
    "tied": untied,
}


def test_what_changes_a_graph_changes_the_fingerprint(tmp_path):
    prints = {"": fingerprint(step_of(tmp_path / "model"))}
    ways = CONFIGS | {name: {"change": change} for name, change in CHANGES.items()}
    for name, how in ways.items():
        prints[name] = fingerprint(step_of(tmp_path / name, **how))
    assert None not in prints.values()
    assert len(set(prints.values())) == len(prints), prints


def test_a_replaced_method_changes_the_fingerprint(tmp_path, monkeypatch):
    step = step_of(tmp_path / "model")
    before = fingerprint(step)
    monkeypatch.setattr(Step, "forward", lambda self, *args: None)
    assert fingerprint(step) not in (before, None)


def test_what_changes_no_graph_changes_no_fingerprint(tmp_path):
    prints = set()
    for seed in (0, 1):
        step = step_of(tmp_path / str(seed), seed, CHANGES["hook"])
        step.model.generation_config.top_k = 5 + seed
        prints |= {fingerprint(step), fingerprint(step)}
    assert None not in prints
    assert len(prints) == 1


@pytest.mark.parametrize(
    "hidden",
    [torch.Generator(), iter([1]), torch.ones(2, device="meta"), {("a", object())}],
    ids=["generator", "iterator", "meta", "set"],
)
def test_a_state_that_cannot_be_told_has_no_fingerprint(tmp_path, hidden):
    step = step_of(tmp_path / "model", change=lambda step: setattr(step, "x", hidden))
    assert fingerprint(step) is None


def test_without_a_fingerprint_nothing_is_kept():
    made, kept = [], KeptTraces()

    def make():
        made.append(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10))
        return made[-1]

    assert kept.get_or_make(None, make) is made[0]
    assert kept.get_or_make(None, make) is made[1]
    assert not kept._files


def test_few_traces_are_kept():
    kept = KeptTraces()
    for number in range(MAX_TRACES + 1):
        kept.write(str(number), b"graph")
    assert kept.read("0") is None
    assert kept.read("1") == b"graph"
