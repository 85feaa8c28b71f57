"""An agent on the openai package alone: it draws two shapes, and asks a model about both in one conversation.

    export OPENAI_BASE_URL=… OPENAI_API_KEY=…
    python examples/shapes_agent.py           # against any server that sees pictures

It knows nothing of Sensorium; docs/guides/agents.md trains the model that it talks to. The reward is the share of right
answers.
"""

import base64
import json
import os
import random
import urllib.request
from io import BytesIO
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from PIL import Image, ImageDraw

COLOURS = {"red": (214, 48, 49), "green": (46, 160, 67), "blue": (52, 92, 210), "yellow": (240, 200, 40)}
CONNECTIONS = DefaultHttpxClient()  # shared by all episodes: making one takes longer than an answer of a small model
SHAPES = ["circle", "square", "triangle", "cross"]


def drawing(things: list[tuple[str, str]], chance: random.Random) -> str:
    """A picture with each thing (colour, shape) in a quarter of its own, as a data URL."""
    picture = Image.new("RGB", (64, 64), "white")
    pen = ImageDraw.Draw(picture)
    for (colour, shape), quarter in zip(things, chance.sample(range(4), len(things)), strict=True):
        x, y, r = 16 + 32 * (quarter % 2), 16 + 32 * (quarter // 2), 10
        box, fill = (x - r, y - r, x + r, y + r), COLOURS[colour]
        if shape == "circle":
            pen.ellipse(box, fill)
        elif shape == "square":
            pen.rectangle(box, fill)
        elif shape == "triangle":
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
        else:
            pen.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill)
            pen.rectangle((x - r // 3, y - r, x + r // 3, y + r), fill)
    held = BytesIO()
    picture.save(held, "PNG")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


def play(task: dict[str, Any], client: OpenAI) -> float:
    """One conversation about the picture of a seed."""
    chance = random.Random(task["seed"])
    things = list(zip(chance.sample(list(COLOURS), 2), chance.sample(SHAPES, 2), strict=True))
    questions = [(f"What colour is the {things[0][1]}?", things[0][0]), (f"Which shape is {things[1][0]}?", things[1][1])]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": drawing(things, chance)}}]
    messages: list[Any] = []
    right = 0
    for question, answer in questions:
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        reply = client.chat.completions.create(model=os.environ.get("OPENAI_MODEL", "policy"), messages=messages)
        messages.append(reply.choices[0].message)
        right += reply.choices[0].message.content == f"<answer>{answer}</answer>"
        content = []
    return right / len(questions)


def agent(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """The agent as a function, which training calls in a thread: ``function: shapes_agent:agent``."""
    reward = play(task, OpenAI(base_url=base_url, api_key=api_key, http_client=CONNECTIONS))
    return {"reward": reward, "success": reward == 1}


def main() -> None:
    """The agent as a program, which training starts for each episode: ``command: python shapes_agent.py``."""
    task = {"seed": 0}
    if "SENSORIUM_TASK" in os.environ:
        with open(os.environ["SENSORIUM_TASK"]) as file:
            task = json.load(file)
    reward = play(task, OpenAI())
    print(f"reward {reward}")
    if "SENSORIUM_TASK" in os.environ:
        body = json.dumps({"reward": reward, "success": reward == 1}).encode()
        address = f"{os.environ['OPENAI_BASE_URL']}/reward"
        urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "application/json"}))


if __name__ == "__main__":
    main()
