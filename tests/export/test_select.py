from contextlib import nullcontext

import numpy as np
import onnx
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import jetdraft
from jetdraft import Bundle, OptionError
from jetdraft.contracts.step_contract import Reading
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.measured.survey import Survey
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.proposers.proposer import Observer
from tests import cases
from tests.programs import assert_refused
from tests.programs import jetdraft as run
from tests.tiny import VOCAB_SIZE, exported, llama_config, refused, save_checkpoint

ROWS = 32
TRAINED = 64


def selecting(pair, folder, recipe):
    sizes = {"capacity": 256, "max_width": 64, "select_kv": ROWS}
    bundle = exported(pair.target, folder / "bundle", recipe, **sizes)
    model = jetdraft.load(bundle.path, threads=1)
    model.parts.survey.finish()  # idle work would write in the buffers of a test
    return model


@pytest.fixture(scope="module")
def few(pair, tmp_path_factory):
    return selecting(pair, tmp_path_factory.mktemp("few"), "int8")


@pytest.fixture(scope="module")
def floats(pair, tmp_path_factory):
    return selecting(pair, tmp_path_factory.mktemp("floats"), "none")


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(3).integers(1, VOCAB_SIZE, 120).tolist()


def filled(graph, tokens, width=64):
    graph.cache.rewind(0)
    for start in range(0, len(tokens) - 1, width):
        part = tokens[start : min(start + width, len(tokens) - 1)]
        graph.run(part, last_only=True)
        graph.cache.advance(len(part))
    return graph


def selected_by_hand(graph):
    return {
        int(name.partition(".")[2]): tensor.value.numpy()[0]
        for name, tensor in graph.selected.items()
        if name.startswith("past_rows")
    }


def test_the_manifest_says_what_is_selected_and_names_stay_short(few):
    entry = Bundle.open(few.bundle.path).target
    assert entry.selection is not None
    assert (entry.selection.rows, entry.select_file) == (ROWS, "target-select.onnx")
    assert entry.selection.first + entry.selection.recent + entry.selection.voted == 32
    graph = onnx.load(few.bundle.path / "target-select.onnx", load_external_data=False)
    names = [tensor.name for tensor in graph.graph.initializer]
    assert names
    assert not [name for name in names if "0_1_2_3" in name]


def test_a_pass_over_all_rows_has_the_bits_of_a_bundle_without_selections(
    few, bundle, prompt
):
    how = {"token_ids": prompt, "max_new_tokens": 40, "method": "none"}
    plain = jetdraft.load(bundle, threads=1).generate(**how)
    text = few.generate(**how)
    assert text.token_ids == plain.token_ids
    assert text.stats.select_kv is None
    assert not text.stats.lossy


@pytest.mark.parametrize("right", range(5))
def test_every_outcome_of_a_round_leaves_the_buffers_right(few, prompt, right):
    parts = few.parts
    graph, follower = filled(parts.target, prompt), parts.target.make_selecting()
    how = {"max_new_tokens": 12, "ignore_eos": True, "method": "none"}
    text = few.generate(token_ids=prompt, **how).token_ids
    filled(graph, prompt)
    for token in (prompt[-1], *text[:3]):  # as a draft writes its rows
        follower.run([token], last_only=True)
        follower.cache.advance(1)
    follower.cache.rewind(len(prompt) - 1)
    wrong = [(token + 1) % VOCAB_SIZE for token in text]
    rows = Rows.chain([prompt[-1], *text[:right], *wrong[right:4]])
    _, answer = graph.verify(rows, 5)
    chosen = answer.candidates[:, 0].tolist()
    path = rows.walk(chosen)
    graph.commit(path, ends_at_gap=True)
    assert [chosen[row] for row in path] == text[: right + 1]
    assert graph.run([chosen[path[-1]]], width=2).candidates[0, 0] == text[right + 1]


