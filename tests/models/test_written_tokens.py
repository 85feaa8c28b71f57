"""Marks of boxes and tool calls: sampled by the engine, read as text, given in answers, and trained."""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.learner.learner import CreditedEpisode
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.vocabulary import Episode, Status, Thread, Turn, user
from tests.engines.conftest import ask, generate
from tests.families import FAMILY_ROWS, SENSING
from tests.learner.played import make_learner

CALL = ("<tool_call>", "</tool_call>", "<think>")


def with_marks(family: str, folder: Path, *, special: bool) -> Path:
    """A tiny checkpoint whose tokenizer has the marks; those of calls are special or, as in Qwen's, are not."""
    make_tiny(family, folder, vocab_size=640)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in FAMILY_ROWS[family].boxes])
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in CALL])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", SENSING)
def test_marks_that_a_checkpoint_needs_are_sampled_read_given_and_trained(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_marks(family, tmp_path / family, special=family == "internvl")
    policy = load_policy(str(folder), store=MediaStore(), device="cpu")
    names = (*FAMILY_ROWS[family].boxes, *CALL)
    ids = policy.chat.tokenizer.convert_tokens_to_ids(list(names))
    assert not set(ids) & set(policy.chat.forbidden_ids)

    text = f"see {names[0]}{{1}}{names[1]} left"
    given = policy.chat.respond(text, "given")
    assert given.text.strip() == text
    assert {ids[0], ids[1]} <= set(given.tokens)

    original, push = policy.logits, torch.zeros(policy.vocab_size)
    push[ids] = 40.0
    context = [policy.chat.render([user("what?")])]
    with monkeypatch.context() as eager:
        eager.setattr(policy, "logits", lambda hidden: original(hidden) + push)
        request = ask("a", context, Sampling(max_new_tokens=4, stop_tokens=False))
        (response,) = generate(NativeEngine(policy, record=False), request)
    written = response.segment
    assert set(written.tokens) <= set(ids)
    assert written.text == "".join(names[ids.index(token)] for token in written.tokens)

    thread = Thread((*context, written), (False, True))
    episode = Episode("a", "task", "group", 0, (thread,), (Turn(0, (), written, 0, 1),), Status.FINISHED)
    learner = make_learner(policy)
    sample = CreditedEpisode(episode, (torch.ones(len(written.tokens)),))
    before = learner.logprobs([[sample]])[0][0][0].sum()
    learner.step([[sample]])
    assert learner.logprobs([[sample]])[0][0][0].sum() > before
