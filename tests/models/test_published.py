"""Expansion and positions of the published shapes equal the processor's and the model's, on whole conversations."""

import pytest
import torch

from sensorium.media.store import MediaStore
from sensorium.models.policy import Policy
from sensorium.recipe.names import resolve
from sensorium.vocabulary.content import assistant, user

from .clips import noise
from .published import IDS, SHAPES, meta_model, published_processor
from .stock_pair import processed


@pytest.fixture(scope="module", params=SHAPES)
def policy(request: pytest.FixtureRequest) -> Policy:
    family = SHAPES[request.param][1]
    model, processor = meta_model(request.param), published_processor(request.param)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(SHAPES[request.param][5], rel=0.005), "the shape is not the published one"
    return Policy(family, resolve("family", family)(model, processor), model, processor.tokenizer, processor, MediaStore())


def test_expansion_and_positions_are_those_of_the_whole_conversation(policy: Policy) -> None:
    store = policy.store
    first, second = noise(store, 1, 300, 500), noise(store, 2, 700, 260)
    messages = [
        user("Look", first, "and", second, "which?"),
        assistant("red"),
        user(noise(store, 3, 90, 40), "again", first),
    ]
    answer = policy.respond("red", "a")
    segments = [policy.render(messages[:1]), answer, policy.extend(messages[2:], after=answer)]
    layouts = [policy.layout(segment) for segment in segments]

    inputs = processed(policy, messages)
    ids_T = torch.cat([layout.ids_T for layout in layouts])
    assert ids_T.tolist() == inputs["input_ids"][0].tolist()
    assert int((ids_T == IDS["<|image_pad|>"]).sum()) > 300

    want_31T, _ = policy.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    start, got = 0, []
    for layout in layouts:
        got.append(layout.positions_3T + start)
        start += layout.advance
    assert torch.equal(torch.cat(got, dim=1), want_31T[:, 0])
    for layout, segment in zip(layouts, segments, strict=True):
        assert layout.ids_T[layout.ends_S].tolist() == list(segment.tokens)


def test_qwens_own_ids_stop_and_are_forbidden(policy: Policy) -> None:
    assert policy.stop_ids == (IDS["<|im_end|>"], IDS["<|endoftext|>"])
    assert set(IDS.values()) <= {*policy.forbidden_ids, *policy.stop_ids}
    assert set(range(IDS["<|video_pad|>"] + 1, policy.vocab_size)) <= set(policy.forbidden_ids)
    names = [name for group in policy.groups().values() for name in group]
    assert sorted(names) == sorted(name for name, _ in policy.model.named_parameters())
