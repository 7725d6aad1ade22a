import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from jetdraft import Bundle, BundleError, OptionError, ToolCall
from jetdraft.checkpoints.gguf_tokenizer import special_tokens
from jetdraft.checkpoints.model_reader import chat_template
from jetdraft.runtime.text import sandbox
from jetdraft.runtime.text.template import ChatTemplate, user_message
from tests import cases

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": 'Hällo <|x|> "q" & <b>\n'}
SAID = {"role": "assistant", "content": "Hi there.", "name": None}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOK"}
REASONED = {"role": "assistant", "content": "OK", "thinking": "hm"}
CALL = ToolCall("read_sensor", {"sensor": "x"}, id="a1b2c3d4e").for_template()
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": '{"x": 5}'}
ANSWERED["name"] = "read_sensor"
TOOL = {
    "name": "read_sensor",
    "description": "Reads a <sensor> & more, in °C",
    "parameters": {
        "type": "object",
        "required": ["sensor"],
        "properties": {"sensor": {"type": "string", "enum": ["x", "y"]}},
    },
}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
CHATS = {
    "question": ([ASKED], {}),
    "system": ([SYSTEM, ASKED], {}),
    "turns": ([SYSTEM, ASKED, SAID, ASKED, SAID, ASKED], {}),
    "tools": ([ASKED], TOOLS),
    "call": ([SYSTEM, ASKED, CALLED, ANSWERED], TOOLS),
    "called": ([ASKED, CALLED, ANSWERED, SAID, ASKED], TOOLS),
    "thought": ([ASKED, THOUGHT, ASKED], {}),
    "reasoned": ([ASKED, REASONED, ASKED], {}),
    "flag": ([ASKED], {"enable_thinking": False}),
    "documents": ([ASKED], {"documents": [{"title": "t", "text": "x"}]}),
    "refused": ([SAID, SAID], {}),
}
TEMPLATES = {
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
    "none": "{{ tools is not none }}{{ documents == none }}{{ tools is defined }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{{ loop.index }}{% endgeneration %}{% else %}<{{ m.content }}>"
        "{% endif %}\n{% endfor %}"
    ),
    "json": (
        "{{ (tools or []) | tojson(ensure_ascii=True) }}{{ messages | tojson }}"
        "{{ messages | tojson(indent=4, separators=(',', ': '), sort_keys=True) }}"
    ),
    "missing": (
        "{% for m in messages %}{{ 'content' in m }}{{ m.name is defined }}"
        "{{ m.content }}{% endfor %}"
    ),
    "thoughts": (
        "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|"
        "{% if '</think>' in (m.content or '') %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}{% endfor %}"
    ),
    "loops": (
        "{% set ns = namespace(last=-1, text='') %}{% for m in messages[::-1] %}"
        "{% set i = (messages | length - 1) - loop.index0 %}"
        "{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = i %}{% continue %}"
        "{% endif %}{% if i == 0 %}{% break %}{% endif %}"
        "{% set ns.text = ns.text + m.role ~ i ~ '\\n' %}{% endfor %}"
        "{{ ns.last }}{{ ns.text }}{{ messages[1:] | map(attribute='role') | list }}"
    ),
    "macros": (
        "{% macro show(m, depth=0) %}[{{ m.role }}{{ depth * 2 }}{{ caller() }}]"
        "{% endmacro %}{% for m in messages %}{% call show(m, loop.index) %}"
        "{{ '%s-%s' | format(m.role, 'x') }}{{ '{:>5}'.format(loop.index) }}"
        "{% endcall %}{% endfor %}"
    ),
    "dicts": (
        "{% set d = dict(a=1, **{'b': [1, (2, 3)]}) %}{{ d }}{{ d.items() | list }}"
        "{% for key, value in d | dictsort %}{{ key }}={{ value }};{% endfor %}"
        "{{ dict.fromkeys(['x'], 0) }}{% set p, q = 1, 2 %}{{ p ~ q ~ none ~ nothing }}"
    ),
    "refusing": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "lines": (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n"
        "{%- endfor %}\n  end\n"
    ),
    "date": "{{ strftime_now('%d %b %Y %Z') }}",
}
GROWING = "{% set ns = namespace(v=X) %}{% for i in range(99) %}STEP{% endfor %}"


