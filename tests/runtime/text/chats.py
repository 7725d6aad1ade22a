"""Conversations and templates that show what transformers gives to a chat template."""

from transformers.utils.chat_template_utils import render_jinja_template

from jetdraft.errors import OptionError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.runtime.text.tools import ToolCall

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
    "type": "function",
    "function": {
        "name": "read_sensor",
        "description": "Reads a <sensor> & more, in °C",
        "parameters": {
            "type": "object",
            "properties": {"sensor": {"type": "string", "enum": ["x", "y"]}},
            "required": ["sensor"],
        },
    },
}
TOOLS = {"tools": [TOOL]}
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
    """What jetdraft makes of it; None if the template refuses it."""
    messages, variables = CHATS[chat]
    try:
        return ChatTemplate(source, tokens).render(messages, **variables)
    except OptionError:
        return None
