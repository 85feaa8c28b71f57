"""The services keep to their own OpenAPI description, whatever schemathesis sends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from sensorium.services.environment_service import make_app
from sensorium.services.model_service import make_model_app
from sensorium.systems.caprl.service import make_reward_app

from . import test_model_service, test_reward_service
from .running import make_table, serving_app

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
          "response_headers_conformance", "negative_data_rejection")  # fmt: skip


def model_app(folder: Path) -> Any:
    return make_model_app(test_model_service.make_service(folder))


def reward_app(folder: Path) -> Any:
    return make_reward_app(test_reward_service.make_service(folder, "http://127.0.0.1:9/v1"))


def environment_app(folder: Path) -> Any:
    return make_app(make_table(capacity=50))


def named(body: Any) -> Any:
    """A request for the model that there is, with short answers, so that more than the name is tried."""
    return body | {"model": "tiny", "max_tokens": 1, "max_completion_tokens": 1, "n": 1} if isinstance(body, dict) else body


@pytest.mark.parametrize("make", [environment_app, model_app, reward_app])
def test_a_service_keeps_to_its_description(make: Callable[[Path], Any], tmp_path: Path) -> None:
    import schemathesis  # takes seconds, in every worker if it stood at the top
    from schemathesis import GenerationMode, checks

    rules = [getattr(checks, name) for name in CHECKS]
    with serving_app(make(tmp_path)) as (address, _):
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        tried = []
        for found in schema.get_all_operations():
            operation = found.ok()
            tried.append(operation.label)

            @settings(max_examples=5, suppress_health_check=list(HealthCheck), deadline=None, database=None)
            @given(case=operation.as_strategy(), good=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
            def keeps(case: Any, good: Any) -> None:
                case.call_and_validate(checks=rules)
                if good.path == "/v1/chat/completions":
                    good.body = named(good.body)
                    good.call_and_validate(checks=rules[:-1])

            keeps()
        assert len(tried) >= 3