def transformers_prompt(source, tokens, chat):
    """What transformers makes of a chat; None if the template refuses it."""
    messages, variables = CHATS[chat]
    # `apply_chat_template` drops the null fields before it calls this.
    plain = [{k: v for k, v in m.items() if v is not None} for m in messages]
    how = {"add_generation_prompt": True, **tokens, **variables}
    try:
        [prompt], _ = render_jinja_template([plain], chat_template=source, **how)
    except Exception:
        return None
    return prompt


def own_prompt(source, tokens, chat):
    messages, variables = CHATS[chat]
    try:
        return ChatTemplate(source, tokens).render(messages, **variables)
    except OptionError:
        return None


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_it_sees_what_transformers_gives(name, chat):
    expected = transformers_prompt(TEMPLATES[name], TOKENS, chat)
    assert own_prompt(TEMPLATES[name], TOKENS, chat) == expected
    assert expected is not None or name == "refusing"


@pytest.mark.parametrize("chat", CHATS)
def test_a_bundle_asks_with_the_ids_of_transformers(toy, toy_model, chat):
    messages, variables = CHATS[chat]
    bundle = Bundle.open(toy)
    own = {"tokenizer_file": str(bundle.tokenizer), **bundle.special_tokens}
    tokenizer = PreTrainedTokenizerFast(**own)
    tokenizer.chat_template = bundle.chat_template.read_text()
    how = {"add_generation_prompt": True, **variables}
    expected = tokenizer.apply_chat_template(messages, **how)["input_ids"]
    assert toy_model.chat_prompt(messages, **variables) == expected


@pytest.mark.parametrize("tokens", [{"eos_token": 5}, {"x_token": "a"}, "eos", None])
def test_other_special_tokens_are_refused(toy, bundle, tokens):
    assert Bundle.open(bundle).special_tokens == {"eos_token": "<|endoftext|>"}
    manifest = {**Bundle.open(toy).to_json(), "special_tokens": tokens}
    with pytest.raises(BundleError, match="malformed"):
        Bundle._parse(toy, manifest)


def test_the_special_tokens_of_a_gguf_file():
    fields = {"tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"]}
    fields |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    fields |= {"tokenizer.ggml.unknown_token_id": 0}
    fields |= {"tokenizer.ggml.padding_token_id": 9}
    assert special_tokens(fields.get) == TOKENS


def test_of_several_templates_one_is_for_tools():
    several = {"default": "{{ 1 }}\n", "tool_use": "{{ tools | length }}s\n"}
    template = ChatTemplate(chat_template(several), {})
    assert template.render([user_message("a")]) == "1"
    assert template.render([user_message("a")], **TOOLS) == "1s"
    for names, expected in (("default", "{{ 1 }}\n"), ("tool_use", None)):
        assert chat_template({name: several[name] for name in [names]}) == expected


def test_a_refusal_has_the_templates_words_and_the_roles():
    template = ChatTemplate(TEMPLATES["refusing"], {})
    with pytest.raises(OptionError) as refused:
        template.render([user_message("a"), SAID, SAID])
    assert str(refused.value) == (
        "the model's chat template refuses these messages (roles must alternate); "
        "their roles are user, assistant, assistant: change them, their order or "
        "their length"
    )
    with pytest.raises(OptionError, match=r"user, user, .{0,20}…: change"):
        template.render([user_message("a")] * 1000)


def test_an_empty_list_of_calls_is_no_call():
    """Llama 3.1's template counts the calls of a message that has the field."""
    counting = (
        "{% for m in messages %}{% if 'tool_calls' in m %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}"
        "{% endif %}{% endif %}{{ m.content }}{% endfor %}"
    )
    said = {"role": "assistant", "content": "a", "tool_calls": []}
    assert ChatTemplate(counting, {}).render([said]) == "a"


def growing(start, step):
    return GROWING.replace("X", start).replace("STEP", step) + "{{ ns.v }}"


