"""Every architecture through the real path, against transformers' own layers."""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import families
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from onnx_ir.passes import common
from safetensors.torch import load_file, save_file

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import CANDIDATES, WIDEST
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.export import fusing, seams, tracer
from jetdraft.export.attentions import attentions, use_own_attention
from jetdraft.export.step import Step, buffer_sizes
from jetdraft.runtime.measured.survey import randomized
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from tests import cases, tiny
from tests.checkpoints.heads.test_mtp import edit
from tests.tiny import HYBRIDS, SHARING, VOCAB_SIZE, llama_config, save_checkpoint

# One layer has a norm that comes first, and others after a sum.
SIZE = {**tiny.SIZES, "num_hidden_layers": 1}
SIZES = {**tiny.SIZES, "num_hidden_layers": 2}
CAPACITY = 64
TOLERANCE = 1e-4
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# With the published size of the embedding that each layer has.
OF_EACH_LAYER = {"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0}
OF_EACH_LAYER |= {"vocab_size_per_layer_input": 262_144, "head_dim": 16}
PREFILL, STEPS = 20, 5
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40)
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0}
LONG_ROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(4)]}
LONG_ROPE |= {"long_factor": [2.0 + 0.5 * i for i in range(4)]}
LONG_ROPE |= {"original_max_position_embeddings": CAPACITY}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE |= {"original_max_position_embeddings": 16}
BIASES = {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN_ROPE}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}
SCALES |= {"attention_multiplier": 0.3, "logits_scaling": 2.0}
UNTIED = {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 24}
UNTIED |= {"intermediate_size": VOCAB_SIZE, "tie_word_embeddings": False}
UNTIED |= {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": CAPACITY}
PARTLY = {"partial_rotary_factor": 0.5, "rope_parameters": LONG_ROPE}
PARTLY |= {"original_max_position_embeddings": CAPACITY}
ALTUP = {"altup_num_inputs": 2, "laurel_rank": 8}
ALTUP |= {"activation_sparsity_pattern": [0.0, 0.0]}

CONFIGS = {
    "llama with biases, yarn": llama_config(num_hidden_layers=1, **BIASES),
    "gemma2, soft caps": transformers.Gemma2Config(
        **SIZES, **CAPS, head_dim=16, query_pre_attn_scalar=20, sliding_window=8
    ),
    "granite, scales": transformers.GraniteConfig(**SIZE, **SCALES),
    "llama grouped tied": llama_config(num_hidden_layers=2),
    "llama multi-head untied, head_dim not hidden/heads, "
    "dynamic rope within its limit": llama_config(**UNTIED),
    "qwen2": transformers.Qwen2Config(**SIZE),
    "qwen3": transformers.Qwen3Config(**SIZE, head_dim=32),
    "mistral, window of 8": transformers.MistralConfig(**SIZE, sliding_window=8),
    "phi3": transformers.Phi3Config(**SIZE),
    "phi3 partly rotary, longrope within its limit": transformers.Phi3Config(
        **SIZE, **PARTLY
    ),
    "smollm3, a layer without positions": transformers.SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0]
    ),
    "gemma3, windows of 8": transformers.Gemma3TextConfig(
        **SIZES, **WINDOWS, head_dim=32, query_pre_attn_scalar=20
    ),
    "gemma3n, embeddings of each layer": transformers.Gemma3nTextConfig(
        **SIZES, **WINDOWS, **OF_EACH_LAYER, **ALTUP
    ),
    "gemma4, embeddings of each layer": transformers.Gemma4TextConfig(
        **SIZES, **WINDOWS, **OF_EACH_LAYER, global_head_dim=16
    ),
    **{f"{name}, shared": make() for name, make in tiny.SHARING.items()},
}
TEXT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 500)
DRAFT = 5
FAMILIES = {**HYBRIDS, **SHARING}
of_states = pytest.mark.parametrize("family", HYBRIDS, indirect=True)


def load(config, folder) -> Checkpoint:
    save_checkpoint(folder, config, tokenizer=False)
    return Checkpoint.load(str(folder), torch.float32)


