"""One client for three APIs: chats, streams, tools and forms."""

import litellm
from asked import ADDRESS, ANN, ANSWER, ASK, HELLO, TOOL, Person

ann = [{"role": "user", "content": ANN}]
for model, base in (
    ("openai/toy", f"{ADDRESS}/v1"),
    ("anthropic/toy", ADDRESS),
    ("ollama_chat/toy", ADDRESS),
):
    way = {"model": model, "api_base": base, "api_key": "none", "temperature": 0}
    way["max_tokens"] = 90
    said = litellm.completion(**way, messages=HELLO)
    assert said.choices[0].message.content == ANSWER, model
    parts = litellm.completion(**way, messages=HELLO, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts) == ANSWER, model
    called = litellm.completion(**way, messages=ASK, tools=[TOOL])
    assert called.choices[0].message.tool_calls, model
    found = litellm.completion(**way, messages=ann, response_format=Person)
    assert Person.model_validate_json(found.choices[0].message.content), model
way = {"model": "openai/toy", "api_base": f"{ADDRESS}/v1", "api_key": "none"}
assert litellm.responses(**way, input="Hello", temperature=0).output
assert litellm.text_completion(**way, prompt="The robot sees").choices[0].text
