"""Pictures as square tiles, each seen by itself: the preprocessors and the tower of InternVL and its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.preprocessors import naming_items
from sensorium.models.segment_layout import Features
from sensorium.recipe.family_facts import DeferredModule, Shapes, affine, affine_layers
from sensorium.vocabulary.content import Media

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn

    from sensorium.data.video import DecodedVideo
else:
    torch = DeferredModule("torch")


class TiledPictures:
    """The checkpoint's image processor over pictures that it cuts into tiles; ``settings`` are given with every call.

    ``side`` is the number of features on each side of a tile: a picture of 3 tiles has the grid (3, side, side).
    """

    def __init__(self, image_processor: Any, side: int, settings: Mapping[str, Any]) -> None:
        self._image_processor, self._side = image_processor, side
        self._settings = {"return_tensors": "pt", **settings}

    def __call__(self, items: Sequence[tuple[Media, Image.Image]]) -> list[TowerInput]:
        with naming_items(items, "image"):
            made = self._image_processor(images=[picture for _, picture in items], **self._settings)
        counts = torch.as_tensor(made["num_patches"]).tolist()
        return [tiled(tiles, Extent("picture", (len(tiles), self._side, self._side)))
                for tiles in torch.split(made["pixel_values"], counts)]  # fmt: skip


class TiledVideos:
    """The checkpoint's video processor over sampled frames, each of which becomes one tile; it samples nothing itself.

    ``key`` is its name for the tiles.
    """

    def __init__(self, video_processor: Any, side: int, key: str = "pixel_values_videos") -> None:
        self._video_processor, self._side, self._key = video_processor, side, key

    def __call__(self, items: Sequence[tuple[Media, DecodedVideo]]) -> list[TowerInput]:
        """The tiles of each clip. One clip at a time: the processor wants clips of one length."""
        prepared = []
        for media, clip in items:
            with naming_items([(media, clip)], "video"):
                made = self._video_processor(
                    videos=[torch.tensor(clip.frames)], do_sample_frames=False, return_tensors="pt"
                )
            tiles = made[self._key][0]
            grid = (len(tiles), self._side, self._side)
            prepared.append(tiled(tiles, Extent("video", grid, clip.frame_times_s, clip.seconds_per_frame)))
        return prepared


def tiled(tiles_N3SS: Tensor, extent: Extent) -> TowerInput:
    """Tiles as rows; a copy, since a view would keep the whole batch alive in the cache."""
    return TowerInput(tiles_N3SS.flatten(1).clone(), extent)


class TileTower:
    """A stock tower that sees tiles [N, 3, S, S] one by one, and what projects its features, as ``parts`` of a model.

    ``look`` gives the features [N, K, H] of tiles, ``finish`` the embeddings of an item from those of its tiles.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        look: Callable[[Tensor], Tensor],
        finish: Callable[[Tensor, Extent], Tensor] | None = None,
    ) -> None:
        self.module: nn.Module = torch.nn.ModuleList(parts)
        self._look = look
        self._finish = finish or one_after_another

    def __call__(self, prepared: Sequence[TowerInput]) -> list[Features]:
        """Embeddings of each item."""
        weight = next(self.module.parameters())
        tiles_NP = torch.cat([item.patches_PC for item in prepared]).to(weight.device, weight.dtype)
        size = round((tiles_NP.shape[1] // 3) ** 0.5)
        seen_NKH = self._look(tiles_NP.unflatten(1, (3, size, size)))
        counts = [len(item.patches_PC) for item in prepared]
        parts = zip(torch.split(seen_NKH, counts), prepared, strict=True)
        return [Features(self._finish(part_NKH, item.extent)) for part_NKH, item in parts]


def one_after_another(seen_NKH: Tensor, extent: Extent) -> Tensor:
    """The features of an item's tiles in a row."""
    return seen_NKH.flatten(0, 1)


def siglip_tensors(at: str, vision: dict[str, Any]) -> Shapes:
    """The tensors of a SigLIP tower."""
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield f"{at}.embeddings.position_embedding.weight", [(vision["image_size"] // patch) ** 2, hidden]
    yield from affine(f"{at}.embeddings.patch_embedding", [hidden, 3, patch, patch])
    attention = {f"self_attn.{name}_proj": [hidden, hidden] for name in ("q", "k", "v", "out")}
    yield from affine_layers(f"{at}.encoder.layers", vision["num_hidden_layers"], attention | {
        "layer_norm1": [hidden], "layer_norm2": [hidden], "mlp.fc1": [wide, hidden], "mlp.fc2": [hidden, wide],
    })  # fmt: skip
    yield from affine(f"{at}.post_layernorm", [hidden])


# The pooling head of a published SigLIP tower, which no family uses.
SIGLIP_HEAD = r"(^|\.)vision_model\.head\."