def contract_of(checkpoint: Checkpoint, capacity: int = CAPACITY) -> StepContract:
    sizes = {"vocab_size": checkpoint.vocab_size, "capacity": capacity}
    sizes |= {"max_width": 32, **buffer_sizes(checkpoint.model)._asdict()}
    return StepContract(dtype="float32", **sizes)


def traced(checkpoint: Checkpoint, contract: StepContract) -> ir.Model:
    model = tracer.trace(Step(checkpoint.model, contract), checkpoint.weight_names())
    fusing.fuse(model, contract)
    return model


def transformers_logits(config, weights, tokens=TOKENS) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    config = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("architecture")
    checkpoint = load(config, folder / "checkpoint")
    expected = transformers_logits(config, checkpoint.model.state_dict())
    contract = contract_of(checkpoint)
    model, graphs = traced(checkpoint, contract), []
    for use in (attentions, use_own_attention):
        use(model.graph)
        ir.save(model, folder / f"{use.__name__}.onnx")
        session = open_session(folder / f"{use.__name__}.onnx", "cpu")
        graphs.append(Graph(StepSessions(session, contract)))
    made = SimpleNamespace(config=config, checkpoint=checkpoint, contract=contract)
    made.onnx, made.expected = model, expected
    made.other, made.graph = graphs
    return made


def run(graph: Graph, start: int, end: int) -> np.ndarray:
    assert graph.cache.length == start
    logits = graph.run(TOKENS[start:end]).logits.copy()
    graph.cache.advance(end - start)
    return logits


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_passes_equal_transformers(case):
    # Otherwise this, and everything below, would prove little.
    assert case.expected.std(axis=-1).min() > 0.1
    for graph in (case.other, case.graph):
        graph.cache.rewind(0)
        answer = graph.run(TOKENS[:PREFILL], last_only=True)
        assert_close(answer.logits, case.expected[PREFILL - 1 : PREFILL])
        graph.cache.advance(PREFILL)
        assert_close(run(graph, PREFILL, 30), case.expected[PREFILL:30])
        graph.cache.rewind(0)
        assert_close(run(graph, 0, PREFILL), case.expected[:PREFILL])
        for at in range(PREFILL, PREFILL + STEPS):
            assert_close(run(graph, at, at + 1), case.expected[at : at + 1])


def test_rows_after_a_rewind_over_wrong_tokens_equal_transformers(case):
    cache = case.graph.cache
    cache.rewind(0)
    run(case.graph, 0, PREFILL)
    wrong = (TOKENS[PREFILL : PREFILL + 9] + 1) % VOCAB_SIZE
    case.graph.run(wrong)
    cache.advance(len(wrong))
    cache.rewind(PREFILL)
    for start, end in ((PREFILL, PREFILL + 7), (PREFILL + 7, len(TOKENS))):
        assert_close(run(case.graph, start, end), case.expected[start:end])


def test_candidates_and_logsumexp_agree_with_the_logits(case):
    case.graph.cache.rewind(0)
    answer = case.graph.run(TOKENS[:PREFILL])
    picked = np.take_along_axis(answer.logits, answer.candidates, axis=-1)
    np.testing.assert_array_equal(answer.candidate_logits, picked)
    count = min(CANDIDATES, answer.vocab_size)
    best = np.sort(answer.logits, axis=-1)[:, ::-1][:, :count]
    np.testing.assert_array_equal(answer.candidate_logits, best)
    logsumexp = np.log(np.exp(answer.logits.astype(np.float64)).sum(axis=-1))
    assert_close(answer.logsumexp, logsumexp)


