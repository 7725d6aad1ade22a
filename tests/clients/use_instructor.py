"""Forms by tools, which is the default, and by a schema; also as they come."""

import instructor
from asked import ANN, WAY, Person
from openai import OpenAI

ann = [{"role": "user", "content": ANN}]
way = {"model": "toy", "messages": ann, "temperature": 0, "max_retries": 0}
for mode in ("TOOLS", "JSON_SCHEMA"):
    client = instructor.from_openai(OpenAI(**WAY), mode=instructor.Mode[mode])
    found = client.chat.completions.create(**way, response_model=Person)
    assert found.name in ("Ann", "Bob"), mode
client = instructor.from_openai(OpenAI(**WAY))
*_, last = client.chat.completions.create_partial(**way, response_model=Person)
assert last.name in ("Ann", "Bob")
