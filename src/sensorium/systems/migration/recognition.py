"""Recognises the trainer of a text (shell script, command, Python run script or YAML file) and reads its settings.

bash run.sh data.train_batch_size=32 actor_rollout_ref.rollout.n=8      → verl
CAPTION_MODEL=/m DATASET=d.jsonl bash scripts/train_caprl.sh            → caprl
python3 train.py --hf-checkpoint /m --rollout-batch-size 64             → slime
grpo: {num_prompts_per_step: 32}                                        → nemo_rl

Of shell scripts, their commands with words and variables are read:

    export N=8                                      → variables {"N": "8"}
    ARGS=(--n $N                                    → arrays {"ARGS": ["--n", "8"]}
          # a comment
          --lr ${LR:-1e-6})
    python train.py "${ARGS[@]}" \\                → Command(["python", "train.py", "--n", "8", "--lr", "1e-6", "a.b=1"])
        a.b=1

Nothing is run. The first branch of an ``if`` is taken, and a loop's body is read once; notes report both. A variable
that the script does not set and the output of a command stay as they are written: ``$NAME``, ``$(command)``.
"""

import ast
import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sensorium.recipe.registry import import_system
from sensorium.recipe.yaml import read_yaml
from sensorium.systems.migration.outcomes import Migration, Outcome, Setting, parsed
from sensorium.vocabulary.errors import RecipeError

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
BRACKETS = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\))*+\)"
BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
REFERENCE = rf"\$(?:{BRACKETS}|{BRACES}|\w+|[@*#?$!-])?+"
# Parts of a word: 'text', "text", a reference, `command`, an escaped character, plain text.
PARTS = rf"""'[^']*+'?|"(?:\\.|{REFERENCE}|[^"\\$])*+"?|{REFERENCE}|`[^`]*+`?|\\.?"""
PART = re.compile(rf"""{PARTS}|[^'"`$\\]+""", re.DOTALL)
QUOTED_PART = re.compile(rf"""\\["\\$`\n]|{REFERENCE}|[^$\\]+|\\""", re.DOTALL)
ARRAY_ITEMS = re.compile(r"\$\{?(\w+)\[[@*]\]\}?")
TOKEN = re.compile(
    rf"""(?P<skipped>\\\n|[^\S\n]+|\#[^\n]*+|[0-9]?>&[0-9-])|<<-?\s*(?P<quote>['"]?)(?P<here>\w+)(?P=quote)
    |(?P<operator>\n|&&|\|\||;;|&>>?|[0-9]?>>|<<<|[0-9]?>|<|[;|&()])
    |(?P<word>[A-Za-z_]\w*\+?=\((?:(?<=\s)\#[^\n]*+|{PARTS}|\((?:[^()])*+\)|[^()])*+\)?
    |(?:{PARTS}|[^'"`$\\\s;|&()<>])++)""",
    re.DOTALL | re.VERBOSE,
)
PASSED_ON = ("$@", "$*", "${@}", "${@:1}")
OF_THE_MACHINE = ("HOME", "USER", "PWD")  # variables read from this process; others may hold secrets
OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command's words after expansion, the variables set for it alone, and its line."""

    words: tuple[str, ...]
    line: int
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Token:
    """A word as it is written, or an operator."""

    text: str
    line: int
    word: bool


