"""What clients of a reward service send, told apart by its shape, and what they expect back.

    CapRL qa         {"prompts": [[caption, [[question_block, "B"], …]], …], "query": [], "labels": []}
    CapRL vl_judge   {"score_mode": "vl_judge", "samples": [{"caption", "video_path"}]}
    OpenRLHF         {"query": [prompt + response], "prompts": [prompt], "labels": [questions, or {"video_path"}]}
    Sensorium        {"items": [{"caption", "questions" or "picture" or "video"}], "mode": "qa"}

The first three answer with lists of numbers, which cannot say that an item was not judged: such a request fails as a whole
(``error``, with 400 if only the request is at fault, else 500), and what was judged of it is cached, so that a second try
asks for the rest only. A service that is
told a number for what is missing puts it there instead, and counts it. Ours has null and a reason for each item, and with
``"transcripts": true`` what was asked about each and answered (``rewards/service_transcripts.py``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sensorium.rewards.service_transcripts import ServiceAnswer, transcript_json
from sensorium.rewards.timestamps import timestamp_format
from sensorium.services.application import Json, Refusal
from sensorium.vocabulary.caption_questions import CaptionQuestion, question_of, question_of_block

Mode = Literal["qa", "vl_judge"]
Protocol = Literal["sensorium", "caprl_qa", "caprl_vl_judge", "openrlhf"]
ASSISTANT = "<|im_start|>assistant\n"
ENDS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
MOST_ITEMS = 4096
MOST_QUESTIONS = 1024
"""Of one caption: each may be a call of a reader, and who asks more than this keeps all others waiting."""


@dataclass(frozen=True)
class CaptionItem:
    """One caption to be judged: by questions, or beside its picture or video. ``problem`` says why it cannot be."""

    caption: str
    questions: tuple[CaptionQuestion, ...] = ()
    picture: str = ""
    video: str = ""
    problem: str = ""


@dataclass(frozen=True)
class CaptionScore:
    """What an item was judged: a value with its parts, or None and why; ``refused``: because of what was sent."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    transcript: tuple[ServiceAnswer, ...] = ()
    refused: bool = False


@dataclass(frozen=True)
class RewardRequest:
    """A request as the service works on it, and the protocol in which it is answered."""

    protocol: Protocol
    mode: Mode
    items: tuple[CaptionItem, ...]
    transcripts: bool = False


def request_of(body: Any, usual: Mode) -> RewardRequest:
    """A request by its shape; Refusal if it has none of the four. ``usual`` is the mode where it names none."""
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is an object; docs/services.md has the four forms.")
    mode = body.get("score_mode", body.get("mode")) or usual
    if mode not in ("qa", "vl_judge"):
        raise Refusal(400, f"there is no score_mode {mode!r:.40}; there are qa and vl_judge.")
    if "items" in body:
        told = body.get("transcripts", False)
        if not isinstance(told, bool):
            raise Refusal(400, f"'transcripts' is true or false, not {told!r:.40}.")
        return RewardRequest("sensorium", mode, _items(body["items"], "items", lambda raw: _own(raw, mode)), told)
    if "samples" in body:
        return RewardRequest(
            "caprl_vl_judge", "vl_judge", _items(body["samples"], "samples", lambda raw: _own(raw, "vl_judge"))
        )
    if not any(name in body for name in ("prompts", "query", "labels")):
        held = ", ".join(map(str, body))[:80] or "nothing"
        raise Refusal(400, f"the body has none of items, samples, prompts and query; it has {held}.")
    prompts = _listed(body.get("prompts", []), "prompts")
    if any(isinstance(prompt, Sequence) and not isinstance(prompt, str) for prompt in prompts):
        return RewardRequest("caprl_qa", "qa", _items(prompts, "prompts", _pair))
    query, labels = _listed(body.get("query", []), "query"), _listed(body.get("labels", []), "labels")
    if not (len(query) == len(prompts) == len(labels)):
        counts = f"{len(query)} query, {len(prompts)} prompts and {len(labels)} labels"
        raise Refusal(400, f"OpenRLHF's form has as many of each: these are {counts}.")
    rows = list(zip(query, prompts, labels, strict=True))
    return RewardRequest("openrlhf", mode, tuple(_openrlhf(*row, mode) for row in rows))


def reply_of(request: RewardRequest, scores: Sequence[CaptionScore], format_weight: float, missing: float | None) -> Json:
    """The scores in the request's protocol. Refusal (400 or 500) where it has no way to report a missing one."""
    if request.protocol == "sensorium":
        return {"results": [_result(score, len(scores) if request.transcripts else 0) for score in scores]}
    if not scores:
        return {"rewards": []}
    lost = [(place, score) for place, score in enumerate(scores) if score.value is None]
    if lost and missing is None:
        told = "; ".join(f"item {place}: {score.reason}" for place, score in lost[:3])
        status = 400 if all(score.refused for _, score in lost) else 500
        raise Refusal(status, f"{len(lost)} of {len(scores)} items were not judged, which is no score of 0: {told}")
    values = [missing if score.value is None else score.value for score in scores]
    if request.protocol == "caprl_vl_judge":
        return {"rewards": values, "judge_rewards": values}
    formats = [timestamp_format(item.caption) for item in request.items] if format_weight else []
    paid = [_sum(value, format_weight, place) for value, place in zip(values, formats, strict=True)] if formats else values
    if request.protocol == "caprl_qa":
        return {"rewards": paid, "qa_rewards": values, **({"format_rewards": formats} if formats else {})}
    judged = [set(score.parts) for score in scores if score.value is not None]
    names = sorted(set.intersection(*judged)) if judged else []  # a part that an item does not have is no 0
    logs = {name: [missing if score.value is None else float(score.parts[name]) for score in scores] for name in names}
    extra = {**logs, f"{request.mode}_rewards": values, **({"format_rewards": formats} if formats else {})}
    return {"rewards": paid, "scores": values, "extra_logs": extra}


