"""What became of each key of another trainer, and the recipe that they make together.

    data.train_batch_size=32         became        batch.prompts_per_step=32
    actor.use_kl_loss=False          no effect     there is no KL, so its coefficient and kind do nothing
    rollout.enforce_eager=False      no place      the engine captures its own CUDA graphs
    data.train_bach_size=32          unknown       verl has no such key that is known here

A framework's file has a table of rules by key, the first match counts. A rule is the recipe's key; a ``Why``; or a function
that looks at other keys, too.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from sensorium.recipe.load import check_recipe, read_recipe
from sensorium.recipe.schema import Recipe
from sensorium.recipe.traits import estimator_traits, loss_takes
from sensorium.recipe.yaml import read_yaml, write_yaml
from sensorium.vocabulary.errors import RecipeError, nearest

Kind = Literal["became", "no effect", "no place", "unknown"]
DROP = object()
"""As a value: the recipe's key is left out."""

PROMPT = 2048
"""Tokens of a prompt, where only the response is bounded."""
UNSET = re.compile(r"\$[A-Za-z_{(]")
SECRET = re.compile(r"(^|[^a-z])(api[_-]?key|wandb[_-]?key|token|secret|password)$", re.IGNORECASE)
GENERAL: dict[str, Any] = {
    "name": "migrated",
    "epochs": 1,
    "model": {"path": "", "dtype": "bfloat16", "gradient_checkpointing": True},
    "tasks": {"train": [{"source": "parquet", "options": {"path": "data/train.parquet", "columns": {"prompt": "prompt"}}}]},
    "rewards": {"terms": [{"name": "math"}]},
    "optimizer": {"lr": 1.0e-6},
}
"""Where a migration starts that belongs to none of the systems of which a recipe is shipped."""


@dataclass(frozen=True)
class Setting:
    """One key with its value, as it was given."""

    key: str
    value: Any
    line: int = 0

    @property
    def shown(self) -> str:
        """The value for the table; a secret is not shown."""
        if SECRET.search(self.key):
            return "(not shown)"
        return self.value if isinstance(self.value, str) else _plain(self.value)


@dataclass(frozen=True)
class Outcome:
    """What became of one setting: ``text`` is what it became, or why nothing."""

    setting: Setting
    kind: Kind
    text: str


@dataclass(frozen=True)
class Why:
    """A rule for keys that change nothing in a recipe."""

    kind: Kind
    text: str


Rule = str | Why | Callable[["Sheet", Setting], None]


@dataclass
class Migration:
    """The recipe's text, how it was made, and the outcomes in the order of the keys."""

    framework: str
    start: str
    text: str
    outcomes: list[Outcome]
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """What the recipe has from the shipped one, since no given key sets it."""
    recipe: Recipe | None = None
    problem: str = ""


