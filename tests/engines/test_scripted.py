"""The scripted engine answers as told."""

import asyncio

from sensorium.engines.protocol import Sampling, ScriptedEngine
from sensorium.vocabulary.content import user

from .conftest import Bench, ask


def test_answers_become_model_segments_that_stop(text: Bench) -> None:
    policy = text.policy
    engine = ScriptedEngine(policy.chat, lambda request: f"turn {request.order[-1]}")
    context = [policy.chat.render([user("what?")])]
    for turn in range(2):
        response = asyncio.run(engine.generate(ask("a", context, Sampling(), order=(0, 0, turn), name=f"a/{turn}")))
        assert response.finish == "stop"
        assert response.segment.author == "model"
        assert response.segment.text == f"turn {turn}"
        assert response.segment.tokens[-1] in policy.chat.stop_ids
        assert response.segment.name == f"a/{turn}"
        context += [response.segment, policy.chat.extend([user("and?")], after=response.segment)]