def test_a_selection_of_all_rows_is_always_right(few, prompt):
    how = {"method": "select", "num_draft_tokens": 4, "ignore_eos": True}
    stats = few.generate(token_ids=prompt[:6], max_new_tokens=20, **how).stats
    assert stats.acceptance_rate == 1.0


def test_the_attention_of_selected_rows_is_that_of_the_rows_alone(few, prompt):
    own = filled(few.parts.target, prompt).make_selecting()
    before = own.run(prompt[-1:]).logits.copy()
    selected = selected_by_hand(own)
    last = len(prompt) - 1
    for layer, by_head in selected.items():
        buffer = own.cache.buffers[f"past_value.{layer}"]
        values = np.array(buffer.numpy())
        for head, rows in enumerate(by_head):
            assert len(set(rows.tolist())) == 22
            assert rows.min() >= 2
            assert rows.max() < last - 8
            read = {*range(2), *rows.tolist(), *range(last - 8, last)}
            values[0, head, [row for row in range(last) if row not in read]] = 1e3
        buffer.update_inplace(values)
    assert np.array_equal(own.run(prompt[-1:]).logits, before)
    values[0, 0, selected[2][0][0]] += 1e3
    buffer.update_inplace(values)
    assert not np.array_equal(own.run(prompt[-1:]).logits, before)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_selection_of_all_rows_gives_the_answers_of_all_rows(floats, prompt, tokens):
    own = filled(floats.parts.target, prompt[: ROWS + 1]).make_selecting()
    rows = prompt[ROWS : ROWS + tokens]
    selected = own.run(rows).logits.copy()
    assert selected_by_hand(own)[0].max() > 0
    assert np.abs(selected - floats.parts.target.run(rows).logits).max() < 1e-4


def test_a_branch_of_selected_rows_does_not_see_its_siblings(floats, prompt):
    own = filled(floats.parts.target, prompt[: ROWS + 1]).make_selecting()
    tree = prompt[ROWS : ROWS + 3], [0, 1, 1], [[], [0], [0]]
    selected = own.run_branches(*tree).logits.copy()
    assert selected_by_hand(own)[0].max() > 0
    whole = floats.parts.target.run_branches(*tree).logits
    assert np.abs(selected - whole).max() < 1e-4


def test_the_vote_takes_the_rows_of_the_largest_attention(few, prompt):
    """In layer 0 the keys are known from the buffers, and the query from the state."""
    own = filled(few.parts.target, prompt).make_selecting()
    own.run(prompt[-1:])
    query = own.selected["past_query.0"].value.numpy()[0]
    keys = own.cache.buffers["past_key.0"].numpy()[0]
    last = len(prompt) - 1
    for head, rows in enumerate(selected_by_hand(own)[0].tolist()):
        scores = query[head] @ keys[head, 2 : last - 8].T / 4.0
        weights = np.exp(scores - scores.max(1, keepdims=True))
        votes = (weights / weights.sum(1, keepdims=True)).sum(0)
        assert set(rows) == set((np.argsort(-votes)[:22] + 2).tolist())


def test_a_selection_stays_while_the_query_is_alike(few, prompt):
    own = filled(few.parts.target, prompt).make_selecting()
    own.run(prompt[-1:])
    first = selected_by_hand(own)[0].copy()
    own.run(prompt[-1:])
    assert np.array_equal(selected_by_hand(own)[0], first)
    own.cache.rewind(60)  # rows of the selection are no longer committed
    own.run(prompt[60:61])
    assert selected_by_hand(own)[0].max() < 60 - 8


def trained_briefly(folder, **options):
    config = llama_config(num_hidden_layers=1, max_position_embeddings=TRAINED)
    save_checkpoint(folder / "target", config)
    options = {"capacity": 256, "select_kv": ROWS, **options}
    exported(folder / "target", folder / "bundle", **options)
    return folder


