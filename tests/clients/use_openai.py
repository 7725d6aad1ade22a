"""Chats, completions, streams, tools, forms, predictions and responses."""

import openai
from asked import ANN, ANSWER, ASK, HELLO, TOOL, WAY, Person, refusal

client = openai.OpenAI(**WAY)
GREEDY = {"model": "toy", "temperature": 0}
assert client.models.retrieve(client.models.list().data[0].id).owned_by == "jetdraft"
chats, answers = client.chat.completions, client.responses
said = chats.create(**GREEDY, messages=HELLO, store=True, n=2)
assert [choice.message.content for choice in said.choices] == [ANSWER] * 2
hint = {"type": "content", "content": ANSWER}
assert chats.create(**GREEDY, messages=HELLO, prediction=hint).choices
with chats.stream(**GREEDY, messages=HELLO) as stream:
    assert stream.get_final_completion().choices[0].message.content == ANSWER
called = chats.create(**GREEDY, messages=ASK, tools=[TOOL]).choices[0]
[call] = called.message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
turns = [*ASK, called.message, result]
assert chats.create(**GREEDY, messages=turns, tools=[TOOL]).choices[0].message.content
ann = [{"role": "user", "content": ANN}]
parsed = chats.parse(**GREEDY, messages=ann, response_format=Person)
assert parsed.choices[0].message.parsed.name == "Ann"
assert client.completions.create(**GREEDY, prompt=["The robot", "A"]).choices[1].text

assert answers.create(**GREEDY, input="Hello").output_text == ANSWER
with answers.stream(**GREEDY, input="Hello") as stream:
    deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER == stream.get_final_response().output_text
assert answers.parse(**GREEDY, input=ANN, text_format=Person).output_parsed.age == 7
tool = {"type": "function", **TOOL["function"], "strict": True}
first = answers.create(**GREEDY, input=ASK, tools=[tool])
[item] = first.output
output = {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
turns = [*ASK, item, output]
assert answers.create(**GREEDY, input=turns, tools=[tool]).output_text
with answers.stream(**GREEDY, input=ASK, tools=[tool]) as stream:
    assert stream.get_final_response().output[0].arguments == item.arguments
wrong = {"model": "toy", "input": "a", "previous_response_id": "r"}
error = refusal(openai.BadRequestError, lambda: answers.create(**wrong))
assert error.param == "previous_response_id"
