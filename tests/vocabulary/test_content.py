"""Messages are made of text and media, and of nothing else."""

from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.vocabulary.content import Text, assistant, system, user


def test_a_message_takes_text_and_media() -> None:
    picture = MediaStore().put(b"bytes", "picture")
    assert user("What?", Text("Now."), picture).content == (Text("What?"), Text("Now."), picture)
    assert system("Look.").text == "Look."
    assert assistant("Red.").text == "Red."


@pytest.mark.parametrize("part", [Path("cat.png"), b"\x89PNG", 7, None, ["What?"]])
@pytest.mark.parametrize("make", [user, system, assistant])
def test_a_part_of_another_type_is_refused_at_once_with_the_way_out(make: Any, part: Any) -> None:
    said = rf"{make.__name__}\(…\) takes text and media, not {type(part).__name__}\..*store\.put_picture\(bytes"
    with pytest.raises(TypeError, match=said):
        make(part)