def answers_by_hand(folder, tokens, count, read, turns):
    """Logits of the last `count` tokens if each KV head has only some rows to read."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target").float()
    layer, start = model.model.layers[0], len(tokens) - count
    attention = layer.self_attn
    embedded = model.model.embed_tokens(torch.tensor([tokens]))
    states = layer.input_layernorm(embedded)

    def split(rows):
        return rows.view(1, len(tokens), -1, 16).transpose(1, 2)

    queries, keys, values = (
        split(project(states))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )

    def turned(rows, positions):
        angles = model.model.rotary_emb(states, torch.tensor([positions]))
        return apply_rotary_pos_emb(rows, rows, *angles)[0]

    new = list(range(start, len(tokens)))
    parts = []
    for head, rows in enumerate(read):
        places = [*range(start - len(rows), start)] if turns else rows
        key = turned(keys[:, head : head + 1, [*rows, *new]], [*places, *new])
        query = turned(queries[:, 2 * head : 2 * head + 2, start:], new)
        value = values[:, head : head + 1, [*rows, *new]]
        mask = torch.ones(count, count).tril().bool()
        mask = torch.cat([torch.ones(count, len(rows)).bool(), mask], 1)
        group = (part.expand(1, 2, -1, -1) for part in (key, value))
        parts.append(scaled_dot_product_attention(query, *group, attn_mask=mask))
    mixed = torch.cat(parts, 1).transpose(1, 2).reshape(1, count, -1)
    hidden = embedded[:, start:] + attention.o_proj(mixed)
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0].detach().numpy()


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    with pytest.warns(UserWarning, match="64 tokens.*--capacity 64 or less"):
        folder = trained_briefly(tmp_path_factory.mktemp("brief"))
    model = jetdraft.load(folder / "bundle", threads=1)
    model.parts.survey.finish()
    return folder, model


@pytest.mark.parametrize("count", [1, 3, 16])
@cases(
    "tokens, reading, turns",
    (TRAINED - 1, Reading.TURNED, False),
    (TRAINED + 1, Reading.TURNED, True),
    (120, Reading.TURNED, True),
    (120, Reading.SELECTED, False),
)
def test_beyond_the_trained_length_keys_turn_to_adjoining_positions(
    brief, prompt, tokens, reading, turns, count
):
    """As if each head's rows stood just before the new ones; never in a draft."""
    folder, model = brief
    start = tokens - count
    own = filled(model.parts.target, prompt[: start + 1], 16).make_selecting()
    own.prepare(exact=False, reading=reading)
    answer = own.run(prompt[start:tokens]).logits[:count].copy()
    [by_head] = selected_by_hand(own).values()
    read = [
        [*range(2), *sorted(head.tolist()), *range(start - 8, start)]
        for head in by_head
    ]
    assert read[0] != read[1]
    wanted = answers_by_hand(folder, prompt[:tokens], count, read, turns)
    assert np.abs(answer - wanted).max() < 1e-3
    other = answers_by_hand(folder, prompt[:tokens], count, read, not turns)
    assert np.abs(answer - other).max() > 1e-2


def test_keys_turn_in_a_lossy_text_and_never_in_a_draft(brief, prompt):
    _, model = brief
    seen, run = [], Graph._set_inputs

    def recorded(graph, *arguments):
        seen.append((graph is model.parts.target, graph.reading))
        return run(graph, *arguments)

    how = {"token_ids": prompt, "max_new_tokens": 4}
    how |= {"ignore_eos": True, "exact": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "_set_inputs", recorded)
        model.generate(method="none", drafting={"select_kv": True}, **how)
        assert set(seen) == {(True, Reading.TURNED)}
        seen.clear()
        model.generate(method="select", num_draft_tokens=2, **how)
        assert set(seen) == {(True, Reading.ALL), (False, Reading.SELECTED)}


def test_an_export_says_where_keys_cannot_turn(tmp_path):
    with pytest.warns(UserWarning, match="select-kv and --max-width must be 64"):
        trained_briefly(tmp_path, select_kv=49)