class Sheet:
    """Settings on their way to a recipe: what each became, and what the recipe gets."""

    def __init__(self, framework: str, start: str, settings: Sequence[Setting], notes: Sequence[str] = ()) -> None:
        self.framework, self.start = framework, start
        self.settings = {setting.key: setting for setting in settings}
        """By key; of a key that was given twice the last counts, as there."""
        self.notes = list(notes)
        self.outcomes: dict[str, Outcome] = {}
        self.changed: dict[str, Any] = {}
        self.filled: set[str] = set()
        self.data: dict[str, Any] = copy.deepcopy(GENERAL) if not start else read_recipe(start)[0]
        for setting in settings:
            if setting is not self.settings[setting.key]:
                self.outcomes[f"{setting.key} (line {setting.line})"] = Outcome(setting, "no effect", "it is given again")

    def value(self, key: str, usual: Any = None) -> Any:
        """The value of a setting, or the usual one."""
        return self.settings[key].value if key in self.settings and not unset(self.settings[key].value) else usual

    def fill(self, defaults: Mapping[str, Any], first: Sequence[str] = ()) -> None:
        """Add the trainer's own defaults of keys that were left out, and put the keys first on which others depend."""
        self.filled = set(defaults) - set(self.settings)
        self.settings |= {key: Setting(key, value) for key, value in defaults.items() if key in self.filled}
        order = [key for key in first if key in self.settings]
        self.settings = {key: self.settings[key] for key in dict.fromkeys([*order, *self.settings])}

    def at(self, place: str, usual: Any = None) -> Any:
        """What the recipe has at a dotted place so far."""
        found: Any = self.data
        for part in place.split("."):
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return usual
        return found

    def put(self, place: str, value: Any) -> None:
        """Set the recipe's key, or take it out; sections that are missing are made."""
        *outer, last = place.split(".")
        target: Any = self.data
        for part in outer:
            if isinstance(target, list):
                target = target[int(part)]
            else:
                if not isinstance(target.get(part), dict | list):
                    target[part] = {} if target.get(part) is None else {"name": target[part]}
                target = target[part]
        key: Any = int(last) if isinstance(target, list) else last
        if value is DROP:
            target.pop(key, None)
        else:
            target[key] = value
        self.changed[place] = value

    def became(self, setting: Setting, changes: Mapping[str, Any], note: str = "") -> None:
        """The setting became these keys of the recipe."""
        for place, value in changes.items():
            self.put(place, value)
        shown = " ".join(f"{place}={_plain(value)}" for place, value in changes.items() if value is not DROP)
        self.outcomes[setting.key] = Outcome(setting, "became", f"{shown} ({note})" if note else shown)

    def nothing(self, setting: Setting, kind: Kind, why: str) -> None:
        """The setting changes nothing in the recipe."""
        self.outcomes[setting.key] = Outcome(setting, kind, why)

    def settle(self, rules: Mapping[str, Rule]) -> None:
        """Give every setting that has no outcome yet the one of the first rule whose pattern it matches."""
        for setting in self.settings.values():
            if setting.key in self.outcomes:
                continue
            rule = next((rule for pattern, rule in rules.items() if fnmatchcase(setting.key, pattern)), None)
            if setting.key.startswith("~"):
                self.nothing(setting, "no place", f"a recipe has no deletions; leave {setting.key[1:]} out of the command")
            elif rule is None:
                near = _nearest_key(setting.key, rules)
                self.nothing(
                    setting, "unknown", f"not known here as a key of {self.framework}; nothing was made of it{near}"
                )
            elif unset(setting.value) and not isinstance(rule, Why):
                goal = f"set {rule} yourself" if isinstance(rule, str) else "set what it means yourself"
                self.nothing(setting, "no place", f"its value is not in the file ({setting.shown}): {goal}")
            else:
                try:
                    self.apply(rule, setting)
                except (TypeError, ValueError, IndexError):  # a text where a number belongs, an empty list, and the like
                    self.nothing(setting, "no place", "its value is not one that this key has; nothing was made of it")

    def apply(self, rule: Rule, setting: Setting) -> None:
        """Give a setting the outcome that a rule has for it."""
        if isinstance(rule, str):
            self.became(setting, {rule: setting.value})
        elif isinstance(rule, Why):
            self.nothing(setting, rule.kind, rule.text)
        else:
            rule(self, setting)

    def _leave_room(self, section: str) -> None:
        """Elsewhere a response may be as long as the context and ends with it; here a prompt must fit beside it."""
        usual = self.at("rollout.max_context_tokens", 4096)
        written, context = self.at(f"{section}.max_new_tokens", 0), self.at(f"{section}.max_context_tokens", 0) or usual
        if isinstance(written, int) and isinstance(context, int) and written >= context:
            self.put(f"{section}.max_context_tokens", written + PROMPT)
            self.notes.append(
                f"{section}.max_context_tokens is {written + PROMPT}, so that a prompt of {PROMPT:,} tokens fits beside "
                f"{section}.max_new_tokens."
            )

    def _kept(self) -> list[str]:
        """Keys of the shipped recipe that nothing changed, with their values where these are short."""
        shipped = flat(read_recipe(self.start)[0]) if self.start else {}
        touched = {".".join(place.split(".")[:i]) for place in self.changed for i in range(1, place.count(".") + 2)}
        inside = tuple(f"{place}." for place in self.changed)
        same = {key: value for key, value in shipped.items() if key not in touched and not f"{key}.".startswith(inside)}
        return [key if isinstance(value, list) else f"{key}={_plain(value)}" for key, value in same.items()]

    def finish(self, named: str) -> Migration:
        """The recipe as text, checked."""
        self._leave_room("rollout")
        self._leave_room("evaluation")
        defaults = [self.outcomes.pop(key) for key in self.settings if key in self.filled]
        became = [f"{one.setting.key}={one.setting.shown}" for one in defaults if one.kind == "became"]
        if became:
            self.notes.append(f"left out, so {self.framework}'s own defaults were taken: {', '.join(became)}.")
        self.data = {key: value for key, value in self.data.items() if value != {}}
        start = f"the recipe {self.start}" if self.start else "no shipped recipe"
        text = f"# Made by sensorium migrate from {named} ({self.framework}), starting from {start}.\n" + write_yaml(
            self.data
        )
        migration = Migration(self.framework, self.start, text, list(self.outcomes.values()), self.notes, self._kept())
        try:
            migration.recipe = check_recipe(copy.deepcopy(self.data), "the migrated recipe")
        except RecipeError as error:
            migration.problem = str(error)
        return migration


