"""Old names of modules that users may import: importing one gives the names of the module it became, with a warning.

``from sensorium.media.store import MediaStore`` works as ``from sensorium.data.media_store import MediaStore`` does.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "algorithms.aggregation": "algorithms.losses",
    "algorithms.channels": "algorithms.advantages",
    "algorithms.episodes": "algorithms.advantages",
    "algorithms.groups": "algorithms.advantages",
    "algorithms.ratio": "algorithms.losses",
    "algorithms.tokens": "algorithms.losses",
    "engines.native.engine": "engines.native.native_engine",
    "envs.tools.protocol": "envs.tool_use",
    "judges.forms": "rewards.judges.answer_forms",
    "judges.request": "rewards.judges.judgements",
    "media.decoder": "data.decoder",
    "media.making": "data.made_media",
    "media.picture": "data.pictures",
    "media.store": "data.media_store",
    "models.checkpoint_place": "models.checkpoint_path",
    "record.episode_json": "runs.episodes",
    "record.metrics": "runs.metrics",
    "recipe.names": "recipe.registry",
    "recipe.traits": "recipe.estimators_and_losses",
    "rewards.protocol": "rewards.reward_term",
    "rewards.judges.request": "rewards.judges.judgements",
    "tasks.daily_omni": "systems.audio_visual.sources",
    "tasks.lookalikes": "systems.audio_visual.generated",
    "tasks.memory_clips": "systems.taskmem.memory_clips",
    "tasks.mixture": "data.mixture",
    "tasks.planner": "data.planner",
    "tasks.shapes": "data.shapes",
    "tasks.source": "data.mixture",
    "vocabulary.score": "vocabulary.episode",
    "trainer.taskmem_layout": "systems.taskmem.layout",
}
"""Those that docs, examples and tutorials of earlier versions name."""
OLD = {f"sensorium.{old}": f"sensorium.{new}" for old, new in MOVED.items()}
PARENTS = {old.rpartition(".")[0] for old in OLD}


class _OldNames(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an old name, or for a package that is no more and had one in it."""
        if fullname in OLD or fullname in PARENTS:
            return ModuleSpec(fullname, self, is_package=fullname in PARENTS)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the old module the names of the new one."""
        if new := OLD.get(module.__name__):
            warnings.warn(f"{module.__name__} is {new} now; import it from there.", DeprecationWarning, stacklevel=2)
            names = {name: value for name, value in vars(import_module(new)).items() if not name.startswith("__")}
            vars(module).update(names)


def install() -> None:
    """Let old names be imported. They are looked for only where nothing else is found."""
    sys.meta_path.append(_OldNames())
