"""Tasks of an environment that stands for another are named, and so sampled, as that one's own."""

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore


def test_isolated_tasks_have_the_names_of_the_environment_that_is_isolated() -> None:
    options = {"size": 4, "max_turns": 3}
    plain = EnvironmentTasks("frozen_lake", MediaStore(), options, size=3)
    isolated = EnvironmentTasks("isolated", MediaStore(), {"environment": "frozen_lake", "options": options}, size=3)
    assert [isolated[i].id for i in range(3)] == [plain[i].id for i in range(3)]
    assert isolated[0].metadata == plain[0].metadata
    assert isolated[0].environment is not None
    assert isolated[0].environment.name == "isolated"
