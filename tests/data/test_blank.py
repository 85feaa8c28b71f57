"""A blank medium has the shape of the real one and shows or sounds nothing."""

import numpy as np

from sensorium.data.decoder import Decoder
from sensorium.data.made_media import GREY, blank, encode_clip, muted
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.vocabulary.decoding import AudioParameters, FrameRule, VideoParameters
from tests.data.clips import middle


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)


def test_a_picture_becomes_grey_at_its_size() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    picture = store.put(encode_png(noise(30, 50, 3)), "picture")
    pixels = np.asarray(decoder.get(blank(picture, decoder, store)))
    assert pixels.shape == (30, 50, 3)
    assert (pixels == GREY).all()
    decoder.close()


def test_a_video_keeps_its_number_of_frames_and_their_size_also_when_it_is_trimmed() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    data = encode_clip(noise(12, 28, 56, 3), fps=4)
    for asked in (
        middle(),
        middle(frames=5),
        middle(fps=3, start=1.0, end=2.5),
    ):
        video = store.put(data, "video", "", asked)
        real, grey = decoder.get(video), decoder.get(blank(video, decoder, store))
        assert isinstance(real, DecodedVideo)
        assert isinstance(grey, DecodedVideo)
        assert grey.frames.shape == real.frames.shape
        assert np.abs(grey.frames.astype(int) - GREY).max() <= 3, "as far as the codec keeps grey"
    decoder.close()


def test_a_sound_becomes_as_much_silence() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    sound = store.put(encode_wav(np.sin(np.arange(8000)).astype(np.float32)), "sound", "", AudioParameters(end=0.25))
    real, silent = decoder.get(sound), decoder.get(blank(sound, decoder, store))
    assert isinstance(real, DecodedAudio)
    assert isinstance(silent, DecodedAudio)
    assert len(silent.samples) == len(real.samples)
    assert not silent.samples.any()
    decoder.close()


def test_a_video_that_is_heard_loses_one_sense_and_keeps_the_other() -> None:
    store = MediaStore()
    decoder = Decoder(store)
    data = encode_clip(noise(16, 56, 56, 3), 4.0, np.sin(np.arange(64000)).astype(np.float32))
    asked = VideoParameters(start=1.0, end=3.0, use_audio_in_video=True).resolved(FrameRule())
    video = store.put(data, "video", "clip.mp4", asked)
    grey, mute = blank(video, decoder, store), muted(video, decoder, store)
    seen, unseen, still = decoder.get(video), decoder.get(grey), decoder.get(mute)
    assert isinstance(seen, DecodedVideo)
    assert isinstance(unseen, DecodedVideo)
    assert isinstance(still, DecodedVideo)
    assert unseen.frames.shape == seen.frames.shape
    assert unseen.seconds_per_frame == seen.seconds_per_frame
    assert np.abs(unseen.frames.astype(int) - GREY).max() <= 3
    assert np.array_equal(still.frames, seen.frames)
    assert video.sound is not None
    assert grey.sound is not None
    assert mute.sound is not None
    heard, kept, silent = (decoder.get(item) for item in (video.sound, grey.sound, mute.sound))
    assert isinstance(heard, DecodedAudio)
    assert isinstance(kept, DecodedAudio)
    assert isinstance(silent, DecodedAudio)
    assert np.abs(kept.samples - heard.samples).max() < 1e-4
    assert len(silent.samples) == len(heard.samples)
    assert not silent.samples.any()
    decoder.close()
