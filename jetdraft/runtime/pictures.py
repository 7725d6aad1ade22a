"""Pictures in a prompt: they are read, cut into tiles, and encoded as rows.

A row of a picture is a word that no vocabulary has: its id is `Vision.first_row` or
more, and the target's graph reads it from a buffer in place of an embedding. So equal
pictures have equal ids, and rows of the prompt are kept as those of any text.
"""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import GRID, SPLIT, Vision
from jetdraft.contracts.step_contract import PICTURES, StepContract
from jetdraft.contracts.tensors import Int64s
from jetdraft.errors import OptionError, reason_of
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import HOST, Memory

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26  # Of a picture; known before it is decoded.
MAX_EDGE = 4096  # Pixels of the longest edge before a picture is split.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
PictureInput = str | Path | bytes | npt.NDArray[np.uint8]
"""A file, its bytes, or uint8 [height, width, 3] in the order red, green, blue; an
image of Pillow too."""
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
            given = Path(given).read_bytes()
        if isinstance(given, bytes):
            given = pillow.open(io.BytesIO(given), formats=FORMATS)
        if not isinstance(given, pillow.Image):
            raise _refusal(f"{type(given).__name__} is not an image", "give a file")
        _check_size(*given.size)
        return np.array(exif_transpose(given).convert("RGB"))
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
    """What an encoder reads of a picture: uint8 [n, side, side, 3], row by row.

    Above one tile, the last is the whole picture. `text` stands in the prompt.
    """

    pixels: npt.NDArray[np.uint8]
    text: str

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.pixels.tobytes()).digest()


def cut(picture: npt.NDArray[np.uint8], vision: Vision) -> Tiles:
    """Cut a picture into tiles as the checkpoint's image processor does."""
    image, side = _pillow().fromarray(picture), vision.side

    def resized(source: Image, size: Size) -> Image:
        return source.resize(size, _pillow().Resampling[vision.filter.upper()])

    if vision.tiling == SPLIT:
        image = resized(image, _longest(image.size, vision.edge))
        width, height = _multiples(image.size, side)
        image = resized(image, (width, height))
        columns, rows = width // side, height // side
        tiled = image
    elif vision.tiling == GRID:
        columns, rows = _best_grid(image.size, vision)
        tiled = resized(image, (columns * side, rows * side))
    else:
        columns = rows = 1
        if vision.edge:
            image = resized(image, _longest(image.size, vision.edge))
        tiled = resized(image, (side, side))
    array = np.asarray(tiled).reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    tiles = array.reshape(-1, side, side, 3)
    if len(tiles) > 1:
        whole = np.asarray(resized(image, (side, side)))
        tiles = np.concatenate([tiles, whole[None]])
    return Tiles(np.ascontiguousarray(tiles), _text(vision, columns, rows))


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
    most, area = vision.most_tiles, size[0] * size[1]
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1)]
    grids = [grid for grid in grids if vision.least_tiles <= math.prod(grid) <= most]
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
    """The buffer of the rows of pictures, which an encoder fills, in `seconds`.

    `ids` int64 [n] is the prompt of the current generation, with the ids of its rows;
    it is empty for a prompt without pictures.
    """

    def __init__(
        self,
        open_session: Callable[[], ort.InferenceSession],
        vision: Vision,
        contract: StepContract,
        memory: Memory = HOST,
    ) -> None:
        self._open, self._vision, self._memory = open_session, vision, memory
        spec = contract.pictures
        assert spec is not None
        self._buffer = memory.tensor(spec.shape_for(), spec.dtype)
        self.values = {PICTURES: self._buffer.value}
        self._firsts: dict[bytes, int] = {}  # The first row of each encoded picture.
        self._filled = 0
        self.ids: Int64s = np.zeros(0, np.int64)
        self.seconds = 0.0

    def encode(
        self, prompt: Sequence[int], token: int, pictures: Sequence[Tiles]
    ) -> bool:
        """Set `ids`, and encode what is new; False if earlier ids lost their rows."""
        self.ids = np.array(prompt if pictures else (), np.int64)
        wanted = {each.digest: each for each in pictures}
        fresh = [digest for digest in wanted if digest not in self._firsts]
        slots = len(self._buffer.array)
        has_room = self._filled + self._count(wanted[d] for d in fresh) <= slots
        if not has_room:
            self._firsts, self._filled, fresh = {}, 0, [*wanted]
        for digest in fresh:
            first = self._filled
            for tile in wanted[digest].pixels:
                self._encode_tile(tile)
            self._firsts[digest] = first
        if fresh:
            self._buffer.upload()
        places = np.flatnonzero(self.ids == token)
        rows = [
            np.arange(self._firsts[each.digest], self._firsts[each.digest] + self._count([each]))
            for each in pictures
        ]
        if pictures:
            self.ids[places] = self._vision.first_row + np.concatenate(rows)
        return has_room

    def _count(self, pictures: Any) -> int:
        return sum(len(each.pixels) for each in pictures) * self._vision.rows

    def _encode_tile(self, tile: npt.NDArray[np.uint8]) -> None:
        vision, session = self._vision, self._open()
        mean, std = (np.array(x, np.float32) for x in (vision.mean, vision.std))
        pixels = (tile.astype(np.float32) * np.float32(1 / 255) - mean) / std
        name = session.get_inputs()[0].name
        with self._memory.exclusive_use():
            start = time.perf_counter()
            (rows,) = session.run(None, {name: pixels.transpose(2, 0, 1)[None]})
            self.seconds += time.perf_counter() - start
        end = self._filled + vision.rows
        self._buffer.array[self._filled : end] = rows[0]
        self._filled = end