LONG = "{% set s = 'a' * 2000000 %}"
ENDLESS = [
    "{{ 1 / 0 }}", "{{ 2.0 ** 100000 }}", "{{ range(1000000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 2000000000 }}", "{{ 2000000000 * [0] }}", "{{ 10 ** 100000000 }}",
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    growing("'a'", "{% set ns.v = ns.v + ns.v %}"),
    growing("'a'", "{% set ns.v = ns.v ~ ns.v %}"),
    growing("'a'", "{% set x %}{{ ns.v }}{{ ns.v }}{% endset %}{% set ns.v = x %}"),
    growing("[0]", "{% set ns.v = [ns.v, ns.v] %}"),
    growing("[0]", "{% set ns.v = {'a': ns.v, 'b': ns.v} %}"),
    growing("(0,)", "{% set ns.v = (ns.v, ns.v) %}"),
    growing("7", "{% set ns.v = ns.v * ns.v %}"),
    "{{ 'a'.center(2000000000) }}", "{{ 'a' | center(2000000000) }}",
    "{{ '%2000000000d' % 1 }}", "{{ '%*d' | format(2000000000, 1) }}",
    "{{ '{:2000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 2000000000) }}",
    "{{ [[[[1]]]] | tojson(indent=2000000) }}", "{{ lipsum(n=100000000) }}",
    LONG + "{{ s | replace('a', s) }}", LONG + "{{ s.join(['b'] * 1000) }}",
    LONG + "{% set l = [s, s, s] %}{{ l }}",
    LONG + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "{{ range(99999) | map('center', 2000000) | join }}",
]  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS, ids=range(len(ENDLESS)))
def test_what_cannot_be_computed_is_one_line(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(OptionError, match="refuses these messages") as caught:
        ChatTemplate(source, {}).render([user_message("a")])
    assert (str(caught.value).count("\n"), caught.value.field) == (0, "messages")


@cases(
    "source, said",
    ("{{ " + "(" * 500 + ")" * 500 + " }}", "is broken"),
    ("{% if 1 %}" * 200 + "{% endif %}" * 200, "is broken"),
    ("{{ " + "1" * 5000 + " }}", "is broken"),
    *((f"a\n{cut}", "line 2") for cut in ("{% if %}", "{{ a | no }}", "{% for x %}")),
)
def test_what_cannot_be_compiled_is_one_line(source, said):
    with pytest.raises(OptionError, match=said):
        ChatTemplate(source, {})


def test_a_bound_is_for_one_prompt(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_TOTAL_SIZE", 20_000)
    template = ChatTemplate("{% for i in range(1000) %}abc{% endfor %}", {})
    assert {template.render([user_message("a")]) for _ in range(9)} == {"abc" * 1000}


def test_a_long_chat_is_within_the_bounds():
    said = {"role": "assistant", "content": "x" * 400}
    messages = [user_message("word " * 400), said] * 200
    for source in TEMPLATES.values():
        assert ChatTemplate(source, TOKENS).render(messages, **TOOLS)


@cases(
    "source",
    "{{ dict.update(messages[0], role='x') }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
)
def test_a_template_can_change_nothing(source):
    messages = [user_message("a")]
    with pytest.raises(OptionError):
        ChatTemplate(source, {}).render(messages)
    assert messages == [user_message("a")]


def test_the_reason_is_one_line_of_safe_text():
    template = ChatTemplate("{{ raise_exception('a\n\x1b[2J' * 500) }}", {})
    with pytest.raises(OptionError) as caught:
        template.render([user_message("")])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [object(), float, {1: {2, 3}}])
def test_messages_that_are_no_json_are_refused(content):
    with pytest.raises(OptionError, match="refuses these messages"):
        ChatTemplate("{{ messages }}", {}).render([{"role": "a", "content": content}])


def test_messages_and_tools_that_are_nested_deeply_are_refused(toy_model):
    value = []
    for _ in range(100_000):
        value = [value]
    for content, tools in ((value, None), ("a", value)):
        with pytest.raises(OptionError):
            toy_model.chat_prompt([user_message(content)], tools=tools)
