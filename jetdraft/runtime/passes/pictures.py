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
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import GRID, PATCHES, SPLIT, Vision
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import OptionError, reason_of
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import HOST, Memory

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26  # Of a picture; known before it is decoded.
MAX_RATIO = 200  # Of the edges of a picture that becomes patches.
MAX_EDGE = 4096  # Pixels of the longest edge before a picture is split.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
PictureInput = str | Path | bytes | npt.NDArray[np.uint8]
"""A file, its bytes, or uint8 [height, width, 3] in the order red, green, blue; an
image of Pillow too."""
NO_IMAGES = (
    "the bundle's model reads no images; leave them out, or export a model of "
    "docs/images.md with its preprocessor_config.json"
)
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
    lines: int = 0

    @property
    def digest(self) -> bytes:
        shape = np.array(self.pixels.shape).tobytes()
        return hashlib.sha256(shape + self.pixels.tobytes()).digest()


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
        return Tiles(whole[None], text, count, height // side)
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
    return Tiles(tiles, _text(vision, columns, rows), len(tiles) * vision.rows)


def _fitting(size: Size, vision: Vision) -> Size:
    """The size in whole squares with `least` to `most` pixels and about this ratio."""
    side, area = vision.side, size[0] * size[1]
    if max(size) > MAX_RATIO * min(size):
        fact = f"the image is {size[0]} x {size[1]}, and longer than {MAX_RATIO} times"
        raise _refusal(f"{fact} its width or height", "cut it")
    width, height = (round(edge / side) * side for edge in size)
    if width * height > vision.most:
        scale = math.sqrt(area / vision.most)
        down = (math.floor(edge / scale / side) * side for edge in size)
        width, height = (max(side, edge) for edge in down)
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
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
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
            text["tile"].format(row=row + 1, column=column + 1) + own
            for column in range(columns)
        )
        for row in range(rows if columns * rows > 1 else 0)
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
        self._open, self._vision, self._memory = open_session, vision, memory
        tensors = memory.tensors(contract.picture_inputs)
        self.values = {name: tensor.value for name, tensor in tensors.items()}
        self._rows, *self._turns = tensors.values()
        self._firsts: dict[bytes, int] = {}  # The first row of each encoded picture.
        self._filled = 0
        self.ids: Int64s = np.zeros(0, np.int64)
        self.seconds = 0.0
        self._lock = Lock()
        self._turn([], [])

    def encode(
        self, prompt: Sequence[int], token: int, pictures: Sequence[Tiles]
    ) -> bool:
        """Set `ids`, and encode what is new; False if earlier ids lost their rows."""
        with self._lock:
            if not (has_room := self._encode_new(pictures)):
                self._firsts, self._filled = {}, 0
                self._encode_new(pictures)
        if len(self.ids) or pictures:
            self.ids = np.array(prompt if pictures else (), np.int64)
            places = np.flatnonzero(self.ids == token)
            self._turn(places.tolist(), pictures)
            firsts = (self._firsts[each.digest] for each in pictures)
            rows = [
                np.arange(first, first + each.rows)
                for first, each in zip(firsts, pictures, strict=True)
            ]
            self.ids[places] = self._vision.first_row + np.concatenate([[], *rows])
        return has_room

    def encode_ahead(self, picture: Tiles) -> bool:
        """Encode a picture of a later prompt, from any thread; False without room."""
        with self._lock:
            return self._encode_new([picture])

    def _encode_new(self, pictures: Sequence[Tiles]) -> bool:
        """Encode the pictures that have no rows; does nothing if they do not fit."""
        fresh = {p.digest: p for p in pictures if p.digest not in self._firsts}
        needed = sum(each.rows for each in fresh.values())
        if self._filled + needed > len(self._rows.array):
            return False
        for digest, picture in fresh.items():
            first, self._filled = self._filled, self._filled + picture.rows
            self._encode(picture, first)
            self._firsts[digest] = first
        if fresh:
            self._rows.upload()
        return True

    def _encode(self, picture: Tiles, first: int) -> None:
        """Write the rows of a picture behind those before `first`."""
        session = self._open()
        for tile in picture.pixels:
            inputs = encoder_inputs(tile, self._vision)
            with self._memory.exclusive_use():
                start = time.perf_counter()
                (rows,) = session.run(None, inputs)
                self.seconds += time.perf_counter() - start
            self._rows.array[first : first + rows.shape[1]] = rows[0]
            first += rows.shape[1]

    def _turn(self, places: Sequence[int], pictures: Sequence[Tiles]) -> None:
        """Set the rotation of each slot for a prompt with rows at these places.

        A row turns by the place where its picture begins, plus its line or column; the
        text after it follows the longer edge.
        """
        if not self._turns:
            return
        slots, start = len(self._turns[0].array), 0
        turned = np.tile(np.arange(slots), (3, 1))  # By axis and slot.
        for picture in pictures:
            first, rows = places[start], picture.rows
            sizes = picture.lines, rows // picture.lines
            begin, end, start = turned[0, first], first + rows, start + rows
            turned[:, first:end] = begin
            turned[1:, first:end] += np.indices(sizes).reshape(2, -1)
            turned[:, end:] = begin + max(sizes) + np.arange(slots - end)
        by_pair = turned[list(self._vision.axes)].T.astype(np.float32)
        angles: Float32s = by_pair * np.array(self._vision.frequencies, np.float32)
        for tensor, function in zip(self._turns, (np.cos, np.sin), strict=True):
            tensor.array[:] = function(angles)
            tensor.upload()
