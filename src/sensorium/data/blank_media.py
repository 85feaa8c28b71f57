"""Blank media: what has the shape of a medium and shows or sounds nothing. To see whether a model looks and listens."""

from dataclasses import replace

import numpy as np

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters

GREY = 127


def blank(media: Media, decoder: Decoder, store: MediaStore) -> Media:
    """A grey picture of the same size, a grey video of as many frames of that size, or as much silence.

    A model is given as many tokens for it as for the medium itself. A video that is heard keeps its sound.
    """
    shown, origin = decoder.get(media), f"blank for {media.name}"
    if isinstance(shown, DecodedVideo):
        assert isinstance(media.parameters, VideoParameters)
        count, seconds = len(shown.frames), max(shown.end_s - shown.start_s, 1e-3)
        from sensorium.data.made_media import encode_clip  # brings PyAV, which a run without clips does without

        if media.parameters.sampling != "middle":  # of the file's size, which becomes the clip's own
            width, height = shown.size
            grey = np.full((height, width, 3), GREY, np.uint8)
            clip = encode_clip([grey] * count, 1 / shown.seconds_per_frame)
        else:
            clip = encode_clip(np.full_like(shown.frames, GREY), count / seconds)
        asked = replace(media.parameters, frames=count, fps=None, start=0.0, end=None)
        if media.sound is not None:
            heard = decoder.get(media.sound)
            assert isinstance(heard, DecodedAudio)
            sound = store.put(encode_wav(heard.samples, heard.sample_rate), "sound", origin)
            return store.put(clip, "video", origin, asked).heard_with(sound)
        return store.put(clip, "video", origin, asked)
    if isinstance(shown, DecodedAudio):
        silence = encode_wav(np.zeros_like(shown.samples), shown.sample_rate)
        return store.put(silence, "sound", origin, AudioParameters(shown.sample_rate))
    grey = np.full((shown.height, shown.width, 3), GREY, np.uint8)
    return store.put(encode_png(grey), "picture", origin)


def muted(video: Media, decoder: Decoder, store: MediaStore) -> Media:
    """A video that is heard, with as much silence for its sound."""
    assert video.sound is not None
    heard = decoder.get(video.sound)
    assert isinstance(heard, DecodedAudio)
    silence = np.zeros(round(heard.start_s * heard.sample_rate) + len(heard.samples), np.float32)
    sound = store.put(encode_wav(silence, heard.sample_rate), "sound", f"blank for {video.name}")
    return video.heard_with(sound)
