"""Messages, streams, tools, forms and models."""

import anthropic
from asked import ADDRESS, ANN, ANSWER, ASK, CHOICES, HELLO, Person, refusal

client = anthropic.Anthropic(base_url=ADDRESS, api_key="none")
GREEDY = {"model": "toy", "max_tokens": 90, "extra_body": {"temperature": 0}}
assert client.models.list().data[0].display_name == "toy"
said = client.messages.create(**GREEDY, messages=HELLO, system="Be brief.")
assert (said.content[0].text, said.stop_reason) == (ANSWER, "end_turn")
assert said.usage.output_tokens > 3
with client.messages.stream(**GREEDY, messages=HELLO) as stream:
    assert "".join(stream.text_stream) == ANSWER
    assert stream.get_final_message().usage.input_tokens > 0
tool = {"name": "read_sensor", "input_schema": CHOICES}
with client.messages.stream(**GREEDY, messages=ASK, tools=[tool]) as stream:
    called = stream.get_final_message()
assert called.stop_reason == "tool_use"
[use] = called.content
assert use.input["sensor"] in ("left", "right")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "7"}
turns = [
    *ASK,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
assert client.messages.create(**GREEDY, messages=turns, tools=[tool]).content[0].text
ann = [{"role": "user", "content": ANN}]
parsed = client.messages.parse(**GREEDY, messages=ann, output_format=Person)
assert parsed.parsed_output.name == "Ann"
other = {"model": "other", "max_tokens": 9, "messages": HELLO}
error = refusal(anthropic.NotFoundError, lambda: client.messages.create(**other))
assert error.body["error"]["type"] == "not_found_error"
