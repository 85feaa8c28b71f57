"""The response grammar: the forms in which an environment may ask for an answer, and how a response is read.

A form is a sequence of sections in tags. ``grounding``, for example, is

    <think><observation>…</observation><reasoning>…</reasoning></think><answer>…</answer>

and of the response ``<think><observation>a box</observation><reasoning>so left</reasoning></think><answer>Left</answer>``
the answer is ``Left``, the section ``observation`` is ``a box``, and it is well formed. Tags may be in capitals. The last
``<answer>`` holds the answer, also in a response that is not well formed. Reading takes time linear in the text.

With ``grammar: vagen`` a response is read as VAGEN reads it, for comparing success rates: the first answer counts, tags are
in lower case, and ``free_think`` and ``no_think`` have an answer only where they are well formed. A well-formed response
begins with its form and ends with its last tag, whatever is between; in today's forms (``wm``, ``free_wm``, ``eval_mode``,
and those with ``<action>``) it may be anywhere in the response.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from sensorium.vocabulary.errors import RecipeError, nearest

ANSWER_TAGS = ("answer", "action")
TAGS = {
    answer: re.compile(rf"<(/?)(think|observation|reasoning|prediction|{answer})>", re.IGNORECASE) for answer in ANSWER_TAGS
}

# The sections of each form in order; of those in brackets the first holds the others. The first five are legacy VAGEN's,
# the last three today's.
LAYOUTS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "no_think": ("answer",),
    "free_think": ("think", "answer"),
    "grounding": (("think", "observation", "reasoning"), "answer"),
    "worldmodeling": (("think", "reasoning", "prediction"), "answer"),
    "grounding_worldmodeling": (("think", "observation", "reasoning", "prediction"), "answer"),
    "wm": ("observation", "think", "answer", "prediction"),
    "free_wm": ("observation", "answer", "prediction"),
    "eval_mode": ("think", "answer"),
}

LEGACY = ("no_think", "free_think", "grounding", "worldmodeling", "grounding_worldmodeling")
GRAMMARS = ("own", "vagen")
LEGACY_TAGS = re.compile(r"</?(?:think|answer)>")  # legacy VAGEN removes these from sections and answers
# Forms that are well formed by these sections alone: any text, and other tags, may be around them.
REQUIRED = {"free_wm": ("observation", "answer", "prediction"), "eval_mode": ("answer",)}

MEANINGS = {
    "think": "your thoughts",
    "observation": "what you see now",
    "reasoning": "what to do and why",
    "prediction": "what you will see next",
    "answer": "your answer",
}


@dataclass(frozen=True)
class ParsedResponse:
    """The parts of a response: every ``<answer>`` in order, its other sections by name, whether it has the right form."""

    answers: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    well_formed: bool = False

    @property
    def answer(self) -> str | None:
        return self.answers[-1] if self.answers else None


@dataclass(frozen=True)
class ResponseFormat:
    """One of the forms, by its name. ``answer_tag`` is the tag around the answer."""

    name: str
    answer_tag: str = "answer"
    grammar: str = "own"

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise RecipeError(f"unknown response format '{self.name}'{nearest(str(self.name), list(LAYOUTS))}")
        if self.grammar not in GRAMMARS:
            raise RecipeError(f"unknown grammar '{self.grammar}'{nearest(str(self.grammar), list(GRAMMARS))}")
        assert self.answer_tag in ANSWER_TAGS, self.answer_tag

    @property
    def legacy(self) -> bool:
        """Whether it is a form of legacy VAGEN's, not of today's."""
        return self.name in LEGACY and self.answer_tag == "answer"

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that hold text, in order."""
        parts = LAYOUTS[self.name]
        return tuple(name for part in parts for name in ((part,) if isinstance(part, str) else part[1:]))

    @property
    def thinks(self) -> bool:
        """Whether more than an answer is asked for."""
        return self.sections != ("answer",)

    def write(self, answer: str, **sections: str) -> str:
        """A response of this form; of the sections given, it has those that the form has, the others empty."""

        def written(part: str | tuple[str, ...]) -> str:
            if isinstance(part, tuple):
                return f"<{part[0]}>{''.join(map(written, part[1:]))}</{part[0]}>"
            tag, text = (self.answer_tag, answer) if part == "answer" else (part, sections.get(part, ""))
            return f"<{tag}>{text}</{tag}>"

        return "".join(map(written, LAYOUTS[self.name]))

    def shown(self, answer: str = MEANINGS["answer"]) -> str:
        """The form as a prompt shows it, each section with its meaning."""
        return self.write(answer, **{name: MEANINGS[name] for name in self.sections if name != "answer"})

    def parse(self, text: str) -> ParsedResponse:
        """Read a response. Whatever the text is, it is read, in one pass."""
        if self.grammar == "vagen":
            return self._parse_as_vagen(text)
        marks = list(TAGS[self.answer_tag].finditer(text))
        tags = [mark[1] + self._section(mark[2].lower()) for mark in marks]
        ends = [0, *(mark.end() for mark in marks)]
        between = [text[end : mark.start()] for end, mark in zip(ends, marks, strict=False)] + [text[ends[-1] :]]
        sections: dict[str, str] = {}
        answers = []
        for i, (tag, following) in enumerate(pairwise(tags)):
            if following == f"/{tag}" and tag == "answer":
                answers.append(between[i + 1])
            elif following == f"/{tag}":
                sections[tag] = between[i + 1]
        if self.name in REQUIRED:
            needed = REQUIRED[self.name]
            among = [tag for tag in tags if tag.lstrip("/") in needed]
            whole = all(name in sections or (name == "answer" and answers) for name in needed)
            whole = whole and among == [end for name in needed for end in (name, f"/{name}")]
            return ParsedResponse(tuple(answers), sections, whole)
        wanted = [found[1] + self._section(found[2]) for found in TAGS[self.answer_tag].finditer(self.write(""))]
        leaves = {gap for gap in range(1, len(tags)) if tags[gap] == f"/{tags[gap - 1]}"}
        outside = (text for gap, text in enumerate(between) if gap not in leaves)
        return ParsedResponse(tuple(answers), sections, tags == wanted and not any(map(str.strip, outside)))

    def _parse_as_vagen(self, text: str) -> ParsedResponse:
        """Each part of the form is searched after the one before it, so the first answer counts."""
        text = text.replace("<image>", "").strip()
        delimiters, names = self._delimiters()
        sections: dict[str, str] = {}
        begins, at = False, 0
        for number, delimiter in enumerate(delimiters):
            found = re.compile(delimiter).search(text, at)
            if found is None:
                return ParsedResponse()
            if number == 0:
                begins = found.start() == 0
            else:
                held = text[at : found.start()]
                sections[names[number - 1]] = (LEGACY_TAGS.sub("", held) if self.legacy else held).strip()
            if number == len(delimiters) - 1:
                begins = begins and text.endswith(delimiter)
            at = found.end()
        whole = begins if self.legacy or self.name == "no_think" else True
        if not whole and self.name in ("free_think", "no_think"):
            return ParsedResponse()
        answer = sections.pop("answer")
        return ParsedResponse((answer,), {name: held for name, held in sections.items() if name}, whole)

    def _delimiters(self) -> tuple[list[str], list[str]]:
        r"""The patterns between the sections, and the section after each but the last ("": any text).

        Of ``free_think``: <think>, </think>\s*<answer>, </answer>.
        """
        tags = re.findall(r"</?\w+>", self.write(""))
        needed = REQUIRED.get(self.name)
        if needed:
            tags = [tag for tag in tags if self._section(tag.strip("</>")) in needed]
        delimiters, names = [tags[0]], []
        for before, tag in pairwise(tags):
            if tag == before.replace("<", "</"):
                names.append(self._section(tag.strip("</>")))
                delimiters.append(tag)
            elif needed:
                names.append("")
                delimiters.append(tag)
            else:
                delimiters[-1] += rf"\s*{tag}"
        return delimiters, names

    def _section(self, tag: str) -> str:
        return "answer" if tag == self.answer_tag else tag
