"""Tower, language model and head as separate calls give what the stock model gives in one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.attention import MaskedAttention
from sensorium.models.families.smolvlm import patch_places
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Features, Placement
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES, group_by_name
from sensorium.vocabulary.content import Message, assistant, system, user
from sensorium.vocabulary.episode import Segment
from tests.families import FAMILY_ROWS, HEARING, ONLY_HEARING, SEEING, SENSING, UNUSED, stock_class
from tests.float64 import in_float64

from .clips import tone
from .stock_pair import Pair, close, row

Pairs = Callable[..., Pair]


def thread(policy: Policy, messages: list[Message]) -> list[Segment]:
    """A conversation as an append-only thread; assistant turns are given answers."""
    segments = [policy.chat.render(messages[: 2 if messages[0].role == "system" else 1])]
    for i, message in enumerate(messages):
        if message.role == "assistant":
            answer = policy.chat.respond(message.text, f"answer {i}")
            segments += [answer, policy.chat.extend([messages[i + 1]], after=answer)]
    return segments


def conversation(pair: Pair, case: str) -> list[Message]:
    """The conversations that every family must get right; a video is told after the break that its text expects."""
    row = FAMILY_ROWS[pair.policy.family]
    gap = row.gap
    if case == "one medium":
        return [user(pair.medium(1), "What colour is it?")]
    if case == "three media":
        return [user("First", pair.medium(1), "then", pair.medium(2, 96, 40), pair.medium(3, 40, 120), "which?")]
    if case == "a medium in turn 3":
        return [
            system("Answer briefly."), user("Hello"), assistant("red"), user("What is it?"), assistant("blue circle"),
            user("Look", pair.medium(4, 100, 70), "again"),
        ]  # fmt: skip
    if case == "media in two turns":
        last = user(pair.medium(6, 130, 60), pair.medium(5), "and now?")
        return [user(pair.medium(5), "What?"), assistant("red"), last]
    if case == "a video":
        return [user(f"Look{gap}", pair.clip(1, 5, 84, 56, 15.0), "what?")]
    if case == "two videos":
        frames = 4 if row.one_length else 6
        first, second = pair.clip(1, 4, 56, 84, 8.0), pair.clip(2, frames, 84, 56, 3.0)
        return [user(first, f"then{gap}", second, "which?")]
    if case == "pictures and a video":
        return [user(pair.picture(1), gap, pair.clip(1, 4, 84, 56), pair.picture(2, 96, 40), "which?")]
    if case == "a sound":
        return [user("Listen", pair.tone(1, 1.3), "what?")]
    if case == "the longest sound":
        return [user(pair.tone(1, 30.0), "what?")]
    if case == "sound and video":
        return [user(pair.tone(1, 2.7), pair.clip(1, 4, 56, 56, 2.0), "what?"), assistant("red"), user("sure?")]
    if case == "video and sounds in two turns":
        last = user(pair.tone(3, 0.06), "and", pair.clip(3, 2, 56, 56, 1.0), pair.tone(2, 4.31), "now?")
        return [user(pair.clip(1, 4), pair.tone(1), "What?"), assistant("red"), last]
    if case == "a sound in turn 2":
        return [user(pair.medium(1), "What?"), assistant("red"), user("Listen", pair.tone(2, 0.8), "now?")]
    assert case == "everything"
    return [user(pair.tone(1), pair.picture(1), pair.clip(1), pair.picture(2, 40, 90), pair.tone(2, 1.1), pair.clip(2, 2))]


CASES = ("one medium", "three media", "a medium in turn 3", "media in two turns")
VIDEO = ("a video", "two videos", "pictures and a video")
SOUND = ("a sound", "a sound in turn 2")
BOTH = ("sound and video", "video and sounds in two turns", "everything")
OMNI = [family for family in HEARING if family in SEEING]
ALL = [(family, case) for family in SENSING for case in CASES] + [
    (family, case)
    for families, cases in ((SEEING, VIDEO), (HEARING, SOUND), (OMNI, BOTH), (ONLY_HEARING, ("the longest sound",)))
    for family in families
    for case in cases
]


@pytest.mark.parametrize(("family", "case"), ALL)
def test_logits_of_the_parts_are_those_of_the_stock_model(pairs: Pairs, family: str, case: str) -> None:
    pair = pairs(family)
    messages = conversation(pair, case)
    inputs = pair.inputs(messages)
    segments = thread(pair.policy, messages)
    ids_T, _, _ = row(pair.policy, segments)
    assert ids_T.tolist() == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        close(pair.got(segments), pair.want(inputs), FAMILY_ROWS[family].rounding)


def test_in_float64_a_model_with_norms_after_its_halves_differs_by_rounding_alone(pairs: Pairs) -> None:
    """They scale what is rounded before them: 1.4e-5 in float32 with the weights of ``pairs``."""
    pair = pairs("glm4v", num_hidden_layers=3)
    pair.policy.model.double()
    pair.stock.double()
    for case in ("media in two turns", "pictures and a video"):
        messages = conversation(pair, case)
        with torch.no_grad(), in_float64():
            inputs = {name: x.double() if x.is_floating_point() else x for name, x in pair.inputs(messages).items()}
            close(pair.got(thread(pair.policy, messages)), pair.stock(**inputs, use_cache=False).logits[0], 1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_text_models_equal_the_stock_model(pairs: Pairs, family: str) -> None:
    pair = pairs(family)
    messages = [user("Where is the goal?"), assistant("left"), user("And now?")]
    with torch.no_grad():
        close(pair.got(thread(pair.policy, messages)), pair.want(pair.inputs(messages)))


@pytest.mark.parametrize("family", SENSING)
def test_rows_of_a_batch_take_their_own_media(pairs: Pairs, family: str) -> None:
    pair = pairs(family)
    threads = [thread(pair.policy, conversation(pair, case)) for case in CASES]
    rows = [row(pair.policy, segments) for segments in threads]
    length = max(len(ids_T) for ids_T, _, _ in rows)
    ids_BT = torch.zeros(len(rows), length, dtype=torch.long)
    positions_3BT = torch.zeros(3, len(rows), length, dtype=torch.long)
    for i, (ids_T, positions_3T, _) in enumerate(rows):
        ids_BT[i, : len(ids_T)] = ids_T
        positions_3BT[:, i, : len(ids_T)] = positions_3T
    # Out of order on purpose: a placement says itself where it goes.
    placed = [Placement(i, item.runs, item.features) for i in (2, 0, 3, 1) for item in rows[i][2]]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        hidden_BTH = pair.policy.language(ids_BT, positions_3BT, MaskedAttention(mask), placed)
        for i, segments in enumerate(threads):
            close(pair.policy.logits(hidden_BTH[i, : len(rows[i][0])]), pair.got(segments))


@pytest.mark.parametrize("family", SENSING)
def test_gradients_of_every_parameter_are_those_of_the_stock_model(pairs: Pairs, family: str) -> None:
    pair = pairs(family, tie_word_embeddings=False)
    case = {(True, True): "everything", (True, False): "pictures and a video", (False, True): "three media"}
    messages = conversation(pair, case[family in SEEING, family in HEARING])
    weights_TV = torch.randn(pair.want(pair.inputs(messages)).shape, generator=torch.Generator().manual_seed(0))
    want = gradients(pair.stock, (pair.want(pair.inputs(messages)) * weights_TV).sum())
    want = {name: gradient for name, gradient in want.items() if name not in FAMILY_ROWS[family].fixed}
    segments = thread(pair.policy, messages)
    for recompute in (False, True):
        pair.policy.checkpoint_gradients(recompute)
        got = gradients(pair.policy.model, (pair.got(segments) * weights_TV).sum())
        pair.policy.checkpoint_gradients(False)
        assert got.keys() == want.keys()
        largest = max(float(gradient.norm()) for gradient in want.values())
        for name, gradient in want.items():
            floor = 1e-7 * largest
            assert float((got[name] - gradient).norm()) <= FAMILY_ROWS[family].rounding * float(gradient.norm()) + floor, (
                name
            )
    unmoved = [name for name, _ in pair.policy.model.named_parameters() if name not in got]
    assert all(name.endswith(UNUSED) for name in unmoved), "every other parameter takes part, the towers' too"
    assert all(float(gradient.norm()) > 0 for gradient in got.values())


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of each parameter."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_recomputation_runs_every_layer_again_in_the_backward_pass(pairs: Pairs) -> None:
    pair = pairs("qwen3_vl")
    calls = []

    class Counted(MaskedAttention):
        def __call__(self, layer, *rest):  # type: ignore[no-untyped-def]
            calls.append(layer)
            return super().__call__(layer, *rest)

    ids_T, positions_3T, placed = row(pair.policy, [pair.policy.chat.render([user(pair.picture(1), "What?")])])
    pair.policy.checkpoint_gradients()
    with torch.no_grad():
        pair.policy.language(ids_T[None], positions_3T[:, None], Counted(), placed)
    assert calls == [0, 1]
    pair.policy.language(ids_T[None], positions_3T[:, None], Counted(), placed).sum().backward()
    pair.policy.checkpoint_gradients(False)
    assert sorted(calls) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("family", SENSING)
def test_one_tower_backward_after_several_language_backwards(pairs: Pairs, family: str) -> None:
    pair = pairs(family)
    segment = pair.policy.chat.render([user(pair.medium(1), "What?")])
    layout = pair.policy.chat.layout(segment)
    whole = gradients(pair.policy.model, 2 * pair.got([segment]).logsumexp(-1).sum())

    pair.policy.model.zero_grad()
    (features,) = pair.policy.encode([pair.medium(1)]).values()
    roots = [features.embeds_NH, *features.deepstack_NH]
    leaves = [root.detach().requires_grad_() for root in roots]
    for _ in range(2):
        placed = [layout.slots[0].place(Features(leaves[0], tuple(leaves[1:])))]
        hidden = pair.policy.language(layout.ids_T[None], layout.positions_3T[:, None], MaskedAttention(), placed)
        pair.policy.logits(hidden[0]).logsumexp(-1).sum().backward()
    torch.autograd.backward(roots, [leaf.grad for leaf in leaves])
    for name, p in pair.policy.model.named_parameters():
        if p.grad is not None:
            assert float((p.grad - whole[name]).norm()) <= 1e-5 * float(whole[name].norm()) + 1e-6, name


def test_a_frozen_tower_keeps_no_graph_and_an_awake_one_does(pairs: Pairs) -> None:
    pair = pairs("qwen3_vl")
    groups = pair.policy.groups()
    tower = [*groups["vision"].values(), *groups["projector"].values()]
    (features,) = pair.policy.encode([pair.picture(1)]).values()
    assert features.embeds_NH.requires_grad
    assert all(level.requires_grad for level in features.deepstack_NH)
    try:
        for parameter in tower:
            parameter.requires_grad_(False)
        (features,) = pair.policy.encode([pair.picture(1)]).values()
        assert not features.embeds_NH.requires_grad
    finally:
        for parameter in tower:
            parameter.requires_grad_(True)


@pytest.mark.parametrize("family", SENSING)
def test_the_tower_encodes_a_medium_the_same_alone_and_among_others(pairs: Pairs, family: str) -> None:
    pair = pairs(family)
    media = [pair.medium(1), pair.medium(2, 96, 40), pair.medium(3, 40, 120), pair.medium(4)]
    before = pair.policy.counters.tower_passes
    together = pair.policy.encode([*media, *media])
    assert pair.policy.counters.tower_passes == before + 1
    assert list(together) == media
    for item in media:
        alone = pair.policy.encode([item])[item]
        close(together[item].embeds_NH, alone.embeds_NH, 5e-6)  # libraries sum products of other sizes in another order
        for level, other in zip(together[item].deepstack_NH, alone.deepstack_NH, strict=True):
            close(level, other, 5e-6)


@pytest.mark.parametrize("family", HEARING)
def test_the_audio_tower_hears_a_sound_the_same_alone_and_among_others(pairs: Pairs, family: str) -> None:
    pair = pairs(family)
    short = tone(pair.policy.chat.store, 1, 0.03)
    seen = [pair.picture(1), pair.clip(1)] if family in SEEING else []
    media = [short, *seen, pair.tone(2, 2.0), pair.tone(3, 2.01), pair.tone(4, 5.1)]
    before = pair.policy.counters.tower_passes
    together = pair.policy.encode([*media, *media])
    assert pair.policy.counters.tower_passes == before + (2 if seen else 1), "one pass of each tower"
    assert list(together) == media
    for item in media:
        close(together[item].embeds_NH, pair.policy.encode([item])[item].embeds_NH, 1e-5)
    counts = [len(together[item].embeds_NH) for item in media if item.kind == "sound"]
    assert counts == list(FAMILY_ROWS[family].sound_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_groups_hold_every_parameter_once(pairs: Pairs, family: str) -> None:
    for tied in (True, False) if FAMILIES[family].more.get("tie_word_embeddings", True) else (False,):
        policy = pairs(family, tie_word_embeddings=tied).policy
        names = [name for group in policy.groups().values() for name in group]
        assert sorted(names) == sorted(name for name, _ in policy.model.named_parameters())
        assert bool(policy.groups()["head"]) is not tied
        facts = FAMILIES[family]
        for group in ("vision", "audio", "projector"):  # the dry run sorts the names of files alike
            assert all(group_by_name(name, facts) == group for name in policy.groups().get(group, ()))
        assert bool(policy.groups().get("vision")) is (family in SEEING)
        assert bool(policy.groups().get("audio")) is (family in HEARING)
        assert bool(policy.groups().get("projector")) is (family in SENSING)


# With experts a rounding may choose another expert, and then nothing follows.
@pytest.mark.parametrize("family", [family for family in SENSING if not FAMILIES[family].has_experts])
def test_bfloat16_follows_the_stock_model_in_bfloat16(pairs: Pairs, family: str) -> None:
    pair = pairs(family, dtype="bfloat16")
    messages = conversation(pair, "three media")
    with torch.no_grad():
        got = pair.got(thread(pair.policy, messages))
        assert got.dtype == torch.float32
        close(got, pair.want(pair.inputs(messages)), 0.03)


@pytest.mark.parametrize("family", SENSING)
def test_a_saved_policy_is_a_hugging_face_model_with_the_same_logits(pairs: Pairs, family: str, tmp_path: Path) -> None:
    pair = pairs(family)
    messages = conversation(pair, "one medium")
    pair.policy.save(tmp_path)
    again = stock_class(family).from_pretrained(tmp_path).eval()
    saved, loaded = pair.stock.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    with torch.no_grad():
        close(
            pair.got(thread(pair.policy, messages)), again(**pair.inputs(messages)).logits[0], FAMILY_ROWS[family].rounding
        )


def test_a_plain_call_of_the_policy_s_model_is_the_stock_model(pairs: Pairs) -> None:
    pair = pairs("qwen2_5_vl")
    inputs = pair.inputs(conversation(pair, "three media"))
    with torch.no_grad():
        close(pair.policy.model(**inputs).logits[0], pair.want(inputs))


def test_a_frozen_copy_has_weights_of_its_own_and_the_same_logits(pairs: Pairs) -> None:
    pair = pairs("qwen3_vl")
    copy = pair.policy.frozen_copy()
    segments = thread(pair.policy, conversation(pair, "one medium"))
    ids_T, positions_3T, placed = row(copy, segments)
    with torch.no_grad():
        hidden = copy.language(ids_T[None], positions_3T[:, None], MaskedAttention(), placed)
        assert torch.equal(copy.logits(hidden[0]), pair.got(segments))
    own = {p.data_ptr() for p in copy.model.parameters()}
    assert own.isdisjoint(p.data_ptr() for p in pair.policy.model.parameters())
    assert not any(p.requires_grad for p in copy.model.parameters())


@pytest.mark.parametrize("family", SENSING)
def test_what_inference_mode_remembered_serves_training(family: str) -> None:
    policy = load_policy(f"tiny:{family}", store=MediaStore(), device="cpu")
    pair = Pair(policy, None, Path())
    segments = [policy.chat.render([user(pair.medium(1), pair.medium(2, 120, 40), "What?")])]
    with torch.inference_mode():
        row(policy, segments)
    ids_T, positions_3T, placed = row(policy, segments)
    policy.language(ids_T[None], positions_3T[:, None], MaskedAttention(), placed).sum().backward()
    tower = policy.groups()["vision" if family in SEEING else "audio"]
    assert all(p.grad is not None for name, p in tower.items() if not name.endswith(UNUSED))


@pytest.mark.parametrize("side", [27, 32, 4])  # of the 2.2B model, of the smaller ones, of ours
def test_patches_of_a_smolvlm_tile_count_through_the_learned_positions(side: int) -> None:
    assert patch_places(side, side).tolist() == list(range(side * side))


def test_a_smolvlm_tile_of_26_patches_a_side_is_seen_in_bfloat16_as_in_float32(tmp_path: Path) -> None:
    folder = make_tiny("smolvlm", tmp_path / "model", vision_image_size=26 * 14, vision_num_hidden_layers=1)
    wide, narrow = (load_policy(str(folder), store=MediaStore(), device="cpu", dtype=d) for d in ("float32", "bfloat16"))
    with torch.no_grad():
        for policy in (wide, narrow):  # positions that matter
            places_PH = policy.model.model.vision_model.embeddings.position_embedding.weight
            places_PH.copy_(torch.randn(places_PH.shape, generator=torch.Generator().manual_seed(1)))
        tile = TowerInput(torch.rand(1, 3 * (26 * 14) ** 2), Extent("picture", (1, 1, 13)))
        seen, seen_narrow = (policy.adapter.towers["picture"]([tile])[0].embeds_NH.float() for policy in (wide, narrow))
    assert (seen_narrow - seen).norm() < 0.02 * seen.norm()
