"""``Dying`` behind OpenEnv's protocol: ``python -m tests.services.openenv_server PORT``."""

import json
import sys
from typing import Any

from websockets.sync.server import serve

from sensorium.data.media_store import MediaStore
from tests.services.running import Dying


def handle(connection: Any) -> None:
    environment = Dying(MediaStore())
    for text in connection:
        frame = json.loads(text)
        if frame["type"] == "reset":
            _, shown = environment.reset(frame["data"]["seed"])
            reward, done = None, False
        else:
            result = environment.step(frame["data"]["move"])
            assert result.observation is not None
            shown, reward, done = result.observation, result.reward, result.done
        held = {"observation": {"text": shown.messages[0].text}, "reward": reward, "done": done}
        connection.send(json.dumps({"type": "observation", "data": held}))


if __name__ == "__main__":
    with serve(handle, "127.0.0.1", int(sys.argv[1])) as serving:
        print("serving", flush=True)
        serving.serve_forever()