class Script:
    """The commands of a script, its variables and arrays.

    ``used``: arrays that a command or another array uses. ``exported``: names that it exports, with their lines.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.used: set[str] = set()
        self.exported: dict[str, int] = {}
        self.notes: list[str] = []
        self._branches: list[tuple[str, int]] = []
        self._case = 0
        statement: list[_Token] = []
        skip_next = False
        for token in _tokens(text):
            if skip_next and token.word:
                skip_next = False
            elif token.word:
                statement.append(token)
            elif token.text.strip("0123456789&") in (">", ">>", "<", "<<<"):
                skip_next = True
            else:
                skip_next = False
                self._take(statement)
                statement = []
        self._take(statement)

    def _take(self, statement: list[_Token]) -> None:
        """Read one simple command, or a keyword and the command behind it."""
        while statement:
            word, line = statement[0].text, statement[0].line
            if word in ("if", "elif"):
                before = self._branches.pop() if word == "elif" and self._branches else ("", line)
                self._branches.append(("condition" if word == "if" else "other condition", before[1]))
                return
            if word == "then" and self._branches:
                state, begin = self._branches.pop()
                self._branches.append(("taken" if state == "condition" else "left out", begin))
            elif word == "else" and self._branches:
                self._branches.append(("left out", self._branches.pop()[1]))
            elif word == "fi" and self._branches:
                _, begin = self._branches.pop()
                self.notes.append(f"lines {begin} to {line} depend on a condition: the first branch was taken")
            elif word == "case":
                self._case += 1
                self.notes.append(f"the case from line {line} on was not read: it depends on a value")
            elif word == "esac":
                self._case = max(0, self._case - 1)
            elif word in ("for", "while", "until", "select"):
                self.notes.append(f"the loop of line {line} was read once")
                return
            elif word not in ("do", "done", "{", "}", "function", "!", "time"):
                break
            statement = statement[1:]
        if statement and not self._case and all(state == "taken" for state, _ in self._branches):
            self._run(statement)

    def _run(self, statement: list[_Token]) -> None:
        line = statement[0].line
        exports = statement[0].text in ("export", "declare", "local", "readonly")
        set_here: dict[str, str] = {}
        rest = statement[1:] if exports else statement
        while rest and (found := ASSIGNED.fullmatch(rest[0].text)):
            name, how, value = found.groups()
            if value.startswith("("):
                items = [item for token in _tokens(value[1:-1]) if token.word for item in self.expand(token.text)]
                self.arrays[name] = [*(self.arrays.get(name, []) if how == "+=" else []), *items]
            else:
                set_here[name] = (self.variables.get(name, "") if how == "+=" else "") + " ".join(self.expand(value, False))
            if exports:
                self.exported[name] = rest[0].line
            rest = rest[1:]
        words = [word for token in rest for word in self.expand(token.text)]
        if exports:
            self.exported |= {word: line for word in words if word.isidentifier()}
            words = []
        if words:
            self.commands.append(Command(tuple(words), line, set_here))
        else:
            self.variables |= set_here

    def expand(self, raw: str, split: bool = True) -> list[str]:
        """The words that a written word expands to."""
        words, current, begun = [], "", False
        for part in PART.findall(raw):
            kind, text = part[0], part
            inner = part[1:-1] if len(part) > 1 and part[0] == part[-1] else part[1:]
            if kind in '"$' and (array := ARRAY_ITEMS.fullmatch(inner if kind == '"' else part)):
                words += self._items(array[1])
                continue
            if part in PASSED_ON or (kind == '"' and inner in PASSED_ON):
                note = (
                    f"the script passes on the arguments that it is started with ({part}): append them to the file if "
                    "there are any, since they are not in the table"
                )
                self.notes += [note] if note not in self.notes else []
                continue
            if kind == "$":
                value = self._value(part)
                pieces = value.split() if split and not value.startswith("$") else [value]
                if not pieces:
                    continue
                if len(pieces) > 1:
                    words += [current + pieces[0], *pieces[1:-1]]
                    current = ""
                text = pieces[-1]
            elif kind == '"':
                text = "".join(map(self._inside_quotes, QUOTED_PART.findall(inner)))
            elif kind == "`":
                text = f"$({inner})"
            elif kind in "'\\":
                text = inner
            current, begun = current + text, True
        return [*words, current] if begun or (not words and not split) else words

    def _items(self, name: str) -> list[str]:
        self.used.add(name)
        note = f"the array {name} is not set in this file; what another file puts into it is not in the table"
        if name not in self.arrays and note not in self.notes:
            self.notes.append(note)
        return self.arrays.get(name, [])

    def _inside_quotes(self, part: str) -> str:
        if part[0] == "$":
            return self._value(part)
        return part[1:].replace("\n", "") if part[0] == "\\" and len(part) > 1 else part

    def _value(self, reference: str) -> str:
        """The value of a reference; the reference itself where the script does not define it."""
        if reference.startswith("$(("):
            text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self.variables.get(name[1], name[0]), reference[3:-2])
            try:
                return str(_number(ast.parse(text.strip(), mode="eval").body))
            except (SyntaxError, ValueError, ZeroDivisionError):
                return reference
        if reference.startswith("$("):
            return reference
        found = re.fullmatch(r"\$\{?(\w+)(?:(:?[-=])(.*))?\}?", reference.removesuffix("}"), re.DOTALL)
        if found is None:
            return reference
        name, default = found[1], found[3]
        if name in self.variables and (self.variables[name] or default is None):
            return self.variables[name]
        if name in OF_THE_MACHINE and name in os.environ:
            return os.environ[name]
        if default is not None:
            return " ".join(self.expand(default, False))
        return f"${name}"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("no whole number")


def _tokens(text: str) -> Iterator[_Token]:
    """Words as they are written, and operators; without comments, line continuations and here-documents."""
    i, line = 0, 1
    here_documents: list[str] = []
    while i < len(text):
        found = TOKEN.match(text, i)
        assert found is not None, "a token is any text"
        end = found.end()
        if found["here"]:
            here_documents.append(found["here"])
        elif found["operator"]:
            yield _Token(found[0], line, False)
            while found[0] == "\n" and here_documents:
                last = re.compile(rf"^\t*{re.escape(here_documents.pop(0))}$", re.MULTILINE).search(text, end)
                end = last.end() if last else len(text)
        elif found["word"]:
            yield _Token(found[0].replace("\\\n", ""), line, True)
        line += text.count("\n", i, end)
        i = end


SECTIONED = re.compile(r"[./]|^--config-")  # a key of a configuration with sections, not a variable
# The module of each trainer has ``certainty(given)``, which is 0 for texts of others, and ``migrate(given)``.
FRAMEWORKS = {
    "caprl": "sensorium.systems.caprl.settings",
    "verl": "sensorium.systems.migration.verl",
    "nemo_rl": "sensorium.systems.audio_visual.nemo_rl_settings",
    "slime": "sensorium.systems.geo3k.slime_settings",
}
BUILTINS = (
    "set", "cd", "echo", "sleep", "true", "exit", "shift", "unset", "trap", "wait", "return", "[", "[[", "test", "ulimit",
)  # fmt: skip
# Options by which a command is recognised as slime's.
SLIME = {
    "--hf-checkpoint", "--rollout-batch-size", "--num-rollout", "--advantage-estimator", "--rollout-max-response-len",
    "--prompt-data",
}  # fmt: skip
OF_LIBRARIES = (
    "HF_", "TRANSFORMERS_", "WANDB_", "VLLM_", "NCCL_", "CUDA_", "PYTHON", "RAY_", "TOKENIZERS_", "OMP_", "TORCH",
    "PYTORCH_", "NVTE_", "GLOO_", "HYDRA_", "no_proxy", "http_proxy", "https_proxy", "HTTP_", "HTTPS_", "MASTER_",
    "SGLANG_", "HCCL_", "ASCEND_", "LD_", "PATH", "TASK_QUEUE_", "CPU_AFFINITY_", "SWANLAB_", "HYDRA", "UCX_",
    "NVSHMEM_", "XDG_", "TRITON_",
)  # fmt: skip
VARIABLES = {
    "M3_API_CONFIG": "it is read here, too: where the judges' endpoints and keys are (docs/guides/judges.md)",
    "WANDB_API_KEY": "wandb reads it itself; a recipe never holds a key",
    "CUDA_VISIBLE_DEVICES": "it is read here, too",
}


@dataclass(frozen=True)
class Given:
    """A text to migrate. ``data`` is the mapping of a YAML text; files that the text names are looked for in ``folder``."""

    text: str
    named: str
    form: Literal["yaml", "python", "script"]
    data: dict[str, Any]
    folder: Path | None

    @cached_property
    def script(self) -> "ScriptSettings":
        """The settings of a shell script."""
        return ScriptSettings(Script(self.text))


def migrate(text: str, named: str, framework: str = "", folder: Path | None = None) -> Migration:
    """The recipe of a text and the outcome of each key. Files that the text names are looked for in ``folder``."""
    if framework and framework not in FRAMEWORKS:
        raise RecipeError(f"--from is one of {', '.join(FRAMEWORKS)}, not '{framework}'.")
    if not text.strip():
        raise RecipeError(f"{named} is empty: give a script, a command line or a YAML file of another trainer.")
    data = _yaml(text, named)
    python = data is None and framework in ("", "slime") and _is_python(text, named)
    given = Given(text, named, "yaml" if data is not None else "python" if python else "script", data or {}, folder)
    trainers: list[Any] = []
    absent: list[str] = []
    for name in [framework] if framework else FRAMEWORKS:
        try:
            trainers.append(import_system(FRAMEWORKS[name], f"migrate --from {name}"))
        except RecipeError as error:
            if framework:
                raise
            absent.append(str(error))
    surest = max(trainers, key=lambda trainer: trainer.certainty(given))
    if not framework and not surest.certainty(given):
        raise RecipeError(" ".join([unrecognised(named), *absent]))
    migration: Migration = surest.migrate(given)
    migration.notes += absent
    if given.form == "script":
        migration.outcomes += given.script.other_outcomes([outcome.setting for outcome in migration.outcomes])
    return migration


class ScriptSettings:
    """Overrides (a.b=c), options (--a b) and variables of a script, and commands that hold none of them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.overrides: list[Setting] = []
        self.options: list[Setting] = []
        self.others: list[Command] = []
        exported = script.exported.items()
        self.variables = [Setting(name, script.variables.get(name, f"${name}"), line) for name, line in exported]
        for command in script.commands:
            self.variables += [Setting(name, value, command.line) for name, value in command.variables.items()]
            self._take(command)
        known = {*script.exported, *(setting.key for setting in self.variables)}
        bare = not self.overrides and not self.options
        for name, value in script.variables.items():
            if name not in known and (name.startswith("SLIME_SCRIPT_") or (bare and name.isupper())):
                self.variables.append(Setting(name, value))

    @cached_property
    def roots(self) -> set[str]:
        """The sections that overrides are in: data of data.train_batch_size."""
        return {setting.key.partition(".")[0] for setting in self.overrides}

    @cached_property
    def names(self) -> set[str]:
        """The keys of variables, overrides and options."""
        return {setting.key for setting in [*self.variables, *self.overrides, *self.options]}

    def _take(self, command: Command) -> None:
        found = [pair for word in command.words if (pair := split_override(word))]
        launches = any("main_ppo" in word for word in command.words)
        if not launches and not any(SECTIONED.search(key) for key, _ in found if key[0] != "~"):
            found = []  # NAME=value of other commands
        self.overrides += [Setting(key, parsed(value), command.line) for key, value in found]
        words = list(command.words)
        if "--" in words:  # ray job submit … -- python3 train.py …
            words = words[words.index("--") + 1 :]
        trains = any(word.endswith(("train.py", "train_async.py")) for word in words) or bool(SLIME & set(words))
        runs = "run_" in " ".join(words)
        config = [i for i, word in enumerate(words) if runs and word.split("=")[0] in ("--config", "-c")]
        if trains and any(word.startswith("--") for word in words):
            self.options += arguments(words, command.line)
        elif config:
            value = words[config[0]].partition("=")[2] or words[config[0] + 1]
            self.options.append(Setting("--config", value, command.line))
        elif not found and not command.words[0].startswith("#"):
            self.others.append(command)

    def other_outcomes(self, settled: Sequence[Setting]) -> list[Outcome]:
        """The outcomes of variables, arrays and commands that have no outcome by the trainer's rules."""
        outcomes = [_of_variable(one) for one in self.variables if one not in settled]
        keys = {one.key for one in [*settled, *self.variables]}
        inside = [Setting(name, value) for name, value in self.script.variables.items() if name not in keys]
        outcomes += [Outcome(one, "no effect", "not exported: it counts where the script uses it") for one in inside]
        arrays = self.script.arrays.items()
        unused = [Setting(name, " ".join(items)) for name, items in arrays if name not in self.script.used]
        outcomes += [Outcome(one, "no effect", "no command of the script takes this array") for one in unused]
        return outcomes + [_of_command(command) for command in self.others]


