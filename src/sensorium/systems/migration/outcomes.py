"""The engine of ``sensorium migrate``: rules turn another trainer's settings into a recipe, with an outcome for each.

    data.train_batch_size=32         became        batch.prompts_per_step=32
    actor.use_kl_loss=False          no effect     there is no KL, so its coefficient and kind do nothing
    rollout.enforce_eager=False      no place      the engine captures its own CUDA graphs
    data.train_bach_size=32          unknown       verl has no such key that is known here

Each trainer has a table of rules by key pattern, and the first match counts. A rule is a key of the recipe, a mapping of
changes, an ``Answer``, or a function of sheet and setting that returns one of these.
"""

import copy
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from sensorium.recipe.estimators_and_losses import estimator_traits, loss_takes, loss_traits
from sensorium.recipe.load import check_recipe, read_recipe
from sensorium.recipe.schema import Recipe
from sensorium.recipe.yaml import read_yaml, write_yaml
from sensorium.vocabulary.errors import RecipeError, nearest

Kind = Literal["became", "no effect", "no place", "unknown"]
DROP = object()  # as a value: the recipe's key is left out
PROMPT = 2048  # tokens of a prompt where only the response is bounded
UNSET = re.compile(r"\$[\w{(]")
SECRET = re.compile(r"(^|[^a-z])(api[_-]?key|wandb[_-]?key|token|secret|password)$", re.IGNORECASE)
# The recipe that a migration starts from where no shipped recipe fits.
GENERAL: dict[str, Any] = {
    "name": "migrated",
    "epochs": 1,
    "model": {"path": "", "dtype": "bfloat16", "gradient_checkpointing": True},
    "tasks": {"train": [{"source": "parquet", "options": {"path": "data/train.parquet", "columns": {"prompt": "prompt"}}}]},
    "rewards": {"terms": [{"name": "math"}]},
    "optimizer": {"lr": 1.0e-6},
}


@dataclass(frozen=True)
class Setting:
    """A key with its value in the other trainer's text."""

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
    """The outcome of one setting: ``text`` is what it became, or the reason why it became nothing."""

    setting: Setting
    kind: Kind
    text: str


@dataclass(frozen=True)
class Answer:
    """The result of a rule; ``text`` is the reason, or a remark beside the changes."""

    kind: Kind
    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)


Rule = str | Mapping[str, Any] | Answer | Callable[["Sheet", Setting], Any]


@dataclass
class Migration:
    """The recipe's text and the outcomes. ``kept``: what it has from the shipped recipe, since no setting changed it.

    ``attention``: what the recipe lacks until the user adds it; these lines are in the recipe's text, too.
    """

    framework: str
    start: str
    text: str
    outcomes: list[Outcome]
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    problem: str = ""