def _result(score: CaptionScore, transcripts: int) -> Json:
    """An item's result, with its transcript where the reply holds any."""
    told = transcript_json(score.transcript, transcripts) if transcripts else {}
    return {"score": score.value, "parts": dict(score.parts), "reason": score.reason, **told}


def _sum(value: float | None, weight: float, formatted: float) -> float | None:
    return None if value is None else value + weight * formatted


def _items(raw: Any, name: str, read: Any) -> tuple[CaptionItem, ...]:
    return tuple(read(one) for one in _listed(raw, name))


def _listed(raw: Any, name: str) -> list[Any]:
    if not isinstance(raw, list):
        raise Refusal(400, f"'{name}' is a list.")
    if len(raw) > MOST_ITEMS:
        raise Refusal(413, f"'{name}' has {len(raw)} entries; send at most {MOST_ITEMS} at once.")
    return raw


def _pair(raw: Any) -> CaptionItem:
    """``[caption, [[question_block, letter], …]]``."""
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str) or not isinstance(raw[1], list):
        return CaptionItem("", problem=f"an entry of prompts is [caption, [[question, letter], …]], not {raw!r:.80}")
    return _asked(raw[0], [_block(one) for one in raw[1]])


def _own(raw: Any, mode: Mode) -> CaptionItem:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("caption"), str):
        return CaptionItem("", problem=f"an item is an object with a 'caption', not {raw!r:.80}")
    return _labelled(raw["caption"], raw, mode)


def _openrlhf(query: Any, prompt: Any, label: Any, mode: Mode) -> CaptionItem:
    if not isinstance(query, str) or not isinstance(prompt, str):
        return CaptionItem("", problem="query and prompts are lists of texts")
    caption = response_in(query, prompt)
    if caption is None:
        return CaptionItem("", problem="the query does not begin with its prompt, and has no assistant's turn to cut at")
    return _labelled(caption, label, mode)


def response_in(query: str, prompt: str) -> str | None:
    """The response in a query, which is prompt and response decoded with special tokens; None if it cannot be found.

    Where the prompt's placeholders were expanded, the query does not begin with it; then the response is what follows as
    many assistant turns as the prompt has. A response cannot add to these.
    """
    if query.startswith(prompt):
        found = query[len(prompt) :]
    else:
        turns = prompt.count(ASSISTANT)
        parts = query.split(ASSISTANT, turns)
        if not turns or len(parts) <= turns:
            return None
        found = parts[-1]
    changed = True
    while changed:
        found, before = found.rstrip(), found
        for end in ENDS:
            found = found.removesuffix(end)
        changed = found != before
    return found


def _labelled(caption: str, label: Any, mode: Mode) -> CaptionItem:
    """A caption with what it is judged by: a list of questions, or an object with them or with a picture or video."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            label = {"video_path": label} if mode == "vl_judge" else None
    held = {"questions": label} if isinstance(label, list) else label
    if not isinstance(held, Mapping):
        return CaptionItem(caption, problem=f"its label says nothing to judge it by: {label!r:.80}")
    if mode == "vl_judge":
        video, picture = held.get("video_path", held.get("video")), held.get("image_path", held.get("picture"))
        if isinstance(video, str) and video:
            return CaptionItem(caption, video=video)
        if isinstance(picture, str) and picture:
            return CaptionItem(caption, picture=picture)
        return CaptionItem(caption, problem="it has neither a video nor a picture, and is not judged without")
    questions = held.get("questions", held.get("ground_truth"))
    if not isinstance(questions, list):
        return CaptionItem(caption, problem="it has no questions")
    return _asked(caption, [_block(one) if isinstance(one, list) else _question(one) for one in questions])


def _question(raw: Any) -> CaptionQuestion | str:
    try:
        return question_of(raw)
    except ValueError as error:
        return str(error)


def _block(raw: Any) -> CaptionQuestion | str:
    if not isinstance(raw, list) or len(raw) != 2:
        return f"a question is [text with its options, letter], not {raw!r:.80}"
    try:
        return question_of_block(*raw)
    except ValueError as error:
        return str(error)


def _asked(caption: str, questions: Sequence[CaptionQuestion | str]) -> CaptionItem:
    if len(questions) > MOST_QUESTIONS:
        return CaptionItem(caption, problem=f"it has {len(questions)} questions; a caption has at most {MOST_QUESTIONS}")
    problems = [question for question in questions if isinstance(question, str)]
    good = tuple(question for question in questions if isinstance(question, CaptionQuestion))
    if problems or not good:
        return CaptionItem(caption, problem=problems[0] if problems else "it has no questions")
    return CaptionItem(caption, good)