def arguments(words: Sequence[str], line: int = 0) -> list[Setting]:
    """``--key value…`` as settings: several values are a list, none is true. Words before the first option are left out."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word.partition("=")
            found.append((key, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    values = [(key, [parsed(value) if key != "--multimodal-keys" else value for value in given]) for key, given in found]
    return [Setting(key, True if not given else given[0] if len(given) == 1 else given, line) for key, given in values]


def split_override(word: str) -> tuple[str, str] | None:
    """Key and value of an override such as ``++a.b=1``, of a deletion (``~a.b``) or of a group (``env=x``); else None."""
    if deleted := re.fullmatch(r"(~[A-Za-z_][\w./@-]*)(?:=.*)?", word, re.DOTALL):
        return deleted[1], ""
    found = re.fullmatch(
        r"(?:\+\+?)?((?:--config-(?:path|name|dir))|[A-Za-z_][\w-]*(?:[./][\w@-]+)*)=(.*)", word, re.DOTALL
    )
    return (found[1], found[2]) if found else None


def read_with_references(text: str, named: str) -> Any:
    """The value of a YAML text with references such as ``${a.b}`` without quotes, also in lists."""
    try:
        return read_yaml(text, named)[0]
    except RecipeError:
        bare = re.compile(r"(?<=[\[,{\s])(\$\{[^{}\"']*(?:\{[^{}]*\}[^{}]*)*\})(?=\s*[,\]}])")
        return read_yaml(bare.sub(r'"\1"', text), named)[0]


def _of_variable(setting: Setting) -> Outcome:
    if setting.key in VARIABLES:
        return Outcome(setting, "no effect", VARIABLES[setting.key])
    if setting.key.startswith(OF_LIBRARIES):
        return Outcome(setting, "no effect", "a variable of a library or of the machine; set it here, too, if it is needed")
    return Outcome(setting, "unknown", "a variable that is not known here; it was ignored")


def _of_command(command: Command) -> Outcome:
    words = " ".join(command.words)
    setting = Setting("$ " + (words if len(words) <= 60 else words[:57] + "…"), "", command.line)
    if command.words[0] in ("source", "."):
        return Outcome(setting, "no place", "the file was not read, so its settings are missing here. Join the two files")
    if command.words[0] in BUILTINS:
        return Outcome(setting, "no effect", "of the script alone")
    return Outcome(setting, "no place", "a command of set-up or launch; a recipe holds none")


def _yaml(text: str, named: str) -> dict[str, Any] | None:
    """The mapping of a YAML text; None for other texts."""
    named_so = named.endswith((".yaml", ".yml"))
    if not named_so and not any(line.rstrip().endswith(":") or ": " in line for line in text.splitlines()):
        return None
    try:
        data = read_with_references(text, named)
    except RecipeError:
        if named_so:
            raise
        return None
    return data if isinstance(data, dict) and all(isinstance(key, str) for key in data) else None


def _is_python(text: str, named: str) -> bool:
    if named.endswith(".sh"):
        return False
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return named.endswith(".py") or any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)


def unrecognised(named: str) -> str:
    """The error for a text of no known trainer."""
    return (
        f"{named}: the trainer is not recognised. Known are verl's overrides (TaskMem, VAGEN), CapRL's variables, slime's "
        f"arguments and NeMo-RL's YAML. Name the trainer: --from {' | '.join(FRAMEWORKS)}."
    )
