"""Pictures in a prompt: they are read, cut into tiles, and encoded as rows.

A row of a picture is a word that no vocabulary has: its id is `Vision.first_row` or
more, and the target's graph reads it from a buffer in place of an embedding. So equal
pictures have equal ids, and a prompt's rows are kept like a text's.
"""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import GRID, MAX_PIXELS, PATCHES, SPLIT, Vision
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import ContractError, OptionError, reason_of
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import HOST, Memory

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200  # Of the edges of a picture that becomes patches.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
PictureInput = str | Path | bytes | npt.NDArray[np.uint8]
"""A file, its bytes, or uint8 [height, width, 3] in the order red, green, blue; an
image of Pillow too."""
NO_IMAGES = (
    "the bundle's model reads no images; leave them out, or export a model of "
    "docs/images.md with its preprocessor_config.json, without streams or Kangaroo"
)
DAMAGED = "the encoder of images gives other rows than it must; export it again"
# What the encoder's run takes beyond its weights is given back after it.
_FREE_AFTER_RUN = "memory.enable_memory_arena_shrinkage"
_ARENAS = {"cpu": "cpu:0", "cuda": "cpu:0;gpu:0"}
Size = tuple[int, int]  # Width and height.


def read_picture(given: object) -> npt.NDArray[np.uint8]:
    """Return the pixels of a picture, uint8 [height, width, 3]; `OptionError`.

    A file may be one of `FORMATS` with at most `MAX_PIXELS`; it is turned as its EXIF
    data says, and transparency is dropped, as transformers does.
    """
    if isinstance(given, np.ndarray):
        is_grey = given.ndim == 2
        pixels = np.repeat(given[..., None], 3, 2) if is_grey else given
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,) or not pixels.size:
            fact = f"an image must be uint8 [height, width, 3], not {given.dtype} "
            raise _refusal(f"{fact}{list(given.shape)}", "convert it")
        _check_size(pixels.shape[1], pixels.shape[0])
        return np.ascontiguousarray(pixels)
    pillow = _pillow()
    from PIL.ImageOps import exif_transpose

    try:
        if isinstance(given, (str, Path)):
            if Path(given).exists() and not Path(given).is_file():
                raise _refusal(f"{given} is not an image", "give a file")
            opened = pillow.open(given, formats=FORMATS)
        elif isinstance(given, bytes):
            opened = pillow.open(io.BytesIO(given), formats=FORMATS)
        elif isinstance(given, pillow.Image):
            opened = nullcontext(given)
        else:
            raise _refusal(f"{type(given).__name__} is not an image", "give a file")
        with opened as image:
            _check_size(*image.size)
            return np.array(exif_transpose(image).convert("RGB"))
    except OptionError:
        raise
    except Exception as error:  # a damaged file may raise anything
        fact = f"the image cannot be read ({reason_of(error)})"
        raise _refusal(fact, f"give a file in {', '.join(FORMATS)}") from error


def read_pictures(images: Sequence[object]) -> tuple[npt.NDArray[np.uint8], ...]:
    """Read several pictures, of at most `MAX_PIXELS` in all; raises `OptionError`."""
    pictures, pixels = list[npt.NDArray[np.uint8]](), 0
    for image in images:
        pictures.append(read_picture(image))
        pixels += pictures[-1].size // 3
        _check_size(pixels, 1)
    return tuple(pictures)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        fact = f"the image has {width} x {height} pixels, at most {MAX_PIXELS} are read"
        raise _refusal(fact, "make it smaller")


def _refusal(fact: str, fix: str) -> OptionError:
    return OptionError(f"{fact}; {fix}", "images")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        fact = "Pillow is missing, which reads images"
        raise _refusal(fact, "pip install 'jetdraft[images]'") from error
    return Image


class Tiles(NamedTuple):
    """What an encoder reads of a picture: uint8 [n, height, width, 3], row by row.

    Above one tile, the last is the whole picture. `text` stands in the prompt, with a
    token for each of the `rows`, which fill `lines` in a picture of patches.
    """

    pixels: npt.NDArray[np.uint8]
    text: str
    rows: int
    digest: bytes
    lines: int = 0


