"""Targets with recurrent states or shared layers: all methods give the plain text."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

import jetdraft
from jetdraft import OptionError, ProviderError, Sampling
from jetdraft.bundle import CHAT_TEMPLATE
from jetdraft.cli.check import LINEAR_ATTENTION
from jetdraft.contracts.step_contract import STATE_ROWS
from jetdraft.methods.glide.module import Assistant
from jetdraft.runtime.measured.survey import Survey
from jetdraft.runtime.passes.binding import PassBinding
from jetdraft.runtime.planning.controller import AdaptiveController
from tests import cases, edit_json, programs, same_text, tiny
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads import test_acceptance_gate as gate
from tests.checkpoints.heads.test_mtp import edit
from tests.export.conftest import MTP
from tests.runtime import test_conformance as conformance
from tests.runtime.method_bundles import tokens_of
from tests.runtime.test_generation import PROMPT as SCRIPTED
from tests.runtime.test_generation import SPOILS, Scripted
from tests.tiny import HYBRIDS, SHARING, exported, save_checkpoint
from tests.train.periodic import descend, teach
from tools.forecast.kernel_table import TABLES, KernelTable

PROMPT, H = conformance.PROMPT, layouts.H
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
SIZES = {"capacity": 96, "max_width": 32}
PLAIN = {"method": "none", "max_new_tokens": 12, "ignore_eos": True}


def add_mtp(folder, config) -> None:
    torch.manual_seed(11)
    rows = 2 * config.num_attention_heads * config.head_dim  # queries and their gates
    tensors = MTP["qwen"][1]()
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = layouts.rand(rows, H)
    edit(folder, lambda own: own | tensors)


RECURRENT = {"lfm2": "q4_0", "qwen3_5": "int8-rtn-b32", "granitemoehybrid": "int4-b32"}
"""Convolutions alone; the gated delta rule, with an MTP module; Mamba2. Their recipes,
one of them for the native product."""

# The last has an assistant.
BUNDLES = RECURRENT | {"gemma3n": "int4-rtn-b32", "gemma4": "q4_k"}
of_states = pytest.mark.parametrize("model", RECURRENT, indirect=True)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("recurrent"), {}
    for name, recipe in BUNDLES.items():
        config = (HYBRIDS | SHARING)[name]()
        source = save_checkpoint(folder / name, config)
        (source / CHAT_TEMPLATE).write_text(TEMPLATE)
        if name == "qwen3_5":
            add_mtp(source, config)
        save = tiny.save_assistant if name == "gemma4" else lambda *_: None
        own = {"head": save(folder / "head", config), **SIZES}
        made[name] = exported(source, folder / f"{name}-bundle", recipe, **own)
    return made


@pytest.fixture(scope="module", params=BUNDLES)
def model(request, bundles, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "texts.sqlite"
    with jetdraft.load(bundles[request.param].path, threads=1, store=store) as model:
        yield model


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)])
def test_drafts_that_are_right_now_and_then(model, sampling):
    """Of 15 tokens: all right, none, some; and none drafted."""
    plain, _ = tokens_of(model, SCRIPTED, sampling, tokens=48)
    speeds = []
    for spoil in SPOILS[:-1]:
        proposer = Scripted(np.array(plain), spoil)
        tokens, stats = tokens_of(
            model, SCRIPTED, sampling, proposer, length=15, tokens=48
        )
        assert tokens == plain
        speeds.append(stats.tokens_per_pass)
    assert speeds[0] > 6
    assert speeds[0] > speeds[3] > speeds[1] == speeds[2] == 1


REQUIRED = [
    conformance.test_a_prompt_that_goes_another_way,
    conformance.test_the_end_of_the_buffers,
    conformance.test_a_cancelled_generation,
    conformance.test_a_conversation,
    *(
        partial(conformance.test_the_text_is_that_of_plain_decoding, way=way)
        for way in conformance.WAYS.values()
    ),
]


@pytest.mark.parametrize("required", REQUIRED)
def test_what_every_method_must_do(model, required, monkeypatch):
    shapes = [{}, {"num_draft_tokens": 4}]
    monkeypatch.setattr(conformance, "drafts_of", lambda method, **more: shapes)
    for method in model.methods[1:]:
        required(lambda _: model, method)


def test_a_restored_prefix(model, tmp_path):
    conformance.test_a_restored_prefix(lambda _: model, "lookup", tmp_path)


@of_states
def test_a_continued_text_is_not_read_again(model):
    model.forget()
    sequence = [*PROMPT, *model.generate(token_ids=PROMPT, **PLAIN).token_ids]
    reused = []
    for prompt in ([*sequence, 5, 6], [*PROMPT, 9, 9, 9], PROMPT[:20]):
        model.forget()
        fresh = model.generate(token_ids=prompt, **PLAIN)
        model.generate(token_ids=PROMPT, **PLAIN)
        result = model.generate(token_ids=prompt, **PLAIN)
        assert result.token_ids == fresh.token_ids
        reused.append(result.stats.reused_tokens)
    assert reused == [len(sequence) - 1, len(PROMPT) - 1, 0]


def test_no_pass_branches(model, monkeypatch):
    branching, own = [], AdaptiveController._promises

    def note(self, *given):
        return branching.append(self.branching) or own(self, *given)

    monkeypatch.setattr(AdaptiveController, "_promises", note)
    model.generate(token_ids=PROMPT, method="trigram", max_new_tokens=16)
    assert {*branching} == {False}


def test_two_sessions_share_nothing(model):
    prompts = PROMPT, PROMPT[5:]
    alone = [model.generate(token_ids=p, **PLAIN).token_ids for p in prompts]
    with jetdraft.load(model.bundle.path, threads=1) as other:
        stream = other.stream(token_ids=PROMPT, **PLAIN)
        begun = next(stream).token_ids
        between = model.generate(token_ids=PROMPT[5:], **PLAIN).token_ids
        ended = [token for piece in stream for token in piece.token_ids]
    assert [[*begun, *ended], between] == alone


@of_states
def test_kept_rows_have_a_price(model, monkeypatch):
    """By a clock that shows 2 ms for each row that a pass takes up."""

    clock = lambda one, _=None: 2e-3 * int(one.arrays[STATE_ROWS.name][0])  # noqa: E731
    monkeypatch.setattr(PassBinding, "run", clock)
    survey = Survey(model.parts.target, None)
    survey.begin()
    assert survey.curve.kept_row == pytest.approx(2.0)


@pytest.mark.parametrize("length", [5, 40])
def test_an_assistant_drafts_as_in_transformers(tmp_path, length):
    config = SHARING["gemma4"]()
    source = save_checkpoint(tmp_path / "gemma4", config)
    head = tiny.save_assistant(tmp_path / "head", config)
    bundle = exported(source, tmp_path / "b", head=head, capacity=96, max_width=64)
    ids = torch.tensor(PROMPT)[None, :length]
    whole = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    assistant = AutoModelForCausalLM.from_pretrained(head, attn_implementation="eager")
    settings = {"output_hidden_states": True, "return_shared_kv_states": True}
    expected, token = [], ids[:, -1:]
    with torch.no_grad(), jetdraft.load(bundle.path, threads=1) as model:
        seen = whole(ids[:, :-1], use_cache=False, **settings)
        state = seen.hidden_states[-1][:, -1:]
        target, cache = model.parts.target, model.parts.draft_cache
        answer = target.run(ids[0, :-1].tolist())
        target.cache.advance(length - 1)
        cache.begin(ids[0].tolist())
        cache.observe(0, ids[0, :-1].tolist(), answer.features.copy())
        target.run([7] * 3)
        for _ in range(2):  # drafting again begins at the same state
            drafted = cache.follow(ids[0].tolist())
        for _ in range(4):
            embedded = whole.get_input_embeddings()(token)
            reference = assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[length - 1]]),
                shared_kv_states=seen.shared_kv_states,
            )
            expected = reference.logits[0, -1].numpy()
            np.testing.assert_allclose(drafted.logits[-1], expected, atol=1e-4)
            assert drafted.candidates[-1, 0] == expected.argmax()
            token, state = reference.logits.argmax(-1), reference.last_hidden_state
            drafted = cache.step(int(token))


def teach_assistant(head, model, ids, steps=120, drafted=3):
    """Teach it to continue each beginning of the text, whose rows it reads."""
    settings = {"output_hidden_states": True, "return_shared_kv_states": True}
    with torch.no_grad():
        seen = model(ids, use_cache=False, **settings)
        embedded = model.get_input_embeddings()(ids)
    roots = torch.arange(1, ids.shape[1] - drafted)
    slots, window = torch.arange(ids.shape[1]), head.config.text_config.sliding_window
    first = {"full_attention": 0, "sliding_attention": roots[:, None] - window - 1}
    reads = {k: (slots >= one) & (slots < roots[:, None]) for k, one in first.items()}
    masks = {k: -1e9 * ~mask[None, None] for k, mask in reads.items()}
    how = {"attention_mask": masks, "shared_kv_states": seen.shared_kv_states}
    how |= {"position_ids": roots[None], "use_cache": False, "logits_to_keep": slots}
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(steps):
        state, losses = seen.hidden_states[-1][:, roots - 1], []
        for ahead in range(drafted):
            inputs = torch.cat([embedded[:, roots + ahead], state], -1)
            out = head.model(inputs_embeds=head.pre_projection(inputs), **how)[0]
            state, logits = head.post_projection(out), head.lm_head(out)[0]
            wanted = ids[0, roots + ahead + 1]
            losses.append(torch.nn.functional.cross_entropy(logits, wanted))
        descend(optimizer, sum(losses))


@pytest.fixture(scope="module", params=["gemma4", "gemma4, values of keys"])
def learned(request, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("learned"), SHARING[request.param]()
    config.final_logit_softcapping, config.initializer_range = 30.0, 0.05
    save_checkpoint(folder / "target", config, tokenizer=False)
    tiny.save_assistant(folder / "head", config)
    names, load = ("target", "head"), AutoModelForCausalLM.from_pretrained
    model, head = (load(folder / n, attn_implementation="eager") for n in names)
    teach(model, gate.text()[None], 120)
    teach_assistant(head, model.requires_grad_(False), gate.text()[None])
    model.save_pretrained(folder / "target")
    head.save_pretrained(folder / "head")
    return folder


WIRINGS = {
    "": lambda name, tensor: tensor,
    "the state before the token": lambda name, tensor: (
        tensor.roll(tensor.shape[1] // 2, 1) if "pre_projection" in name else tensor
    ),
    "a state that is not carried": lambda name, tensor: tensor * ("post_" not in name),
    "no rows of the target": lambda name, tensor: tensor * (".o_proj" not in name),
    "another layer's rows": None,
}


@pytest.mark.parametrize("mistake", WIRINGS)
def test_an_assistant_drafts_what_it_learned(learned, mistake, tmp_path, monkeypatch):
    head = shutil.copytree(learned / "head", tmp_path / "head")
    if change := WIRINGS[mistake]:
        edit(head, lambda own: {n: change(n, t) for n, t in own.items()})
    else:
        own = lambda one: tuple(layer - 2 for layer in vars(one)["layers"])  # noqa: E731
        place = property(own, lambda one, layers: vars(one).update(layers=layers))
        monkeypatch.setattr(Assistant, "target_layers", place, raising=False)
    bundle = exported(learned / "target", tmp_path / "b", head=head, capacity=256)
    words, shape = gate.text().tolist(), {"method": "glide", "num_draft_tokens": 3}
    how = {"token_ids": words[:40], "max_new_tokens": 90}
    with jetdraft.load(bundle.path, threads=1) as model:
        [drafted] = same_text(model, [shape], [{}], **how)
    assert np.mean(np.equal(drafted.token_ids, words[40:130])) > 0.95
    rates, mean = drafted.stats.accepted_by_position, drafted.stats.acceptance_rate
    assert mean < 0.6 if mistake else len(rates) == 3 and min(rates) > 0.75, rates


def test_the_head_is_the_target_s_own(bundles):
    bundle = bundles["qwen3_5"]
    assert bundle.drafter is not None
    assert bundle.drafter.contract.carried_size == H
    assert bundle.target.tree_file is None
    refusal = pytest.raises(OptionError, match="or has recurrent states; leave the tre")
    with jetdraft.load(bundle.path, threads=1) as model, refusal:
        conformance.text(model, "eagle", drafting={"tree": "best"})


@cases(
    "changes, words",
    ({"select_kv": 16}, "--select-kv"),
    ({"provider": "webgpu"}, "only the CPU provider"),
    ({"dtype": "fp16"}, "in fp32"),
    ({"recipe": "int4-kv8"}, "leave kv out"),
    ({"kernel": "onnxruntime"}, "leave --kernel out"),
)
def test_what_states_cannot_do_is_refused_by_name(tmp_path, changes, words):
    source = save_checkpoint(tmp_path / "lfm2", HYBRIDS["lfm2"]())
    with pytest.raises(OptionError, match="has recurrent states, ") as refusal:
        exported(source, tmp_path / "b", **SIZES, **changes)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    tiny.refused(OptionError, "so it is no drafter", source, drafter=source)


def test_shared_keys_are_floats(tmp_path):
    source = save_checkpoint(tmp_path / "gemma4", SHARING["gemma4"]())
    said = r"share keys and values, .* leave kv out"
    tiny.refused(OptionError, said, source, "int4-b32-kv8")


def test_layer_types_that_do_not_fit_the_weights_are_refused(tmp_path):
    source = save_checkpoint(tmp_path / "lfm2", HYBRIDS["lfm2"]())
    kinds = ["conv", "conv", "full_attention"]
    edit_json(source / "config.json", layer_types=kinds)
    result = programs.jetdraft("export", source, "-o", tmp_path / "bundle")
    programs.assert_refused(result, "lacks the weights")
    assert not (tmp_path / "bundle").exists()


def test_other_providers_are_refused_before_they_are_tried(bundles):
    words = "recurrent states run on the CPU only; choose --provider cpu"
    with pytest.raises(ProviderError, match=words):
        jetdraft.load(bundles["lfm2"].path, provider="webgpu")
    with jetdraft.load(bundles["lfm2"].path, provider="auto") as model:
        assert model.provider == "cpu"


def other_version(graph):
    node = next(n for n in graph.node if n.op_type == "LinearAttention")
    node.attribute[0].i = 2  # the layout


def other_state(graph):
    next(one for one in graph.input if one.name == "past_state.0").name = "past"
    for node in graph.node:
        node.input[:] = [n.replace("past_state.0", "past") for n in node.input]


@cases(
    "edit_graph, words",
    (other_version, "is packed in layout 2, and this version reads layout 1"),
    (other_state, "lack 'past_state.0'"),
)
def test_an_edited_graph_is_refused_in_a_line(bundles, tmp_path, edit_graph, words):
    others = shutil.ignore_patterns("bundle.json", "profiles")
    copy = shutil.copytree(bundles["qwen3_5"].path, tmp_path / "copy", ignore=others)
    model = onnx.load(copy / "target.onnx", load_external_data=False)
    edit_graph(model.graph)
    onnx.save(model, copy / "target.onnx")
    replace(bundles["qwen3_5"], path=copy, files={}).save()
    refused = programs.jetdraft("check", copy)
    programs.assert_refused(refused, words, "export the bundle again")


@pytest.mark.parametrize("name", TABLES)
def test_check_says_which_operators_of_states_a_provider_has(bundles, name):
    table, said = KernelTable.of(name), "no kernel of jetdraft"
    if ("com.microsoft", "LinearAttention") in table.kernels:
        assert table.source.startswith(LINEAR_ATTENTION[name])
        said += f"; {LINEAR_ATTENTION[name]} has a kernel of its own"
    for family, line in (("lfm2", ""), ("qwen3_5", f"LinearAttention: {said}")):
        result = programs.jetdraft("check", "--for", name, bundles[family].path)
        assert result.exit_code == 2
        assert f"{name} cannot run target.onnx: recurrent states run" in result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stdout.strip().endswith(line)


def test_check_counts_states_as_memory(bundles):
    result = programs.jetdraft("check", "--no-run", bundles["granitemoehybrid"].path)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "states 0.1 MB, in use and at the prompt's end" in lines
    assert "trees none: the model has recurrent states" in lines