def test_selected_rows_as_the_target_are_lossy_and_say_so(few, prompt):
    how = {"max_new_tokens": 40, "ignore_eos": True, "method": "none"}
    lossy = {"exact": False, "drafting": {"select_kv": True}}
    text = few.generate(token_ids=prompt, **how, **lossy)
    assert text.stats.to_json()["select_kv"] == ROWS
    exact = few.generate(token_ids=prompt, **how)
    assert exact.stats.reused_tokens == 0  # its rows would be lossy
    assert text.token_ids != exact.token_ids


def test_a_lossy_text_teaches_nothing(few, prompt, tmp_path, monkeypatch):
    class Spy(Observer):
        def observe(self, seen):
            taught.append(seen)

    how = {"token_ids": prompt, "exact": False, "max_new_tokens": 8, "method": "none"}
    with jetdraft.load(few.bundle.path, threads=1, store=tmp_path / "store") as own:
        monkeypatch.setattr(own.planner, "_learners", [Spy()])
        for selects in (True, False):
            taught = []
            with pytest.warns(match="keeps nothing") if selects else nullcontext():
                own.generate(**how, drafting={"select_kv": selects})
            assert bool(taught) == bool(own.parts.store.entries) != selects


def test_a_survey_reads_all_rows_after_a_lossy_generation(few, monkeypatch):
    monkeypatch.setattr("jetdraft.runtime.measured.survey.FIRST_MS", 0.0)
    target = few.parts.target
    for measure in (Survey.step, Survey.measure_again):
        survey = Survey(target, None)
        survey.begin()
        target.prepare(exact=False, reading=Reading.SELECTED)
        measure(survey)
        assert target.reading is Reading.ALL


def test_selected_rows_are_refused_where_exactness_is_asked_for(few, model, prompt):
    with pytest.raises(OptionError, match="add --no-exact"):
        few.generate(token_ids=prompt, drafting={"select_kv": True})
    with pytest.raises(OptionError, match="export with --select-kv N"):
        model.generate(token_ids=prompt, drafting={"select_kv": True}, exact=False)
    with pytest.raises(OptionError, match="export with --select-kv"):
        model.generate(token_ids=prompt, method="select")


@pytest.mark.parametrize("rows", [0, -3, 15, 256, 4096])
def test_a_selection_must_be_a_part_of_the_context(rows, pair, tmp_path):
    sizes = ("--fast", "--capacity=256", f"--select-kv={rows}")
    result = run("export", pair.target, *sizes, "-o", tmp_path / "bundle")
    assert_refused(result, "context of 256 tokens", "give --select-kv 16 to 255")
    assert list(tmp_path.iterdir()) == []


@cases(
    "flags, said",
    ({"provider": "cuda"}, "runs on the CPU"),
    ({"dtype": "fp16"}, "in fp32"),
    ({"recipe": "int8-kv8", "fast": False}, "leave kv out of the recipe"),
)
def test_a_selection_needs_the_cpu_and_floats(pair, flags, said):
    refused(OptionError, said, pair.target, select_kv=32, **flags)


def test_the_command_line_says_what_is_lossy_and_refuses_the_rest(few, bundle, prompt):
    folder = few.bundle.path
    short = ("-p", few.parts.text.decode(prompt[:60]), "-n", "4", "-t", "1")
    assert "32 of 256 KV rows" in run("check", folder, "--no-run").stdout
    selected = "--drafting", "select-kv=true"
    lossy = run("generate", folder, *short, *selected, "--no-exact")
    assert "32 KV rows in a pass" in lossy.stderr
    assert "lossy: selected KV rows" in lossy.stderr
    assert_refused(run("generate", folder, *short, *selected), "add --no-exact")
    for flags in ((*selected, "--no-exact"), ("--method", "select")):
        assert_refused(run("generate", bundle, *short, *flags), "export with --select")
