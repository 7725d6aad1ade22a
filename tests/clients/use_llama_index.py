"""Chats, texts, streams, calls and forms."""

from asked import ADDRESS, ANN, ANSWER, ASK, Person, read_sensor
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

way = {"model": "toy", "api_base": f"{ADDRESS}/v1", "api_key": "none"}
way |= {"context_window": 512, "temperature": 0.0}
chat = OpenAILike(**way, is_chat_model=True, is_function_calling_model=True)
hello = [ChatMessage(role="user", content="Hello")]
assert chat.chat(hello).message.content == ANSWER
assert "".join(part.delta for part in chat.stream_chat(hello)) == ANSWER
tool = FunctionTool.from_defaults(fn=read_sensor)
assert chat.chat_with_tools([tool], ASK[0]["content"]).message
assert chat.structured_predict(Person, PromptTemplate(ANN)).name == "Ann"
texts = OpenAILike(**way, is_chat_model=False, max_tokens=8)
assert texts.complete("The robot sees").text
assert "".join(part.delta for part in texts.stream_complete("The robot sees"))
