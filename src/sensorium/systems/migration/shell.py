r"""Reads shell scripts that launch training: their commands with words and variables.

    export N=8                                      → variables {"N": "8"}
    ARGS=(--n $N                                    → arrays {"ARGS": ["--n", "8"]}
          # a comment
          --lr ${LR:-1e-6})
    python train.py "${ARGS[@]}" \                 → Command(["python", "train.py", "--n", "8", "--lr", "1e-6", "a.b=1"])
        a.b=1

Nothing is run. The first branch of an ``if`` is taken, and a loop's body is read once; notes report both. A variable that
the script does not set and the output of a command stay as they are written: ``$NAME``, ``$(command)``.
"""

import ast
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

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
