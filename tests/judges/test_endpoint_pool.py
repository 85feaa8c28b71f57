"""Tests of how long an endpoint that fails is left alone."""

import math

from sensorium.judges.endpoint_pool import LONGEST_REST_S, EndpointPool
from sensorium.judges.endpoints import Endpoint


def test_an_endpoint_that_has_failed_for_hours_still_rests_for_a_minute() -> None:
    pool = EndpointPool(tuple(Endpoint("grader", "grader", f"http://{name}/v1") for name in "ab"))
    for _ in range(5000):
        for member in pool.members:
            pool.begin(member)
            pool.failed(member, None)
    member, seconds = pool.next()
    assert member is None
    assert math.isclose(seconds, LONGEST_REST_S, abs_tol=5)