def test_eager_module_is_the_oracle_of_its_graph(case):
    graph, contract = case.graph, case.contract
    graph.cache.rewind(0)
    step = Step(case.checkpoint.model, contract)
    buffers = [torch.zeros(spec.shape_for()) for spec in contract.buffers("past")]
    for start, end in ((0, PREFILL), (PREFILL, PREFILL + 3)):
        with torch.no_grad():
            _, _, logsumexp, logits, *buffers = step(
                torch.tensor(TOKENS[None, start:end]),
                torch.arange(start, end)[None],
                torch.tensor([start], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                torch.arange(end - start),
                buffers,
            )
        answer = graph.run(TOKENS[start:end])
        assert_close(answer.logits, logits[0].numpy())
        assert_close(answer.logsumexp, logsumexp[0].numpy())
        graph.cache.advance(end - start)
    for buffer, held in zip(buffers, graph.cache.buffers.values(), strict=True):
        assert_close(held.numpy()[:, :, :end], buffer[:, :, :end].numpy())


@pytest.mark.parametrize("case", ["llama grouped tied"], indirect=True)
def test_llama_becomes_few_nodes(case):
    nodes = list(case.onnx.graph)
    kinds = Counter(node.op_type for node in nodes)
    layers = case.config.num_hidden_layers
    assert kinds["GroupQueryAttention"] == layers
    # Query, key and value; output; gate and up; down; and the head.
    assert kinds["MatMul"] == 4 * layers + 1
    # All norms but the first follow a residual sum.
    assert kinds["SkipSimplifiedLayerNormalization"] == 2 * layers
    assert kinds["RMSNormalization"] == 1
    assert not kinds["RotaryEmbedding"]
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            assert node.attributes.get_int("do_rotary") == 1
            assert node.inputs[1] is node.inputs[2] is None, "not packed"
    # Silu and its product, and the split before them: 11 a layer, and the ends.
    assert len(nodes) <= 11 * layers + 23, kinds


def test_half_precision_becomes_as_few_nodes(tmp_path):
    save_checkpoint(tmp_path, llama_config(num_hidden_layers=1), tokenizer=False)
    kinds = []
    for dtype in (torch.float32, torch.float16):
        checkpoint = Checkpoint.load(str(tmp_path), dtype)
        name = str(dtype).removeprefix("torch.")
        nodes = traced(checkpoint, replace(contract_of(checkpoint), dtype=name)).graph
        kinds.append(Counter(n.op_type for n in nodes if n.op_type != "Cast"))
    assert kinds[0] == kinds[1]
    assert not kinds[1]["Neg"], "attention rotates"


def refusal(folder, capacity: int = CAPACITY) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        _through_the_whole_path(folder, capacity)
    assert isinstance(caught.value, CheckpointError)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _through_the_whole_path(folder, capacity):
    checkpoint = Checkpoint.load(str(folder), torch.float32)
    contract = contract_of(checkpoint, capacity)
    seams.check_seams(checkpoint.model, contract)
    tracer.trace(Step(checkpoint.model, contract), checkpoint.weight_names())


OF_MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
WINDOWED = {"sliding_window": 8, "num_local_experts": 2}
OF_GEMMA3 = {"head_dim": 16, "use_bidirectional_attention": True}
OF_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 1, "n_head": 2}
OF_GPT2 |= {"n_positions": CAPACITY - 1, "bos_token_id": 0, "eos_token_id": 0}


