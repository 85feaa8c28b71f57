r"""Shell scripts as other projects launch training with them: what commands they run, with which words and variables.

    export N=8                                      → variables {"N": "8"}
    ARGS=(--n $N                                    → arrays {"ARGS": ["--n", "8"]}
          # a comment
          --lr ${LR:-1e-6})
    python train.py "${ARGS[@]}" \                 → Command(["python", "train.py", "--n", "8", "--lr", "1e-6", "a.b=1"])
        a.b=1

Nothing is run. Of an ``if`` the first branch is taken, a loop's body is read once, and both are noted. A variable that the
script does not set, and the output of a command, stay as they are written: ``$NAME``, ``$(command)``.
"""

import ast
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
OF_THE_MACHINE = ("HOME", "USER", "PWD")
"""Variables that are taken from where the command runs; others may hold secrets."""
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
    """A script that was read: its commands, and the variables that it exports."""

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.used: set[str] = set()
        """Names of arrays that a command or another array takes."""
        self.exported: dict[str, int] = {}
        """Names that the script exports, with their lines."""
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
                self.notes.append(f"lines {begin} to {line} hang on a condition: the first branch was taken")
            elif word == "case":
                self._case += 1
                self.notes.append(f"the case from line {line} on was not read: it hangs on a value")
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
        """The words that a word as it is written stands for."""
        words, current, begun, i = [], "", False, 0
        while i < len(raw):
            char = raw[i]
            if char == "'":
                end = raw.find("'", i + 1)
                end = len(raw) if end < 0 else end
                current, begun, i = current + raw[i + 1 : end], True, end + 1
            elif char == '"':
                end = _quoted_end(raw, i)
                inner = raw[i + 1 : end - 1]
                if found := re.fullmatch(r"\$\{?(\w+)\[[@*]\]\}?", inner):
                    words += self._items(found[1])
                elif inner not in ("$@", "$*", "${@}", "${@:1}"):
                    current, begun = current + self._inside_quotes(inner), True
                i = end
            elif char == "\\" and i + 1 < len(raw):
                current, begun, i = current + raw[i + 1], True, i + 2
            elif char == "$":
                end = _reference_end(raw, i)
                reference = raw[i:end]
                if found := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", reference):
                    words += self._items(found[1])
                elif reference not in ("$@", "$*"):
                    value = self._value(reference)
                    parts = value.split() if split and not value.startswith("$") else [value]
                    if len(parts) > 1:
                        words += [current + parts[0], *parts[1:-1]]
                        current = parts[-1]
                    elif parts:
                        current += parts[0]
                    begun = begun or bool(parts)
                i = end
            elif char == "`":
                end = raw.find("`", i + 1) + 1 or len(raw)
                current, begun, i = f"{current}$({raw[i + 1 : end - 1]})", True, end
            else:
                current, begun, i = current + char, True, i + 1
        return [*words, current] if begun or (not words and not split) else words

    def _items(self, name: str) -> list[str]:
        """The items of an array; none of one that the script does not set, which is noted."""
        self.used.add(name)
        if name not in self.arrays:
            note = f"the array {name} is not set in this file; what another file puts into it is not in the table"
            self.notes += [note] if note not in self.notes else []
        return self.arrays.get(name, [])

    def _inside_quotes(self, text: str) -> str:
        parts, i = [], 0
        while i < len(text):
            if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in '"\\$`\n':
                parts.append(text[i + 1].replace("\n", ""))
                i += 2
            elif text[i] == "$":
                end = _reference_end(text, i)
                parts.append(self._value(text[i:end]))
                i = end
            else:
                parts.append(text[i])
                i += 1
        return "".join(parts)

    def _value(self, reference: str) -> str:
        """What a reference stands for; itself where the script does not say."""
        if reference.startswith("$(("):
            return self._computed(reference)
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
        return "" if name.isdigit() else f"${name}"

    def _computed(self, reference: str) -> str:
        """The number of an arithmetic expansion over whole numbers."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self.variables.get(name[1], name[0]), reference[3:-2])
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return reference


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("no whole number")


def _tokens(text: str) -> Iterator[_Token]:
    """Words as they are written and operators; comments, joined lines and here-documents are gone."""
    i, line = 0, 1
    ends: list[str] = []
    while i < len(text):
        char = text[i]
        if char == "\\" and text[i + 1 : i + 2] == "\n":
            i, line = i + 2, line + 1
        elif char == "\n":
            yield _Token("\n", line, False)
            i, line = i + 1, line + 1
            while ends:  # here-documents
                stop = ends.pop(0)
                found = re.compile(rf"^\t*{re.escape(stop)}$", re.MULTILINE).search(text, i)
                end = found.end() if found else len(text)
                line += text.count("\n", i, end)
                i = end
        elif char.isspace():
            i += 1
        elif char == "#":
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
        elif found := re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(text, i):
            ends.append(found[2])
            i = found.end()
        elif found := re.compile(r"[0-9]?>&[0-9-]").match(text, i):  # one stream into another
            i = found.end()
        elif found := re.compile(r"&&|\|\||;;|&>>?|[0-9]?>>|<<<|[0-9]?>|<|[;|&()]").match(text, i):
            yield _Token(found[0], line, False)
            i = found.end()
        else:
            end = _word_end(text, i)
            yield _Token(text[i:end].replace("\\\n", ""), line, True)
            line += text.count("\n", i, end)
            i = end


def _word_end(text: str, i: int) -> int:
    begin = i
    while i < len(text):
        char = text[i]
        if char == "$":
            i = _reference_end(text, i)
        elif char == "`":
            i = text.find("`", i + 1) + 1 or len(text)
        elif char == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", text[begin:i]):
            return _closing(text, i)
        elif char.isspace() or char in ";|&()<>":
            break
        else:
            i = _after(text, i)
    return i


def _after(text: str, i: int) -> int:
    """The place after a quoted text, an escaped character or a plain one."""
    if text[i] == "'":
        return text.find("'", i + 1) + 1 or len(text)
    return _quoted_end(text, i) if text[i] == '"' else i + 2 if text[i] == "\\" else i + 1


def _quoted_end(text: str, i: int) -> int:
    """The place after the double quote that closes the one at ``i``."""
    i += 1
    while i < len(text) and text[i] != '"':
        i = i + 2 if text[i] == "\\" else _reference_end(text, i) if text.startswith("$(", i) else i + 1
    return i + 1


def _closing(text: str, i: int) -> int:
    """The place after the bracket that closes the one at ``i``."""
    opening, closing = text[i], {"(": ")", "{": "}"}[text[i]]
    depth = 0
    while i < len(text):
        char = text[i]
        if char == "#" and opening == "(" and text[i - 1].isspace():
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
        else:
            depth += (char == opening) - (char == closing)
            i = _after(text, i)
            if not depth:
                return i
    return i


def _reference_end(text: str, i: int) -> int:
    """The place after the reference that begins with the $ at ``i``."""
    after = text[i + 1 : i + 2]
    if after and after in "({":
        return _closing(text, i + 1)
    found = re.compile(r"\$(\w+|[@*#?$!-])").match(text, i)
    return found.end() if found else i + 1
