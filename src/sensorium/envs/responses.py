"""The response grammar: the five forms in which an environment may ask for an answer, and how a response is read.

A form is a sequence of sections in tags. ``grounding``, for example, is

    <think><observation>…</observation><reasoning>…</reasoning></think><answer>…</answer>

and of the response ``<think><observation>a box</observation><reasoning>so left</reasoning></think><answer>Left</answer>``
the answer is ``Left``, the section ``observation`` is ``a box``, and it is well formed. Tags may be in capitals. What is in
the last ``<answer>`` is the answer, in a response that is not well formed too. Reading takes time linear in the text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from sensorium.vocabulary.errors import RecipeError, nearest

TAG = re.compile(r"<(/?)(think|observation|reasoning|prediction|answer)>", re.IGNORECASE)

SECTIONS: dict[str, tuple[str, ...] | None] = {
    "no_think": None,
    "free_think": (),
    "grounding": ("observation", "reasoning"),
    "worldmodeling": ("reasoning", "prediction"),
    "grounding_worldmodeling": ("observation", "reasoning", "prediction"),
}
"""What the thought of each form holds: no thought at all, free text, or these sections."""

MEANINGS = {
    "think": "your thoughts",
    "observation": "what you see now",
    "reasoning": "what to do and why",
    "prediction": "what you will see next",
    "answer": "your answer",
}


@dataclass(frozen=True)
class ParsedResponse:
    """What a response says: every ``<answer>`` in order, its other sections by name, whether it has the form asked for."""

    answers: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    well_formed: bool = False

    @property
    def answer(self) -> str | None:
        """The last answer, None without one."""
        return self.answers[-1] if self.answers else None


@dataclass(frozen=True)
class ResponseFormat:
    """One of the five forms, by its name."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in SECTIONS:
            raise RecipeError(f"unknown response format '{self.name}'{nearest(str(self.name), list(SECTIONS))}")

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that hold text, in order; the answer is the last."""
        inner = SECTIONS[self.name]
        return ("answer",) if inner is None else (*(inner or ("think",)), "answer")

    @property
    def thinks(self) -> bool:
        """Whether a thought is asked for before the answer."""
        return SECTIONS[self.name] is not None

    def write(self, answer: str, **sections: str) -> str:
        """A response of this form; of the sections given, it has those that the form has, the others empty."""
        inner = SECTIONS[self.name]
        if inner is None:
            return _tagged("answer", answer)
        thought = "".join(_tagged(name, sections.get(name, "")) for name in inner) if inner else sections.get("think", "")
        return _tagged("think", thought) + _tagged("answer", answer)

    def shown(self, answer: str = "") -> str:
        """The form as a prompt shows it, each section with what belongs into it."""
        return self.write(
            answer or MEANINGS["answer"], **{name: MEANINGS[name] for name in self.sections if name != "answer"}
        )

    def parse(self, text: str) -> ParsedResponse:
        """Read a response. Whatever the text is, it is read, in one pass."""
        marks = list(TAG.finditer(text))
        tags = [mark[1] + mark[2].lower() for mark in marks]
        ends = [0, *(mark.end() for mark in marks)]
        between = [text[end : mark.start()] for end, mark in zip(ends, marks, strict=False)] + [text[ends[-1] :]]
        sections: dict[str, str] = {}
        answers = []
        for i, (tag, following) in enumerate(pairwise(tags)):
            if following == f"/{tag}" and tag == "answer":
                answers.append(between[i + 1])
            elif following == f"/{tag}":
                sections[tag] = between[i + 1]
        outside = (said for gap, said in enumerate(between) if not _is_leaf(tags, gap))
        return ParsedResponse(tuple(answers), sections, tags == self._tags and not any(map(str.strip, outside)))

    @property
    def _tags(self) -> list[str]:
        """The tags of a well-formed response, in order."""
        return [found[1] + found[2] for found in TAG.finditer(self.write(""))]


def _is_leaf(tags: list[str], gap: int) -> bool:
    """Whether the text in this gap between tags is what a section holds."""
    return 0 < gap < len(tags) and tags[gap] == f"/{tags[gap - 1]}"


def _tagged(name: str, text: str) -> str:
    return f"<{name}>{text}</{name}>"
