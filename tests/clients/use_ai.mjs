// Vercel's SDK: both of OpenAI's APIs, streams, a tool and a form.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const baseURL = process.argv[2] + "/v1";
const openai = createOpenAI({ baseURL, apiKey: "none" });
const like = createOpenAICompatible({ name: "toy", baseURL });
const schema = jsonSchema({
  type: "object",
  properties: { sensor: { enum: ["left", "right"] } },
  required: ["sensor"],
  additionalProperties: false,
});
const person = jsonSchema({
  type: "object",
  properties: { name: { enum: ["Ann", "Bob"] }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
});
const answer = "Hello, I am a toy robot.";
for (const model of [openai("toy"), openai.chat("toy"), like("toy")]) {
  const way = { model, temperature: 0, maxRetries: 0 };
  assert.equal((await generateText({ ...way, prompt: "Hello" })).text, answer);
  let text = "";
  for await (const part of streamText({ ...way, prompt: "Hello" }).textStream) text += part;
  assert.equal(text, answer);
  const tools = { read_sensor: tool({ inputSchema: schema }) };
  const called = await generateText({ ...way, tools, prompt: "What is the temperature?" });
  assert.equal(called.toolCalls[0].toolName, "read_sensor");
  const streamed = streamText({ ...way, tools, prompt: "What is the temperature?" });
  assert.equal((await streamed.toolCalls)[0].toolName, "read_sensor");
  const found = await generateObject({ ...way, schema: person, prompt: "Give me Ann as JSON." });
  assert.ok(["Ann", "Bob"].includes(found.object.name));
}
