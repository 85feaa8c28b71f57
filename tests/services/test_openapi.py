"""The service does what its OpenAPI description says, by schemathesis: statuses, types and content as declared, no 500."""

import schemathesis
from hypothesis import HealthCheck, settings

from sensorium.services.environment_service import make_app

from .running import make_table

schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(make_table(capacity=50)))


@schema.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_routes_are_as_they_are_described(case: schemathesis.Case) -> None:
    case.call_and_validate()