def unset(value: Any) -> bool:
    """Whether a value hangs on a variable or a command of which the file does not say what it is."""
    return isinstance(value, str) and bool(UNSET.search(value))


def parsed(text: str) -> Any:
    """A value as it was meant on a command line: a number, true or false, a list, else a text."""
    try:
        return read_yaml(text, "value")[0] if text else ""
    except RecipeError:
        return text


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; lists and empty sections are values."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _nearest_key(key: str, rules: Mapping[str, Any]) -> str:
    """A suggestion for a key that is not known: one of its section first, else one much like it; or nothing."""
    section, _, last = key.rpartition(".")
    names = [rule for rule in rules if not set(rule) & set("*[")]
    beside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    near = nearest(last, beside, 0.7).partition(" Known:")[0]
    if "'" in near:
        return near.replace("'", f"'{section}." if section else "'", 1)
    near = nearest(key, names, 0.9).partition(" Known:")[0]
    return near if "'" in near else ""


def each(prefix: str, names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several keys of a section."""
    return {f"{prefix}.{name}": rule for name in names.split()}


def run_name(sheet: Sheet, setting: Setting) -> None:
    """A run's name, of letters that a folder may have."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", str(setting.value)).lstrip("._-") or "migrated"
    sheet.became(setting, {"name": name})


def scaled(place: str, off: Sequence[Any] = (None, -1)) -> Callable[[Sheet, Setting], None]:
    """A rule for counts of which some values switch off: 0 here."""

    def rule(sheet: Sheet, setting: Setting) -> None:
        sheet.became(setting, {place: 0 if setting.value in off else setting.value})

    return rule


def chosen(place: str, names: Mapping[str, Any], otherwise: str) -> Callable[[Sheet, Setting], None]:
    """A rule for names that have other ones here; those that have none get the reason ``otherwise``."""

    def rule(sheet: Sheet, setting: Setting) -> None:
        if setting.value in names:
            sheet.became(setting, {place: names[setting.value]})
        else:
            sheet.nothing(setting, "no place", otherwise)

    return rule


def feature(text: str) -> Callable[[Sheet, Setting], None]:
    """A rule for something that does not exist here: without effect where it is off, without a place where it is on."""

    def rule(sheet: Sheet, setting: Setting) -> None:
        off = setting.value in (None, False, 0, "", "null", "None", "none", "disabled") or setting.value in ([], {})
        sheet.nothing(setting, "no effect" if off else "no place", "it is off" if off else text)

    return rule


def loggers(sheet: Sheet, setting: Setting, names: Sequence[str]) -> None:
    """Loggers beside console and metrics.jsonl, which always run."""
    taken = [name for name in names if name in ("wandb", "tensorboard")]
    others = [name for name in names if name not in ("wandb", "tensorboard", "console")]
    before = [name for name in sheet.at("logging.loggers", []) if name not in taken] if sheet.framework != "verl" else []
    note = f"no place for {', '.join(others)}: only wandb and tensorboard are known" if others else ""
    sheet.became(setting, {"logging.loggers": [*before, *taken]}, note)


def choose_estimator(sheet: Sheet, setting: Setting, name: str, changes: Mapping[str, Any] | None = None) -> None:
    """Another estimator than the one that the migration starts from: settings that only that one takes go."""
    if name != sheet.at("algorithm.advantage.name"):
        sheet.put("algorithm.advantage", {"name": name})
        if not estimator_traits(name).critic:
            sheet.put("algorithm.critic", DROP)
    sheet.became(setting, {"algorithm.advantage.name": name, **(changes or {})})


def choose_loss(sheet: Sheet, setting: Setting, name: str) -> None:
    """Another loss than the one that the migration starts from: settings that this one does not take go."""
    section = sheet.at("algorithm.loss", {})
    kept = {key: value for key, value in section.items() if key == "entropy_coef" or loss_takes(name, key)}
    sheet.put("algorithm.loss", {"name": name, **{key: value for key, value in kept.items() if key != "name"}})
    sheet.became(setting, {"algorithm.loss.name": name})


def of_loss(option: str) -> Callable[[Sheet, Setting], None]:
    """A rule for a setting of the loss, which some losses do not take."""

    def rule(sheet: Sheet, setting: Setting) -> None:
        name = sheet.at("algorithm.loss.name", "clip")
        if not loss_takes(name, option):
            sheet.nothing(setting, "no effect", f"the loss {name} has no use for it")
        else:
            sheet.became(setting, {f"algorithm.loss.{option}": setting.value})

    return rule


def of_critic(place: str) -> Callable[[Sheet, Setting], None]:
    """A rule for a setting of the critic, which some estimators do not have."""

    def rule(sheet: Sheet, setting: Setting) -> None:
        name = sheet.at("algorithm.advantage.name", "grpo")
        if not estimator_traits(name).critic:
            sheet.nothing(setting, "no effect", f"the estimator {name} has no critic")
        else:
            sheet.became(setting, {place: setting.value})

    return rule


def beta(keys: Sequence[str]) -> Callable[[Sheet, Setting], None]:
    """A rule for AdamW's two betas, each a key of its own."""

    def rule(sheet: Sheet, setting: Setting) -> None:
        usual = sheet.at("optimizer.betas", [0.9, 0.999])
        betas = [sheet.value(key, value) for key, value in zip(keys, usual, strict=True)]
        sheet.became(setting, {"optimizer.betas": betas})

    return rule


def divide_batch(sheet: Sheet, setting: Setting, episodes_each: int) -> None:
    """Episodes of an update, as the number of updates that a step is divided into."""
    prompts, group = sheet.at("batch.prompts_per_step", 8), sheet.at("batch.group_size", 8)
    updates, rest = divmod(prompts * group, max(1, episodes_each))
    if rest or updates < 1 or prompts % updates:
        why = f"{prompts} x {group} episodes cannot be divided into equal updates of {episodes_each} with whole groups"
        sheet.nothing(setting, "no place", f"{why}; set batch.updates_per_epoch yourself")
    else:
        sheet.became(setting, {"batch.updates_per_epoch": updates})


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
