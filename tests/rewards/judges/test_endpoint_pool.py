"""Tests of how long an endpoint that fails is left alone."""

import math

import pytest

from sensorium.recipe.schema import JudgeEndpointSection
from sensorium.rewards.judges.transport import LONGEST_REST_S, Endpoint, EndpointPool


def endpoint(address: str) -> Endpoint:
    return Endpoint("grader", JudgeEndpointSection(base_url=address))


def test_one_of_two_endpoints_that_is_away_is_named_once_until_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    pool = EndpointPool(tuple(endpoint(f"http://{name}/v1") for name in ("good", "dead")))
    for _ in range(8):
        for member, act in zip(pool.members, (pool.answered, lambda member: pool.failed(member, None)), strict=True):
            pool.begin(member)
            act(member)
    said = capsys.readouterr().err
    assert said.count("http://dead/v1") == 1
    assert "http://good/v1" not in said


def test_an_endpoint_that_has_failed_for_hours_still_rests_for_a_minute() -> None:
    pool = EndpointPool(tuple(endpoint(f"http://{name}/v1") for name in "ab"))
    for _ in range(5000):
        for member in pool.members:
            pool.begin(member)
            pool.failed(member, None)
    member, seconds = pool.next()
    assert member is None
    assert math.isclose(seconds, LONGEST_REST_S, abs_tol=5)