class Sheet:
    """Settings, their outcomes, and the recipe made from them. Of a key given twice the last value counts."""

    def __init__(self, framework: str, start: str, settings: Sequence[Setting], notes: Sequence[str] = ()) -> None:
        self.framework, self.start, self.notes = framework, start, list(notes)
        self.settings = {setting.key: setting for setting in settings}
        self.attention: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self._answers: dict[str, Answer] = {}
        self._raised: dict[str, str] = {}  # places that ``finish`` changed, and why
        self.changed: set[str] = set()
        self.filled: set[str] = set()
        self.data: dict[str, Any] = read_recipe(start)[0] if start else copy.deepcopy(GENERAL)
        for setting in settings:
            if setting is not self.settings[setting.key]:
                self.outcomes[f"{setting.key} (line {setting.line})"] = Outcome(setting, "no effect", "it is given again")

    def value(self, key: str, default: Any = None) -> Any:
        return self.settings[key].value if key in self.settings and not unset(self.settings[key].value) else default

    def at(self, place: str, default: Any = None) -> Any:
        """The recipe's current value at a dotted place."""
        found: Any = self.data
        for part in place.split("."):
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return default
        return found

    def put(self, place: str, value: Any) -> None:
        """Set a key of the recipe, or remove it (``DROP``). Missing sections are created."""
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
        self.changed.add(place)

    def apply(self, rule: Rule, setting: Setting) -> None:
        """Change the recipe as a rule says, and record the outcome of the setting."""
        while callable(rule):
            rule = rule(self, setting)
        if isinstance(rule, str):
            rule = {rule: setting.value}
        answer = rule if isinstance(rule, Answer) else Answer("became", "", rule)
        changes = {place: _as_text(place, value) for place, value in answer.changes.items()}
        answer = replace(answer, changes=changes)
        wrong = [place for place, value in changes.items() if _is_wrong(place, value)]
        if wrong:
            answer = no_place(f"{wrong[0]} cannot be {_plain(changes[wrong[0]])}; it was ignored")
        for place, value in answer.changes.items():
            self.put(place, value)
        self._answers[setting.key] = answer
        self.outcomes[setting.key] = Outcome(setting, answer.kind, _described(answer.changes, answer.text))

    def _final(self, outcome: Outcome) -> Outcome:
        """The outcome with the values that the recipe has at the end, where a later key changed them."""
        answer = self._answers.get(outcome.setting.key)
        if answer is None or outcome is not self.outcomes.get(outcome.setting.key):
            return outcome
        given = {place: value for place, value in answer.changes.items() if value is not DROP}
        now = {place: self.at(place, DROP) for place in given}
        if now == given:
            return outcome
        why = [self._raised.get(place, "another key changes it") for place in given if now[place] != given[place]]
        if all(value is DROP for value in now.values()):
            return Outcome(outcome.setting, "no effect", why[0])
        return Outcome(
            outcome.setting, answer.kind, _described(now, "; ".join(dict.fromkeys(filter(None, [answer.text, *why]))))
        )

    def settle(
        self, rules: Mapping[str, Rule], first: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Apply the first matching rule to every setting without an outcome.

        ``first``: keys that others depend on. ``defaults``: the trainer's own values of keys that were left out.
        """
        defaults = defaults or {}
        self.filled = set(defaults) - set(self.settings)
        self.settings |= {key: Setting(key, value) for key, value in defaults.items() if key in self.filled}
        order = dict.fromkeys([*(key for key in first if key in self.settings), *self.settings])
        self.settings = {key: self.settings[key] for key in order}
        for key, setting in self.settings.items():
            if key in self.outcomes:
                continue
            rule = next((rule for pattern, rule in rules.items() if fnmatchcase(key, pattern)), None)
            if key.startswith("~"):
                rule = no_place(f"a recipe has no deletions; leave {key[1:]} out of the command")
            elif rule is None:
                near = _nearest_key(key, rules)
                rule = Answer("unknown", f"not known here as a key of {self.framework}; it was ignored{near}")
            elif unset(setting.value) and not isinstance(rule, Answer):
                goal = f"set {rule} yourself" if isinstance(rule, str) else "set what it means yourself"
                rule = no_place(f"its value is not in the file ({setting.shown}): {goal}")
            try:
                self.apply(rule, setting)
            except (TypeError, ValueError, IndexError):  # a text instead of a number, an empty list, and the like
                self.apply(no_place("this key cannot have such a value; it was ignored"), setting)

    def finish(self, named: str, model_key: str = "") -> Migration:
        """The migration with the recipe checked. ``model_key``: the trainer's key of the model."""
        if not self.at("model.path"):
            self.put("model.path", "MODEL")
            given = self.settings.get(model_key)
            why = f"{model_key} is {given.shown}, whose value is not in the file" if given else f"no {model_key} was given"
            self.notes.append(f"{why}: model.path is MODEL, a placeholder.")
        for section in ("rollout", "evaluation"):
            # Elsewhere a response may fill the context and ends with it; here a prompt must fit beside it.
            context = self.at(f"{section}.max_context_tokens", 0) or self.at("rollout.max_context_tokens", 4096)
            response = self.at(f"{section}.max_new_tokens", 0)
            if isinstance(response, int) and isinstance(context, int) and response >= context:
                key, tokens = f"{section}.max_context_tokens", response + PROMPT
                self.put(key, tokens)
                self._raised[key] = f"raised from {context}: room for a prompt of {PROMPT:,} tokens"
                self.notes.append(
                    f"{key} is {tokens}, not {context}: room for a prompt of {PROMPT:,} tokens beside "
                    f"{section}.max_new_tokens."
                )
        self.outcomes = {key: self._final(outcome) for key, outcome in self.outcomes.items()}
        defaults = [self.outcomes.pop(key) for key in self.settings if key in self.filled]
        taken = [f"{one.setting.key}={one.setting.shown}" for one in defaults if one.kind == "became"]
        if taken:
            self.notes.append(f"left out, so {self.framework}'s own defaults are used: {', '.join(taken)}.")
        data = {key: value for key, value in self.data.items() if value != {}}
        start = f"the recipe {self.start}" if self.start else "no shipped recipe"
        head = f"# Made by sensorium migrate from {named} ({self.framework}), starting from {start}.\n"
        for one in self.attention:
            words = " ".join(one.split())  # no line of it may leave the comment
            head += textwrap.fill(f"ATTENTION: {words}", 118, initial_indent="# ", subsequent_indent="# ") + "\n"
        shipped = flat(read_recipe(self.start)[0]) if self.start else {}
        touched = {".".join(place.split(".")[:i]) for place in self.changed for i in range(1, place.count(".") + 2)}
        inside = tuple(f"{place}." for place in self.changed)
        kept = [
            key if isinstance(value, list) else f"{key}={_plain(value)}"
            for key, value in shipped.items()
            if key not in touched and not f"{key}.".startswith(inside)
        ]
        outcomes = list(self.outcomes.values())
        migration = Migration(
            self.framework, self.start, head + write_yaml(data), outcomes, self.notes, kept, self.attention
        )
        try:
            migration.recipe = check_recipe(copy.deepcopy(data), "the migrated recipe")
        except RecipeError as error:
            migration.problem = str(error)
        return migration


def _described(changes: Mapping[str, Any], remark: str) -> str:
    text = " ".join(f"{place}={_plain(value)}" for place, value in changes.items() if value is not DROP)
    return f"{text} ({remark})" if text and remark else text or remark


def _as_text(place: str, value: Any) -> Any:
    """A number that was given for a name, such as a project called 2024, as a text; other values as they are."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number and _is_wrong(place, value) and not _is_wrong(place, str(value)) else value


def _is_wrong(place: str, value: Any) -> bool:
    """Whether a plain key of the recipe cannot have such a value: a text where a number belongs."""
    if value is DROP:
        return False
    kind: Any = Recipe
    for part in place.split("."):
        sections = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
        if get_origin(kind) in (tuple, list, dict) or not sections or part not in sections[0].model_fields:
            return False
        kind = sections[0].model_fields[part].annotation
    if not _is_plain(kind):
        return False
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return True
    return False


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) is Literal or kind is Ellipsis or kind in (int, float, bool, str, type(None)):
        return True
    return bool(get_args(kind)) and all(map(_is_plain, get_args(kind)))


def unset(value: Any) -> bool:
    """Whether a value depends on a variable or command that the file does not define."""
    return isinstance(value, str) and bool(UNSET.search(value))


def parsed(text: str) -> Any:
    """A value of a command line: a number, true or false, a list, else a text."""
    try:
        return read_yaml(text, "value")[0] if text else ""
    except RecipeError:
        return text


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
    """A similar key, first of the same section, as a suggestion; else nothing."""
    section, _, last = key.rpartition(".")
    names = [rule for rule in rules if not set(rule) & set("*[")]
    beside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    near = nearest(last, beside, 0.7).partition(" Known:")[0]
    if "'" in near:
        return near.replace("'", f"'{section}." if section else "'", 1)
    near = nearest(key, names, 0.9).partition(" Known:")[0]
    return near if "'" in near else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(rules: Mapping[str, Any]) -> dict[str, Rule]:
    """Rules by key. A key may be several names with spaces between; one that ends with "." or "--" opens a section."""
    found: dict[str, Rule] = {}
    for key, rule in rules.items():
        if key.endswith((".", "--")):
            found |= {f"{key}{name}": inner for name, inner in table(rule).items()}
        else:
            found |= dict.fromkeys(key.split(), rule)
    return found


def no_effect(text: str) -> Answer:
    """The setting changes nothing here."""
    return Answer("no effect", text)


def no_place(text: str) -> Answer:
    """A recipe has no key for the setting."""
    return Answer("no place", text)


def feature(text: str) -> Rule:
    """Something that does not exist here: without effect where it is off, without a place where it is on."""

    def rule(sheet: Sheet, setting: Setting) -> Rule:
        off = setting.value in (None, False, 0, "", "null", "None", "none", "disabled") or setting.value in ([], {})
        return no_effect("it is off") if off else no_place(text)

    return rule


def switch(on: Rule, off: str) -> Rule:
    """A rule for values that are true; others have no effect for the reason ``off``."""
    return lambda sheet, setting: on if setting.value else no_effect(off)


def where(key: str, rule: Rule, otherwise: str, default: bool = True, wanted: bool = True) -> Rule:
    """A rule that counts where another setting is on (``wanted``) or off. ``default``: its state if it is not given."""
    return lambda sheet, setting: rule if bool(sheet.value(key, default)) is wanted else no_effect(otherwise)


def where_evaluated(rule: Rule, otherwise: Answer) -> Rule:
    """A rule for settings of evaluation, which have no use where a recipe holds nothing out."""
    return lambda sheet, setting: rule if sheet.at("tasks.evaluate") else otherwise


def count(place: str) -> Rule:
    """A rule for counts that null, false and -1 switch off: 0 here."""
    return lambda sheet, setting: {place: 0 if setting.value in (None, False, -1) else setting.value}


def chosen(place: str, names: Mapping[str, Any] | Collection[str], otherwise: str) -> Rule:
    """A rule for names that have a counterpart here; others get the reason ``otherwise``."""
    table = names if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    return lambda sheet, setting: {place: table[setting.value]} if setting.value in table else no_place(otherwise)


def of_loss(option: str) -> Rule:
    """A rule for an option of the loss, which some losses do not take."""

    def rule(sheet: Sheet, setting: Setting) -> Rule:
        name = sheet.at("algorithm.loss.name", "clip")
        return f"algorithm.loss.{option}" if loss_takes(name, option) else no_effect(f"the loss {name} does not use it")

    return rule


def of_critic(place: str) -> Rule:
    """A rule for a setting of the critic, which some estimators do not have."""

    def rule(sheet: Sheet, setting: Setting) -> Rule:
        name = sheet.at("algorithm.advantage.name", "grpo")
        critic = estimator_traits(name).critic
        return f"algorithm.critic.{place}" if critic else no_effect(f"the estimator {name} has no critic")

    return rule


def choose_estimator(sheet: Sheet, name: str) -> Rule:
    """Changes to another estimator: options that only the former takes are dropped."""
    if name == sheet.at("algorithm.advantage.name"):
        return {"algorithm.advantage.name": name}
    sheet.put("algorithm.advantage", {"name": name})
    if not estimator_traits(name).critic:
        sheet.put("algorithm.critic", DROP)
    return {"algorithm.advantage.name": name}


def choose_loss(sheet: Sheet, name: str) -> Rule:
    """Changes to another loss: options that it does not take are dropped."""
    options = sheet.at("algorithm.loss", {}).items()
    taken = {key: value for key, value in options if key != "name" and (key == "entropy_coef" or loss_takes(name, key))}
    sheet.put("algorithm.loss", {"name": name, **taken})
    return {"algorithm.loss.name": name}


def aggregate(sheet: Sheet, mode: str) -> Rule:
    """How the loss sums tokens, where the loss allows it."""
    name = sheet.at("algorithm.loss.name", "clip")
    allowed = loss_traits(name).aggregations
    if allowed and mode not in allowed:
        return no_place(f"the loss {name} is defined over whole sequences: {allowed[0]}")
    return {"algorithm.loss.aggregation": mode}


def beta(keys: Sequence[str]) -> Rule:
    """A rule for AdamW's two betas, each a key of its own."""

    def rule(sheet: Sheet, setting: Setting) -> Rule:
        defaults = sheet.at("optimizer.betas", [0.9, 0.999])
        return {"optimizer.betas": [sheet.value(key, value) for key, value in zip(keys, defaults, strict=True)]}

    return rule


def divide_batch(sheet: Sheet, episodes: int) -> Rule:
    """Episodes of an update, as the number of updates that a step is divided into."""
    prompts, group = sheet.at("batch.prompts_per_step", 8), sheet.at("batch.group_size", 8)
    updates, rest = divmod(prompts * group, max(1, episodes))
    if rest or updates < 1 or prompts % updates:
        why = f"{prompts} x {group} episodes cannot be divided into equal updates of {episodes} with whole groups"
        return no_place(f"{why}; set batch.updates_per_epoch yourself")
    return {"batch.updates_per_epoch": updates}


def name_engine(sheet: Sheet, setting: Setting) -> Rule:
    """The engine that samples. A shipped recipe keeps its own, with which it was tried."""
    if setting.value != "vllm":
        return no_place("the engines here are native and vllm: rollout.engine")
    if sheet.start:
        return no_place(f"the recipe {sheet.start} samples with the native engine; rollout.engine=vllm samples with vLLM")
    note = "needs the package vllm; without this key the native engine samples"
    return Answer("became", note, {"rollout.engine.name": "vllm"})


def of_vllm(option: str) -> Rule:
    """A rule for an option of vLLM, where it samples."""
    place = f"rollout.engine.options.{option}"
    native = no_place(f"the native engine decides it; with rollout.engine=vllm: {place}")
    return lambda sheet, setting: place if sheet.at("rollout.engine.name") == "vllm" else native


def own_reward(sheet: Sheet, setting: Setting, name: str) -> Rule:
    """A reward function of the user's own, ``name`` here: the recipe lacks it until they name it."""
    if not setting.value:
        return no_effect("it is off")
    names = " and ".join(term["name"] for term in sheet.at("rewards.terms", []))
    module, _, function = name.rpartition(":")
    sheet.attention.append(
        f"the reward of this recipe is {names}, and lacks your own function ({setting.key}={setting.shown}). Write it as "
        f"def {function}(task, episode), which returns a number, in the module {module} beside the recipe, and name it "
        f'under rewards.terms: {{name: "{name}"}} (docs/reference/rewards.md, "Your own").'
    )
    return no_place("missing in the recipe's reward until you add it under rewards.terms: see ATTENTION")


def overlong(sheet: Sheet, option: str, options: Mapping[str, Any]) -> Rule:
    """The reward term overlong, added once; ``option`` is the one that the setting is (empty: it switches the term on)."""
    terms = sheet.at("rewards.terms", [])
    place = next((i for i, term in enumerate(terms) if term["name"] == "overlong"), len(terms))
    if place == len(terms):
        sheet.put("rewards.terms", [*terms, {"name": "overlong", "options": dict(options)}])
    at = f"rewards.terms.{place}"
    return {f"{at}.options.{option}": options[option]} if option else {f"{at}.name": "overlong"}


def rows_source(path: str) -> str:
    """The source that reads a file of rows."""
    return "jsonl" if path.endswith((".jsonl", ".json")) else "parquet"


def run_name(sheet: Sheet, setting: Setting) -> Rule:
    """A run's name, with characters that a folder may have."""
    return {"name": re.sub(r"[^A-Za-z0-9._-]+", "_", str(setting.value)).lstrip("._-") or "migrated"}


LOGGERS = ("wandb", "tensorboard", "mlflow", "trackio")


def loggers(sheet: Sheet, names: Sequence[str], add: bool = True) -> Rule:
    """Loggers beside console and metrics.jsonl, which always run. ``add``: to those of the recipe."""
    taken = [name for name in names if name in LOGGERS]
    others = [name for name in names if name not in (*LOGGERS, "console")]
    before = [name for name in sheet.at("logging.loggers", []) if name not in taken] if add else []
    note = f"no place for {', '.join(others)}: {', '.join(LOGGERS)} are known" if others else ""
    return Answer("became", note, {"logging.loggers": [*before, *taken]})


# Reasons that several trainers' tables give.
CLUSTER = no_place("GPUs are divided by the section cluster (docs/guides/scale_out.md)")
ENGINE = no_place("the engine decides it here; rollout.engine=vllm has options (docs/guides/engines.md)")
MICRO = no_place("micro-batches are packed by tokens here: batch.tokens_per_microbatch")
PACKED = no_effect("sequences are always packed without padding here")
ADAMW = no_effect("AdamW is the optimizer")
TEMPLATE = feature("the model's template is applied as it is")
TERMS = no_place("reward terms are named under rewards.terms (docs/reference/rewards.md)")
SAMPLED = no_place("held-out tasks are sampled with the rollout's top_p and top_k")
STORED = no_effect("a checkpoint always holds the model, the optimizer and the run's state")
SCHEDULE = chosen(
    "optimizer.schedule", ["constant", "linear", "cosine"], "optimizer.schedule is constant, linear or cosine"
)