@cases(
    "config, fact",
    (transformers.MambaConfig(**OF_MAMBA), "AttentionInterface"),
    # Two attentions in a layer.
    (transformers.DiffLlamaConfig(**SIZES), "twice"),
    # A window that only the mask knows.
    (
        transformers.PhimoeConfig(**SIZES, **WINDOWED),
        "does not reach AttentionInterface",
    ),
    (transformers.Gemma3TextConfig(**SIZES, **OF_GEMMA3), "both directions"),
    (transformers.BertConfig(**SIZES), "both directions"),
    (transformers.GPT2Config(**OF_GPT2), f"--capacity {CAPACITY - 1} or less"),
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_the_seams_do_not_reach_is_refused(config, fact, tmp_path):
    save_checkpoint(tmp_path, config, tokenizer=False)
    assert fact in refusal(tmp_path)


def test_missing_weights_are_refused(tmp_path):
    save_checkpoint(tmp_path, llama_config(), tokenizer=False)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    matrix = weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        Checkpoint.load(str(tmp_path), torch.float32)
    matrix[0, 0] = torch.nan
    weights["model.layers.1.mlp.down_proj.weight"] = matrix
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite"):
        _through_the_whole_path(tmp_path, CAPACITY)


def test_an_encoder_decoder_beside_the_seams_is_refused(tmp_path):
    """ProphetNet predicts several tokens at once, in an attention of its own."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "decoder_start_token_id": 0}
    for part in ("encoder", "decoder"):
        sizes |= {f"num_{part}_layers": 1, f"num_{part}_attention_heads": 2}
        sizes[f"{part}_ffn_dim"] = 32
    config = transformers.ProphetNetConfig(**sizes)
    transformers.ProphetNetForConditionalGeneration(config).save_pretrained(tmp_path)
    assert "see docs/models.md" in refusal(tmp_path)


@cases("name", *(name for name in CONFIGS if "within its limit" in name))
def test_frequencies_that_change_within_the_capacity_are_refused(name, tmp_path):
    save_checkpoint(tmp_path, CONFIGS[name], tokenizer=False)
    assert f"--capacity {CAPACITY} or less" in refusal(tmp_path, capacity=CAPACITY + 1)


@cases("name", "bloom", "deepseek_v2", "llava", "lfm3", "qwen3_vl_moe", "stablelm")
def test_a_family_is_what_the_table_says(name, tmp_path):
    outcome = families.try_family(name, tmp_path)
    assert families.title(outcome) == families.documented(families.PAGE)[name]


def test_no_family_of_transformers_is_missing_in_the_table():
    assert sorted(families.documented(families.PAGE)) == families.NAMES


def test_other_logits_are_wrong(tmp_path, monkeypatch):
    own = families.logits_of
    other = lambda *given: own(*given) + 2 * families.TOLERANCE  # noqa: E731
    monkeypatch.setattr(families, "logits_of", other)
    assert families.try_family("llama", tmp_path).result == "wrong"


@contextmanager
def row_by_row(model):
    """Use transformers' rule for decoding; its rule for prompts is 2.5e-4 off."""
    with pytest.MonkeyPatch.context() as patch:
        scope = sys.modules[type(model).__module__]
        by_row = getattr(scope, "torch_recurrent_gated_delta_rule", None)
        patch.setattr(scope, "torch_chunk_gated_delta_rule", by_row, raising=False)
        yield


def graph_of(checkpoint: Checkpoint, file: Path, capacity: int) -> Graph:
    contract = contract_of(checkpoint, capacity)
    seams.check_seams(checkpoint.model, contract)
    ir.save(traced(checkpoint, contract), file)
    return Graph(StepSessions(open_session(file, "cpu"), contract))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    config, folder = FAMILIES[request.param](), tmp_path_factory.mktemp("recurrent")
    checkpoint = load(config, folder / "checkpoint")
    with row_by_row(checkpoint.model):
        expected = transformers_logits(config, checkpoint.model.state_dict(), TEXT)
    graph = graph_of(checkpoint, folder / "step.onnx", 512)
    return SimpleNamespace(graph=graph, expected=expected)


def restart(graph: Graph, tokens=()) -> None:
    graph.cache.rewind(0)
    if len(tokens):
        graph.run(tokens, last_only=True)
        graph.cache.advance(len(tokens))


def states(graph: Graph) -> list[bytes]:
    return [state.tobytes() for state in graph.cache.copy_states().values()]


def settled_states(graph: Graph) -> list[bytes]:
    """The states without kept rows, after a pass that has taken up all before it."""
    copies = [x for x in graph.cache.copy_states().values() if x.ndim]
    return [(x if x.ndim == 4 else x[:, :-WIDEST]).tobytes() for x in copies]


@pytest.mark.parametrize("length", [1, 63, 500])
def test_a_prompt_in_chunks_equals_transformers(family, length):
    graph, expected = family.graph, family.expected
    assert expected.std(axis=-1).min() > 0.1
    restart(graph)
    for start in range(0, length, 32):
        end = min(length, start + 32)
        logits = graph.run(TEXT[start:end], width=32 if length > 400 else 0).logits
        assert_close(logits, expected[start:end])
        np.testing.assert_array_equal(logits.argmax(-1), expected[start:end].argmax(-1))
        graph.cache.advance(end - start)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_half_precision_are_converted_in_every_layer(name, tmp_path):
    """A layer that convolves with weights of bfloat16 rounds its rows to it."""
    save_checkpoint(tmp_path, FAMILIES[name](), tokenizer=False)
    edit(tmp_path, lambda own: {n: t.bfloat16() for n, t in own.items()})
    checkpoint = Checkpoint.load(str(tmp_path), torch.float32)
    seams.check_seams(checkpoint.model, contract_of(checkpoint))


@pytest.mark.parametrize("accepted", range(DRAFT + 1))
def test_the_state_after_every_outcome_is_that_of_row_by_row(family, accepted):
    graph, width = family.graph, DRAFT + 1
    prompt, true = TEXT[:21], TEXT[21 : 21 + width]
    restart(graph, prompt)
    rows = []
    for token in true[: accepted + 1]:
        rows.append(graph.run([token], width=width).logits[0].copy())
        graph.cache.advance(1)
    following = graph.run([7], width=width).logits.copy()
    by_row = settled_states(graph)

    restart(graph, prompt)
    draft = [*true[: accepted + 1], *((true + 1) % VOCAB_SIZE)[accepted + 1 :]]
    for _ in range(2):  # a pass that nobody commits leaves no trace
        logits = graph.run(draft).logits.copy()
    graph.cache.advance(accepted + 1)
    np.testing.assert_array_equal(logits[: accepted + 1], rows)
    np.testing.assert_array_equal(graph.run([7], width=width).logits, following)
    assert settled_states(graph) == by_row


@of_states
def test_ways_back(family):
    graph, cache = family.graph, family.graph.cache
    restart(graph, TEXT[:20])
    cache.mark()
    before, stored = states(graph), cache.copy_rows(20)
    graph.run(TEXT[20:30])
    cache.advance(7)
    assert [cache.resumable(n) for n in (99, 27, 26, 20, 19)] == [27, 27, 20, 20, 0]
    with pytest.raises(ValueError, match="cannot rewind from 27 rows to 26"):
        cache.rewind(26)
    with pytest.raises(ValueError, match="states are of 27 rows, not of 20"):
        cache.copy_rows(20)
    cache.rewind(20)
    assert states(graph) == before
    cache.rewind(0)
    assert not any(map(any, states(graph)))
    cache.restore(stored, 20)
    assert states(graph) == before
    assert cache.resumable(20) == 20


@of_states
def test_rows_that_cannot_be_committed(family):
    restart(family.graph, TEXT[:4])
    with pytest.raises(ValueError, match="cannot commit 1 rows of a pass over 0"):
        family.graph.cache.advance(1)
    family.graph.run(TEXT[4:9], width=32)
    with pytest.raises(ValueError, match="cannot commit 2 rows of a pass over 5"):
        family.graph.cache.advance(2)
    # The states have rows that nobody has committed, also after a survey.
    assert family.graph.cache.resumable(4) == 0
    restart(family.graph)
    family.graph.run(TEXT[:20])
    with randomized(family.graph):
        family.graph.run(TEXT[:3])
    family.graph.cache.rewind(0)
    assert not any(map(any, states(family.graph)))


@pytest.mark.parametrize("name", ["Softplus", "Cos", "Sin"])
def test_functions_give_a_row_the_same_bits_beside_others(name, tmp_path):
    """They compute otherwise what is left over of a packet."""
    head = '<ir_version: 10, opset_import: ["": 22]> graph (float[n, 2] x) => '
    text = f"{head} (float[n, 2] y) {{ z = {name}(x) y = Neg(z) }}"
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    fusing.fill_packets(model.graph)
    common.RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "g.onnx")
    session = open_session(tmp_path / "g.onnx", "cpu")
    rows = np.random.default_rng(0).standard_normal((512, 2)).astype(np.float32)
    (whole,) = session.run(None, {"x": rows})
    alone = [session.run(None, {"x": row[None]})[0][0] for row in rows]
    np.testing.assert_array_equal(alone, whole)
