"""Chats with both APIs, streams, tools and forms; texts in a batch."""

from asked import ANN, ANSWER, ASK, WAY, Person, read_sensor
from langchain_openai import ChatOpenAI, OpenAI

for responses in (False, True):
    chat = ChatOpenAI(model="toy", temperature=0, use_responses_api=responses, **WAY)
    assert chat.invoke("Hello").text == ANSWER
    assert "".join(part.text for part in chat.stream("Hello")) == ANSWER
    question = ASK[0]["content"]
    for choice in ("auto", "any"):
        bound = chat.bind_tools([read_sensor], tool_choice=choice)
        assert bound.invoke(question).tool_calls or choice == "auto"
    for method in ("json_schema", "function_calling", "json_mode"):
        if responses and method == "json_mode":
            continue
        form = chat.with_structured_output(Person, method=method)
        assert form.invoke(ANN).name == "Ann", method
texts = OpenAI(model="toy", temperature=0, max_tokens=8, **WAY)
assert len(texts.batch(["The robot sees", "A man takes"])) == 2
assert texts.generate(["The robot sees", "A man takes"]).generations[1][0].text
assert "".join(texts.stream("The robot sees"))
