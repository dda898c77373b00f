"""An agent with two tools: h2okv serve --model FILE.gguf, then python examples/agent_loop.py."""

import json
import sys

try:
    from openai import OpenAI
except ImportError:
    sys.exit("openai is not installed, which this example needs: pip install openai")


def describe(name, text, **types):
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": text, "parameters": schema}
    return {"type": "function", "function": function}


functions = {"get_weather": lambda city: f"Rain in {city}", "add": lambda a, b: a + b}
tools = [describe("get_weather", "Weather of a city now", city="string")]
tools += [describe("add", "Add two numbers", a="number", b="number")]
client = OpenAI(base_url=[*sys.argv[1:], "http://127.0.0.1:8000/v1"][0], api_key="none")
messages = [{"role": "user", "content": "What is the weather in Paris? Use a tool."}]
model = client.models.list().data[0].id
for _ in range(4):
    request = {"model": model, "messages": messages, "tools": tools, "temperature": 0}
    answer = client.chat.completions.create(**request, max_tokens=128).choices[0].message
    messages.append(answer.model_dump(exclude_none=True))
    for call in answer.tool_calls or []:
        try:
            result = functions[call.function.name](**json.loads(call.function.arguments))
        except (KeyError, TypeError) as error:  # a model may invent functions and arguments
            result = f"error: {error!r}"
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    if not answer.tool_calls:
        break
print(answer.content)
