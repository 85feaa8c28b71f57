"""Requests, responses and errors as plain data, and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sensorium.cluster.channel import error_of
from sensorium.engines.protocol import Request, Response, Sampling
from sensorium.vocabulary import errors
from sensorium.vocabulary.content import USUAL, Media
from sensorium.vocabulary.episode import MediaSpan, Segment


def plain_request(request: Request) -> dict[str, Any]:
    """A request; of a context's segments only what a model is fed."""
    return {
        "thread": request.thread,
        "context": [_plain_segment(segment) for segment in request.context],
        "sampling": asdict(request.sampling),
        "order": request.order,
        "key": request.key,
        "name": request.name,
    }


def request_of(plain: Mapping[str, Any]) -> Request:
    """The request."""
    sampling = {**plain["sampling"], "stop": tuple(plain["sampling"]["stop"])}
    context = tuple(_segment_of(segment) for segment in plain["context"])
    return Request(plain["thread"], context, Sampling(**sampling), tuple(plain["order"]), plain["key"], plain["name"])


def plain_response(thread: str, response: Response) -> dict[str, Any]:
    """What was written for a thread."""
    segment = response.segment
    return {
        "thread": thread,
        "tokens": segment.tokens,
        "logprobs": segment.logprobs,
        "sampled_logprobs": segment.sampled_logprobs,
        "finish": response.finish,
        "version": segment.policy_version,
        "versions": [[span.version, span.start, span.end] for span in response.versions],
    }


def engine_error(plain: Mapping[str, Any]) -> errors.SensoriumError:
    """The error that an engine's process told; one that is not of ours is the engine's."""
    return error_of(plain, errors.EngineError, "the engine")


def _plain_segment(segment: Segment) -> dict[str, Any]:
    media = [
        {
            "index": span.index,
            "kind": span.media.kind,
            "hash": span.media.hash,
            "origin": span.media.origin,
            "parameters": None if span.media.parameters is None else asdict(span.media.parameters),
        }
        for span in segment.media
    ]
    return {"author": segment.author, "tokens": segment.tokens, "media": media, "name": segment.name}


def _segment_of(plain: Mapping[str, Any]) -> Segment:
    spans = tuple(MediaSpan(span["index"], _media_of(span)) for span in plain["media"])
    return Segment(plain["author"], tuple(plain["tokens"]), spans, name=plain["name"])


def _media_of(plain: Mapping[str, Any]) -> Media:
    given = plain["parameters"]
    return Media(plain["kind"], plain["hash"], plain["origin"], None if given is None else USUAL[plain["kind"]](**given))
