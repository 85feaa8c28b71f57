"""A table of conversations against stock transformers, tokens and logits: kinds of media, orders, sizes, rates and turns.

Each cell is drawn from its family and number: one to three turns of pictures, videos and sounds in any order, of any size
and number, with and without text between them, sampled by the family's own rule. What differs from the library on purpose
is in docs/guides/families.md; the oracle is given it (tests/models/trained_positions.py, stock_pair.py).
"""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from sensorium.data.made_media import encode_clip
from sensorium.vocabulary.content import Media, Message, Text, assistant, system, user
from sensorium.vocabulary.decoding import VideoParameters
from tests.families import FAMILY_ROWS, SENSING

from .clips import heard_clip
from .stock_pair import Pair, close, row
from .test_parts import thread

Pairs = Callable[..., Pair]
CELLS = range(5)
WORDS = ("red", "the left circle", "where?", "goal: up", "say")


def film(pair: Pair, draw: Random) -> Media:
    """A short clip of blocks of noise, of any size and rate, sampled as a user may ask."""
    store, seed = pair.policy.chat.store, draw.randrange(1 << 20)
    height, width = draw.choice([(48, 48), (30, 90), (100, 36), (64, 80)])
    fps, count = draw.choice([4.0, 8.0, 12.5]), draw.randint(6, 20)
    small = np.random.default_rng(seed).integers(0, 255, (count, 4, 4, 3), dtype=np.uint8)
    shown = small.repeat(-(-height // 4), axis=1).repeat(-(-width // 4), axis=2)[:, :height, :width]
    if FAMILY_ROWS[pair.policy.family].one_length:
        return store.put(encode_clip(shown, fps), "video", f"film {seed}", VideoParameters(frames=3))
    asked: dict[str, Any] = draw.choice([{}, {"frames": 4}, {"fps": 4.0, "max_frames": 6}, {"start": 0.2, "frames": 2}])
    return store.put(encode_clip(shown, fps), "video", f"film {seed}", VideoParameters(**asked))


def medium(pair: Pair, kind: str, draw: Random) -> Media:
    if kind == "video":
        return film(pair, draw)
    if kind == "sound":
        return pair.tone(draw.randrange(1 << 20), draw.uniform(1.0, 2.5))
    return pair.picture(draw.randrange(1 << 20), *draw.choice([(64, 64), (20, 150), (120, 30), (57, 99)]))


def conversation(pair: Pair, draw: Random) -> list[Message]:
    """Turns of media and text; the last message is the user's."""
    kinds = sorted(pair.policy.chat.modalities - {"text"})
    messages = [system("Answer briefly.")] if draw.random() < 0.3 else []
    for turn in range(draw.randint(1, 3)):
        count = draw.randint(0 if turn else 1, 3)
        blocks: list[Media | str] = [medium(pair, draw.choice(kinds), draw) for _ in range(count)]
        for place in range(len(blocks), -1, -1):
            if draw.random() < 0.5 or not blocks:
                blocks.insert(place, draw.choice(WORDS))
        messages += ([assistant(draw.choice(WORDS))] if turn else []) + [user(*blocks)]
    return messages


def told(messages: list[Message]) -> str:
    """A conversation in a line, for whoever has to look at it."""
    return " | ".join(
        f"{message.role}: " + " ".join("text" if isinstance(b, Text) else b.kind for b in message.content)
        for message in messages
    )


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", SENSING)
def test_a_conversation_is_to_the_model_what_stock_code_makes_of_it(pairs: Pairs, family: str, cell: int) -> None:
    pair = pairs(family)
    messages = conversation(pair, Random(f"{family} {cell}"))
    inputs = pair.inputs(messages)
    segments = thread(pair.policy, messages)
    ids_T, _, _ = row(pair.policy, segments)
    assert ids_T.tolist() == inputs["input_ids"][0].tolist(), told(messages)
    with torch.no_grad():
        close(pair.got(segments), pair.want(inputs), FAMILY_ROWS[family].rounding)


def test_every_kind_order_and_number_of_turns_is_in_the_table(pairs: Pairs) -> None:
    seen = [told(conversation(pairs(family), Random(f"{family} {cell}"))) for family in SENSING for cell in CELLS]
    for pattern in ("picture video", "video picture", "video video", "sound video", "video sound", "picture sound"):
        assert any(pattern in line.replace("text ", "") for line in seen), pattern
    assert {line.count("user:") for line in seen} == {1, 2, 3}
    assert any(line.startswith("system") for line in seen)


@pytest.mark.parametrize("cell", range(3))
def test_clips_that_are_heard_are_in_the_table_too(pairs: Pairs, cell: int) -> None:
    """All videos of a conversation, since the stock processor has one switch and one rate for them."""
    pair, draw = pairs("qwen2_5_omni"), Random(f"heard {cell}")
    store = pair.policy.chat.store
    blocks: list[Media | str] = [heard_clip(store, draw.randrange(99), 3.0, draw.uniform(1.0, 4.5)) for _ in range(2)]
    blocks += [pair.tone(draw.randrange(99), draw.uniform(0.1, 2.0)), pair.picture(draw.randrange(99), 40, 90), "what?"]
    draw.shuffle(blocks)
    messages = [user(*blocks[:3], "red"), assistant("circle"), user(*blocks[3:], "now?")]
    inputs = pair.inputs(messages)
    segments = thread(pair.policy, messages)
    assert row(pair.policy, segments)[0].tolist() == inputs["input_ids"][0].tolist(), told(messages)
    with torch.no_grad():
        close(pair.got(segments), pair.want(inputs))
