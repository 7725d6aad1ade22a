"""Chats, texts, streams, tools, forms and models."""

import ollama
from asked import ADDRESS, ANN, ANSWER, ASK, HELLO, Person, read_sensor, refusal

client = ollama.Client(host=ADDRESS)
GREEDY = {"model": "toy", "options": {"temperature": 0, "num_ctx": 512}}
assert client.list().models[0].model == "toy"
assert client.show("toy").modelinfo["jetdraft.context_length"] == 512
assert client.ps().models
said = client.chat(**GREEDY, messages=HELLO, keep_alive="5m")
assert (said.message.content, said.done_reason) == (ANSWER, "stop")
assert said.eval_duration > 0
parts = list(client.chat(**GREEDY, messages=HELLO, stream=True))
assert "".join(part.message.content for part in parts) == ANSWER
assert [part.done for part in parts[-2:]] == [False, True]
called = client.chat(**GREEDY, messages=ASK, tools=[read_sensor]).message
[call] = called.tool_calls
result = {"role": "tool", "tool_name": "read_sensor", "content": "7"}
turns = [*ASK, called, result]
assert client.chat(**GREEDY, messages=turns, tools=[read_sensor]).message.content
ann = [{"role": "user", "content": ANN}]
found = client.chat(**GREEDY, messages=ann, format=Person.model_json_schema())
assert Person.model_validate_json(found.message.content).name == "Ann"
assert client.generate(**GREEDY, prompt="Hello").response == ANSWER
texts = client.generate(**GREEDY, prompt="The robot sees", raw=True, stream=True)
assert "".join(part.response for part in texts)
other = {"model": "other", "messages": HELLO}
error = refusal(ollama.ResponseError, lambda: client.chat(**other))
assert error.status_code == 404
assert "other" in error.error