def cut(picture: npt.NDArray[np.uint8], vision: Vision) -> Tiles:
    """Cut a picture into tiles as the checkpoint's image processor does."""
    image, side = _pillow().fromarray(picture), vision.side

    def resized(source: Image, size: Size) -> Image:
        return source.resize(size, _pillow().Resampling[vision.filter.upper()])

    columns = rows = 1
    if vision.tiling == PATCHES:
        width, height = _fitting(image.size, vision)
        whole = np.asarray(resized(image, (width, height)))
        count = (width // side) * (height // side)
        text = vision.text["begin"] + vision.token * count + vision.text["end"]
        return Tiles(whole[None], text, count, _digest(whole), height // side)
    if vision.edge:
        image = resized(image, _longest(image.size, vision.edge))
    tiled = image
    if vision.tiling == SPLIT:
        width, height = _multiples(image.size, side)
        tiled = image = resized(image, (width, height))
        columns, rows = width // side, height // side
    elif vision.tiling == GRID:
        columns, rows = _best_grid(image.size, vision)
    tiled = resized(tiled, (columns * side, rows * side))
    array = np.asarray(tiled).reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    tiles = array.reshape(-1, side, side, 3)
    if len(tiles) > 1:
        whole = np.asarray(resized(image, (side, side)))
        tiles = np.concatenate([tiles, whole[None]])
    count = len(tiles) * vision.rows
    return Tiles(tiles, _text(vision, columns, rows), count, _digest(tiles))


def _digest(pixels: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


def _fitting(size: Size, vision: Vision) -> Size:
    """The size in whole squares with `least` to `most` pixels and about this ratio."""
    side, area = vision.side, size[0] * size[1]
    if max(size) > MAX_RATIO * min(size):
        fact = f"the image is {size[0]} x {size[1]}, and longer than {MAX_RATIO} times"
        raise _refusal(f"{fact} its width or height", "cut it")
    width, height = (round(edge / side) * side for edge in size)
    if width * height > vision.most:
        scale = math.sqrt(area / vision.most)
        squares = (max(1, math.floor(edge / scale / side)) for edge in size)
        width, height = (side * count for count in squares)
    elif width * height < vision.least:
        scale = math.sqrt(vision.least / area)
        width, height = (math.ceil(edge * scale / side) * side for edge in size)
    return width, height


def encoder_inputs(pixels: npt.NDArray[np.uint8], vision: Vision) -> dict[str, Any]:
    """The inputs of the encoder's graph for uint8 [height, width, 3], by name.

    A tile becomes "pixels" float32 [1, 3, height, width]. In a picture of n squares
    "pixels" are [n, patches, numbers] (Qwen's have each patch twice, as two frames),
    with "positions" int64 [n, patches, 2] (line, column), "taps" int64 and "weights"
    float32 [n, patches, 4] of the table's four nearest entries, and "order" int64 [n]
    and "windows" int64 [n, patches] of squares sorted by windows.
    """
    mean, std = (np.array(x, np.float32) for x in (vision.mean, vision.std))
    scaled = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
    if vision.tiling != PATCHES:
        return {"pixels": np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])}
    edge, merged = vision.edge, vision.side // vision.edge
    lines, columns = pixels.shape[0] // edge, pixels.shape[1] // edge

    def in_squares(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[lines, columns, ...] as [squares, patches, ...]."""
        rest = array.shape[2:]
        split = (lines // merged, merged, columns // merged, merged, *rest)
        return array.reshape(split).swapaxes(1, 2).reshape(-1, merged**2, *rest)

    patches = scaled.reshape(lines, edge, columns, edge, 3).transpose(0, 2, 4, 1, 3)
    frames = np.repeat(patches[:, :, :, None], 2, 3)
    places = np.stack(np.meshgrid(*map(np.arange, (lines, columns)), indexing="ij"), -1)
    inputs = {
        "pixels": in_squares(frames.reshape(lines, columns, -1)),
        "positions": in_squares(places),
    }
    if vision.table:
        scale = np.float32(vision.table - 1)
        ends = np.maximum(np.array([lines, columns]) - 1, 1)
        exact = places.astype(np.float32) * scale / ends.astype(np.float32)
        near = np.floor(exact)[..., None] + np.arange(2)  # [lines, columns, 2, 2]
        shares = np.maximum(1 - abs(exact[..., None] - near), 0)
        near = near.clip(0, vision.table - 1).astype(np.int64)
        taps = near[..., 0, :, None] * vision.table + near[..., 1, None, :]
        weights = shares[..., 0, :, None] * shares[..., 1, None, :]
        flat = (lines, columns, 4)
        inputs["taps"] = in_squares(taps.reshape(flat))
        inputs["weights"] = in_squares(weights.reshape(flat).astype(np.float32))
    if vision.window:
        squares = places[::merged, ::merged] // merged // vision.window
        numbers = squares[..., 0] * (columns // merged) + squares[..., 1]
        order = np.argsort(numbers.reshape(-1), kind="stable")
        inputs["order"] = order
        inputs["windows"] = np.repeat(numbers.reshape(-1)[order][:, None], merged**2, 1)
    return {name: np.ascontiguousarray(array) for name, array in inputs.items()}


def _longest(size: Size, edge: int) -> Size:
    """The size with this longest edge; the other is even, as transformers has it."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    return max(width, 1), max(height, 1)


def _multiples(size: Size, side: int) -> Size:
    """The size whose edges are the next multiples of a tile's."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height


def _best_grid(size: Size, vision: Vision) -> Size:
    """The columns and rows of tiles with the ratio nearest to the picture's."""
    most, area = vision.most, size[0] * size[1]
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1)]
    grids = [grid for grid in grids if vision.least <= math.prod(grid) <= most]
    best, difference = (1, 1), math.inf
    for grid in sorted(grids, key=math.prod):
        own = abs(size[0] / size[1] - grid[0] / grid[1])
        # Of equal grids the larger, while the picture fills half of its pixels.
        fills = area > 0.5 * vision.side**2 * math.prod(grid)
        if own < difference or (own == difference and fills):
            best, difference = grid, own
    return best


