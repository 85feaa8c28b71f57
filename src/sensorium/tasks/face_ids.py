"""Face ids from clip to clip: what earlier memories call a person, in the words of the current clip.

Every clip numbers its faces anew (local ids); a map says which person of the whole video each one is (global ids).

    memories  {3: "<face_1> waves to face 2", 4: "<face_1> leaves"}
    maps      {3: {7: 1, 8: 2}, 4: {8: 1}, 5: {8: 4}}           global to local, by clip
    current   5
    result    {3: "<face_5> waves to <face_4>", 4: "<face_4> leaves"}: person 8 is <face_4> now; 7, who is not in clip 5,
              gets the first free number after all that clip 5 knows

Each text is rewritten in one pass, so no id is exchanged twice. Fresh ids are given in the order in which they first occur,
so the result depends on the input alone. An id that a clip's map does not know is a person of its own. A number of more
than nine digits is no id.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.plain import strict_json

TAG = re.compile(
    r"<\s*face[\s_-]*(\d+)\s*>|\[\s*face[\s_-]*(\d+)\s*\]|\(\s*face[\s_-]*(\d+)\s*\)"
    r"|(?:<\s*|(?<![A-Za-z]))face[\s_-]*(\d+)>?",
    re.IGNORECASE | re.ASCII,
)
"""A face in any spelling: in angles, brackets or parentheses, bare, or in an angle that is not closed. Not "surface 3"."""
MOST_DIGITS = 9
"""Of a face's number; one of more digits is no face, and stays as it is."""
FaceMaps = Mapping[int, Mapping[int, int]]
"""Global to local ids, by clip."""


def rewrite_faces(memories: Mapping[int, str], maps: FaceMaps, current: int) -> dict[int, str]:
    """The memories with the current clip's ids, by clip."""
    clips = sorted(memories)
    return dict(zip(clips, rewrite_texts([(clip, memories[clip]) for clip in clips], maps, current), strict=True))


def rewrite_texts(texts: Sequence[tuple[int, str]], maps: FaceMaps, current: int, beside: str = "") -> list[str]:
    """The texts, each with its clip, with the current clip's ids; a person has one number in all of them.

    ``beside`` is a text of the current clip that stays as it is: a number in it is not given to anybody else.
    """
    local_now = dict(maps.get(current, {}))
    highest = max([*local_now.values(), *filter(None, map(_local, TAG.finditer(beside)))], default=0)
    fresh: dict[tuple[str, int, int], int] = {}
    rewritten = []
    for clip, text in texts:
        people = _people(maps.get(clip, {}))

        def renamed(found: re.Match[str], clip: int = clip, people: Mapping[int, int] = people) -> str:
            nonlocal highest
            local = _local(found)
            if local is None:
                return found.group()
            person = people.get(local)
            if person is not None and person in local_now:
                return f"<face_{local_now[person]}>"
            key = ("known", 0, person) if person is not None else ("strange", clip, local)
            if key not in fresh:
                highest += 1
                fresh[key] = highest
            return f"<face_{fresh[key]}>"

        rewritten.append(TAG.sub(renamed, text))
    return rewritten


def _local(found: re.Match[str]) -> int | None:
    """The number of a tag; None where it has too many digits to be a face."""
    digits = next(group for group in found.groups() if group is not None).lstrip("0") or "0"
    return int(digits) if len(digits) <= MOST_DIGITS else None


def read_face_maps(path: Path) -> dict[int, dict[int, int]]:
    """The maps of a video, ``{clip: {"[face_G]": "<face_L>"}}``; none where there is no file."""
    try:
        raw = strict_json(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: the face maps cannot be read: {error}.") from error
    try:
        return {
            int(clip): {_number(person): _number(local) for person, local in faces.items()} for clip, faces in raw.items()
        }
    except (AttributeError, ValueError, TypeError) as error:
        raise TaskError(f'{path}: face maps are {{clip: {{"[face_G]": "<face_L>"}}}}: {error}.') from error


def _people(faces: Mapping[int, int]) -> dict[int, int]:
    """Local to global; of two people with one local id the one with the lower number."""
    return {local: person for person, local in sorted(faces.items(), reverse=True)}


def _number(tag: Any) -> int:
    found = re.fullmatch(r"[\[<]?\s*(?:face)?[\s_-]*(\d+)\s*[\]>]?", str(tag), re.IGNORECASE | re.ASCII)
    if found is None or len(found.group(1)) > MOST_DIGITS:
        raise ValueError(f"'{str(tag)[:40]}' is no face")
    return int(found.group(1))
