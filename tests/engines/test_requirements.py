"""A recipe that asks for what its engine cannot do is refused before anything is sampled."""

from dataclasses import replace
from typing import Any

import pytest

from sensorium.engines.options import refuse_unable
from sensorium.engines.protocol import SAMPLING_OPTIONS, Capabilities
from sensorium.recipe.schema import EngineSection, RolloutSection
from sensorium.vocabulary.errors import RecipeError

ASKED = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ("</answer>",), "ignore_stop_tokens": True}


@pytest.mark.parametrize(("option", "value"), ASKED.items())
def test_a_sampling_option_that_the_engine_does_not_follow_is_refused_by_name(option: str, value: Any) -> None:
    section = RolloutSection(engine=EngineSection(name="mine"), **{option: value})
    refuse_unable(Capabilities(frozenset(["text"]), deterministic=True), section)
    lacking = Capabilities(frozenset(["text"]), deterministic=True, sampling=SAMPLING_OPTIONS - {option})
    refuse_unable(lacking, RolloutSection())
    with pytest.raises(RecipeError, match=rf"rollout\.{option} is .* engine 'mine' does not follow it .*rollout\.engine"):
        refuse_unable(lacking, section)


def test_lockstep_needs_an_engine_that_repeats() -> None:
    clocked = Capabilities(frozenset(["text"]), deterministic=False)
    refuse_unable(clocked, RolloutSection(schedule="eager"), lockstep=False)
    with pytest.raises(RecipeError, match=r"lockstep.*engine 'native' is not deterministic.*schedule: eager"):
        refuse_unable(clocked, RolloutSection())


def test_an_engine_is_a_name_or_a_name_with_options() -> None:
    assert RolloutSection.model_validate({"engine": "native"}).engine == EngineSection()
    whole = RolloutSection.model_validate({"engine": {"name": "my.module:Mine", "options": {"max_rows": 4}}})
    assert (whole.engine.name, whole.engine.options) == ("my.module:Mine", {"max_rows": 4})


def test_matched_precision_needs_an_engine_that_computes_as_the_learner_does() -> None:
    matched = Capabilities(frozenset(["text"]), deterministic=True, matched=True)
    refuse_unable(matched, RolloutSection(), "matched")
    with pytest.raises(RecipeError, match=r"model.precision is 'matched', and engine 'native'"):
        refuse_unable(replace(matched, matched=False), RolloutSection(), "matched")