def _text(vision: Vision, columns: int, rows: int) -> str:
    """What stands for a picture in the prompt, with a token for each row."""
    text, own = vision.text, vision.token * vision.rows
    tiles = [
        "".join(
            text["tile"].replace("{row}", row).replace("{column}", column) + own
            for column in map(str, range(1, columns + 1))
        )
        for row in map(str, range(1, (rows if columns * rows > 1 else 0) + 1))
    ]
    lines = "".join(line + text["line"] for line in tiles)
    between = text["grid"] if tiles else ""
    return f"{text['begin']}{lines}{between}{text['whole']}{own}{text['end']}"


class PictureRows:
    """The buffers of the rows of pictures, which an encoder fills, and of rotations.

    `ids` int64 [n] is the prompt of the current generation, with the ids of its rows;
    it is empty for a prompt without pictures. `seconds` is the encoder's time.
    """

    def __init__(
        self,
        open_session: Callable[[], ort.InferenceSession],
        vision: Vision,
        contract: StepContract,
        memory: Memory = HOST,
    ) -> None:
        self._open, self._vision, self._memory = cache(open_session), vision, memory
        tensors = memory.tensors(contract.picture_inputs)
        self.values = {name: tensor.value for name, tensor in tensors.items()}
        self._rows, *self._turns = tensors.values()
        self._firsts: dict[bytes, int] = {}  # The first row of each encoded picture.
        self._filled = 0
        self.ids: Int64s = np.zeros(0, np.int64)
        self.seconds = 0.0
        self._lock = Lock()
        self._options = ort.RunOptions()
        if device := _ARENAS.get(memory.device):
            self._options.add_run_config_entry(_FREE_AFTER_RUN, device)
        self._turned: list[tuple[int, int, int]] | None = None
        self._turn([])

    def encode(
        self,
        prompt: Sequence[int],
        token: int,
        pictures: Sequence[Tiles],
        forget: Callable[[], None],
        must_end: Callable[[], bool],
    ) -> Sequence[int]:
        """Encode new pictures; return the prompt with an id for each row, now in `ids`.

        Without room all pictures are dropped, after `forget`, since their ids get other
        rows. If it `must_end` before all is encoded, the prompt comes back as it is.
        """
        self.ids = np.zeros(0, np.int64)
        if not pictures:
            self._turn([])
            return prompt
        with self._lock:
            if not self._have_room(pictures):
                forget()
                self._firsts, self._filled = {}, 0
            for picture in pictures:
                if not self._encode(picture, must_end):
                    return prompt
        ids = np.array(prompt, np.int64)
        places, start, placed = np.flatnonzero(ids == token), 0, []
        for picture in pictures:
            here, start = places[start : start + picture.rows], start + picture.rows
            first = self._vision.first_row + self._firsts[picture.digest]
            ids[here] = np.arange(first, first + picture.rows)
            placed.append((int(here[0]), picture.rows, picture.lines))
        self._turn(placed)
        self.ids = ids
        return list(ids.tolist())

    def encode_ahead(self, picture: Tiles) -> bool:
        """Encode a picture of a later prompt, from any thread; False without room."""
        with self._lock:
            return self._have_room([picture]) and self._encode(picture, lambda: False)

    def _have_room(self, pictures: Sequence[Tiles]) -> bool:
        fresh = {p.digest: p.rows for p in pictures if p.digest not in self._firsts}
        return self._filled + sum(fresh.values()) <= len(self._rows.array)

    def _encode(self, picture: Tiles, must_end: Callable[[], bool]) -> bool:
        """Write the rows of a picture, unless it has rows; False if it must end.

        Only a picture whose rows are all written and finite is recorded.
        """
        if picture.digest in self._firsts:
            return True
        end, session = self._filled, self._open()
        for tile in picture.pixels:
            if must_end():
                return False
            inputs = encoder_inputs(tile, self._vision)
            with self._memory.exclusive_use():
                start = time.perf_counter()
                (rows,) = session.run(None, inputs, self._options)
                self.seconds += time.perf_counter() - start
            end += rows.shape[1]
            if end > self._filled + picture.rows or not np.isfinite(rows).all():
                raise ContractError(DAMAGED)
            self._rows.array[end - rows.shape[1] : end] = rows[0]
        if end < self._filled + picture.rows:
            raise ContractError(DAMAGED)
        self._rows.upload()
        self._firsts[picture.digest], self._filled = self._filled, end
        return True

    def _turn(self, pictures: list[tuple[int, int, int]]) -> None:
        """Set the rotation of each slot; pictures are (first slot, rows, lines).

        A row turns by the place where its picture begins, plus its line or column; the
        text after it follows the longer edge.
        """
        if not self._turns or pictures == self._turned:
            return
        slots, self._turned = len(self._turns[0].array), None
        turned = np.tile(np.arange(slots), (3, 1))  # By axis and slot.
        for first, rows, lines in pictures:
            begin, end, sizes = turned[0, first], first + rows, (lines, rows // lines)
            turned[:, first:end] = begin
            turned[1:, first:end] += np.indices(sizes).reshape(2, -1)
            turned[:, end:] = begin + max(sizes) + np.arange(slots - end)
        by_pair = turned[list(self._vision.axes)].T.astype(np.float32)
        angles: Float32s = by_pair * np.array(self._vision.frequencies, np.float32)
        for tensor, function in zip(self._turns, (np.cos, np.sin), strict=True):
            tensor.array[:] = function(angles)
            tensor.upload()
        self._turned = pictures
