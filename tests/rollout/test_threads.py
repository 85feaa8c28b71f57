"""Threads hold exactly what the model saw: one growing thread, or a fresh one per turn past the window."""

import numpy as np
import pytest

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.rollout.play import Renderer, ThreadBuilder
from sensorium.vocabulary import Segment, system, user


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("tiny")
    return load_policy(str(make_tiny("qwen2_5_vl", folder)), store=MediaStore(), device="cpu")


def play(policy: Policy, turns: int, window: int) -> tuple[ThreadBuilder, list[tuple[Segment, ...]]]:
    builder = ThreadBuilder(Renderer(policy.chat), (system("walk to the goal"),), window)
    contexts = []
    for turn in range(turns):
        contexts.append(builder.observe((user(f"where? {turn}"),)))
        builder.respond(policy.chat.respond(f"<answer>left {turn}</answer>", f"e/{turn}"))
    return builder, contexts


def tokens(segments: tuple[Segment, ...]) -> list[int]:
    return [token for segment in segments for token in segment.tokens]


def test_one_thread_is_the_checkpoints_own_template(policy: Policy) -> None:
    builder, _ = play(policy, turns=3, window=0)
    (thread,) = builder.threads()
    chat = [{"role": "system", "content": "walk to the goal"}]
    for turn in range(3):
        chat.append({"role": "user", "content": f"where? {turn}"})
        chat.append({"role": "assistant", "content": f"<answer>left {turn}</answer>"})
    whole = policy.chat.tokenizer.apply_chat_template(chat, return_dict=False)
    assert [*tokens(thread.segments), *policy.chat.tokenizer.encode("\n")] == whole
    assert thread.home == (False, True, False, True, False, True)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_shows_the_last_turns_and_every_response_has_one_home(policy: Policy, window: int) -> None:
    builder, contexts = play(policy, turns=5, window=window)
    threads = builder.threads()
    assert len(threads) == 5 - window + 1
    homes = [s.name for thread in threads for s, home in zip(thread.segments, thread.home, strict=True) if home]
    assert sorted(homes) == [f"e/{turn}" for turn in range(5)]
    text = policy.chat.tokenizer.decode(tokens(contexts[4]))
    assert "walk to the goal" in text
    assert [f"where? {t}" in text for t in range(5)] == [t > 4 - window for t in range(5)]
    assert [f"left {t}" in text for t in range(5)] == [4 - window < t < 4 for t in range(5)]


def test_a_windowed_context_is_what_the_template_gives_for_the_turns_it_shows(policy: Policy) -> None:
    _, contexts = play(policy, turns=4, window=2)
    chat = [
        {"role": "system", "content": "walk to the goal"},
        {"role": "user", "content": "where? 2"},
        {"role": "assistant", "content": "<answer>left 2</answer>"},
        {"role": "user", "content": "where? 3"},
    ]
    assert tokens(contexts[3]) == policy.chat.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


def test_group_members_share_their_prompt_by_key(policy: Policy) -> None:
    first, _ = play(policy, turns=1, window=0)
    second, _ = play(policy, turns=1, window=0)
    assert first.threads()[0].segments[0].key == second.threads()[0].segments[0].key


def test_a_picture_seen_before_is_named_by_its_own_origin(policy: Policy) -> None:
    pixels = encode_png(np.full((56, 56, 3), 90, np.uint8))
    renderer = Renderer(policy.chat)
    here, there = (policy.chat.store.put(pixels, "picture", origin) for origin in ("here", "there"))
    first, second, again = (renderer.start((user(media, "?"),)) for media in (here, there, here))
    assert [segment.media[0].media.origin for segment in (first, second, again)] == ["here", "there", "here"]
    assert first is again
    assert first.key == second.key, "the engine computes it once all the same"
