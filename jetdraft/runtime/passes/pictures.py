"""Pictures in a prompt: they are read, cut into tiles, and encoded as rows.

A row of a picture is a word that no vocabulary has: its id is `Vision.first_row` or
more, and the target's graph reads it from a buffer in place of an embedding. So equal
pictures have equal ids, and a prompt's rows are kept like a text's.
"""

from __future__ import annotations

import base64
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

from jetdraft.bundle import GRID, MAX_PIXELS, SPLIT, Vision
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import ContractError, OptionError, printable, reason_of, refusing
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import HOST, Memory

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200  # Of the edges of a picture that becomes patches.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DATA = "data:image/"  # Begins the URL of an image in base64.
PictureInput = str | Path | bytes | npt.NDArray[np.uint8]
"""A file, its bytes, their `data:` URL, or uint8 [height, width, 3] in the order red,
green, blue; an image of Pillow too."""
NO_IMAGES = (
    "the bundle's model reads no images; leave them out, or export a model of "
    "docs/images.md with its preprocessor_config.json"
)
SMALLER = "make it smaller"
DAMAGED = "the encoder of images gives other rows than it must; export it again"
# What the encoder's run takes beyond its weights is given back after it, by device.
_FREE_AFTER_RUN = "memory.enable_memory_arena_shrinkage"
_ARENAS = {"cpu": "cpu:0", "cuda": "gpu:0"}
Size = tuple[int, int]  # Width and height.


def read_picture(given: object) -> npt.NDArray[np.uint8]:
    """Return the pixels of a picture, uint8 [height, width, 3]; `OptionError`.

    A file may be one of `FORMATS` with at most `MAX_PIXELS`; it is turned as its EXIF
    data says. As by transformers' `load_image`, which its users give files, an alpha
    channel of a file is dropped. Other transparency is white, also of Pillow's images,
    as by its processors.
    """
    if isinstance(given, np.ndarray):
        pixels = np.repeat(given[..., None], 3, 2) if given.ndim == 2 else given
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,) or not pixels.size:
            fact = f"an image must be uint8 [height, width, 3], not {given.dtype} "
            raise _refusal(f"{fact}{list(given.shape)}", "convert it")
        _check_size(pixels.shape[1], pixels.shape[0])
        return np.ascontiguousarray(pixels)
    pillow = _pillow()
    from PIL.ImageOps import exif_transpose

    too_big = _refusal(f"the image has more than {MAX_PIXELS} pixels", SMALLER)
    try:
        with refusing(too_big, pillow.DecompressionBombError), _opened(given) as image:
            _check_size(*image.size)
            upright = exif_transpose(image)
            if image is not given:
                upright = upright.convert("RGB")
            if upright.has_transparency_data:
                white = pillow.new("RGBA", upright.size, "white")
                upright = pillow.alpha_composite(white, upright.convert("RGBA"))
            return np.array(upright.convert("RGB"))
    except OptionError:
        raise
    except Exception as error:  # a damaged file may raise anything
        name = f"{printable(given, 200)}: " if isinstance(given, (str, Path)) else ""
        is_other = isinstance(error, pillow.UnidentifiedImageError)
        reason = "it is not an image" if is_other else reason_of(error)
        fact = f"the image cannot be read ({name}{reason})"
        raise _refusal(fact, f"give a file in {', '.join(FORMATS)}") from error


def _opened(given: object) -> Any:
    """A context with an image of Pillow; may raise any error."""
    pillow, file = _pillow(), given
    if isinstance(given, pillow.Image):
        return nullcontext(given)
    if isinstance(given, str) and given.startswith(_DATA):
        file = base64.b64decode(given.partition(",")[2])
    if isinstance(file, bytes):
        file = io.BytesIO(file)
    elif not isinstance(file, (str, Path)):
        raise _refusal(f"{type(given).__name__} is not an image", "give a file")
    elif str(file).startswith(("http:", "https:")):
        raise _refusal(f"{given} would be fetched", "give a file")
    elif Path(file).exists() and not Path(file).is_file():
        raise _refusal(f"{given} is not an image", "give a file")
    return pillow.open(file, formats=FORMATS)


def read_pictures(images: Sequence[object]) -> tuple[npt.NDArray[np.uint8], ...]:
    """Read several pictures, of at most `MAX_PIXELS` in all; raises `OptionError`."""
    if isinstance(images, (str, bytes)):
        raise _refusal("images must be a list", "write images=[...]")
    pictures, pixels = list[npt.NDArray[np.uint8]](), 0
    for image in images:
        pictures.append(read_picture(image))
        pixels += pictures[-1].size // 3
        _check_size(pixels, 1)
    return tuple(pictures)


def url_of(picture: object) -> str:
    """The pixels of a picture as a `data:` URL of a PNG; raises `OptionError`."""
    file = io.BytesIO()
    _pillow().fromarray(read_picture(picture)).save(file, "PNG")
    return f"{_DATA}png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        fact = f"the image has {width} x {height} pixels, at most {MAX_PIXELS} are read"
        raise _refusal(fact, SMALLER)


def _refusal(fact: str, fix: str) -> OptionError:
    return OptionError(f"{fact}; {fix}", "images")


def _pillow() -> Any:
    fact = "Pillow is missing, which reads images"
    with refusing(_refusal(fact, "pip install 'jetdraft[images]'"), ImportError):
        from PIL import Image
    return Image


class Tiles(NamedTuple):
    """What an encoder reads of a picture: uint8 [height, width, 3], row by row.

    The last of several tiles is the whole picture. `text` stands in the prompt, with a
    token for each of the `rows`; the rows of one tile of patches fill `lines`.
    """

    pixels: Sequence[npt.NDArray[np.uint8]]
    text: str
    rows: int
    digest: bytes
    lines: int


def cut(picture: npt.NDArray[np.uint8], vision: Vision) -> Tiles:
    """Cut a picture into tiles as the checkpoint's image processor does."""
    image, side = _pillow().fromarray(picture), vision.side

    def resized(source: Image, size: Size) -> Image:
        return source.resize(size, _pillow().Resampling[vision.filter.upper()])

    columns, rows, edge = 1, 1, side * vision.span
    if vision.edge and not vision.patch:
        image = resized(image, _with_longest(image.size, vision.edge, 2))
    if vision.tiling == SPLIT:
        longest = math.ceil(max(image.size) / side) * side
        image = resized(image, _with_longest(image.size, longest, side))
        columns, rows = image.width // side, image.height // side
    elif vision.tiling == GRID:
        squares = (max(vision.patch, round(n / side) * side) for n in image.size)
        if math.prod(squares) >= vision.large:
            columns, rows = _best_grid(image.size, vision)
    size = _fitting(image.size, vision) if vision.patch else (side, side)
    tiles = [np.asarray(resized(image, size))]
    if columns * rows > 1:
        array = np.asarray(resized(image, (columns * edge, rows * edge)))
        array = array.reshape(rows, edge, columns, edge, 3).swapaxes(1, 2)
        tiles = [*array.reshape(-1, edge, edge, 3), *tiles]
    digest = hashlib.sha256()
    for tile in tiles:
        digest.update(repr(tile.shape).encode() + tile.tobytes())
    count = sum(tile.size // 3 // side**2 for tile in tiles) * vision.rows
    text = _text(vision, [tile.shape[:2] for tile in tiles], columns)
    return Tiles(tiles, text, count, digest.digest(), size[1] // side)


def _fitting(size: Size, vision: Vision) -> Size:
    """The size of a picture in whole squares, of about this ratio."""
    side, area = vision.side, math.prod(size)
    if vision.edge:
        scale = max(1, max(size) / vision.edge)
        squares = (math.ceil(math.floor(edge / scale) / side) for edge in size)
        width, height = (side * max(1, count) for count in squares)
        return width, height
    if vision.least == vision.most:
        scale = math.sqrt(vision.most / area)
        width, height = (math.floor(scale * edge / side) for edge in size)
        if not width * height:
            longest = min(max(size) // min(size), vision.most // side**2)
            width, height = (longest, 1) if width else (1, longest)
        return side * width, side * height
    fewest = int(vision.tiling == GRID)  # LFM2-VL's edges have at least a square.
    if max(size) > MAX_RATIO * min(size):
        fact = f"the image is {size[0]} x {size[1]}, and longer than {MAX_RATIO} times"
        raise _refusal(f"{fact} its width or height", "cut it")
    width, height = (max(fewest, round(edge / side)) * side for edge in size)
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
    "pixels" are [n, patches, numbers], with "positions" int64 [n, patches, 2] (line,
    column), and "order" int64 [n] and "windows" int64 [n, patches] of squares sorted by
    windows.
    """
    mean, std = (np.array(x, np.float32) for x in (vision.mean, vision.std))
    scaled = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
    if not vision.patch:
        return {"pixels": np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])}
    edge, merged = vision.patch, vision.side // vision.patch
    lines, columns = pixels.shape[0] // edge, pixels.shape[1] // edge

    def in_squares(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[lines, columns, ...] as [squares, patches, ...]."""
        rest = array.shape[2:]
        split = (lines // merged, merged, columns // merged, merged, *rest)
        return array.reshape(split).swapaxes(1, 2).reshape(-1, merged**2, *rest)

    patches = scaled.reshape(lines, edge, columns, edge, 3).transpose(0, 2, 4, 1, 3)
    places = np.stack(np.meshgrid(*map(np.arange, (lines, columns)), indexing="ij"), -1)
    inputs = {
        "pixels": in_squares(patches.reshape(lines, columns, -1)),
        "positions": in_squares(places),
    }
    if vision.window:
        squares = places[::merged, ::merged] // merged // vision.window
        numbers = squares[..., 0] * (columns // merged) + squares[..., 1]
        order = np.argsort(numbers.reshape(-1), kind="stable")
        inputs["order"] = order
        inputs["windows"] = np.repeat(numbers.reshape(-1)[order][:, None], merged**2, 1)
    return {name: np.ascontiguousarray(array) for name, array in inputs.items()}


def _with_longest(size: Size, edge: int, step: int) -> Size:
    """The size with this longest edge; the other is a multiple of `step`."""
    ratio = size[0] / size[1]
    other = int(edge / ratio if ratio >= 1 else edge * ratio)
    pair = edge, max(1, math.ceil(other / step) * step)
    return pair if ratio >= 1 else pair[::-1]


def _best_grid(size: Size, vision: Vision) -> Size:
    """The columns and rows of tiles with the ratio nearest to the picture's."""
    (least, most), area = vision.tiles, math.prod(size)
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1)]
    grids = [grid for grid in grids if least <= math.prod(grid) <= most]
    best, difference = (1, 1), math.inf
    for grid in sorted(grids, key=math.prod):
        own = abs(size[0] / size[1] - grid[0] / grid[1])
        # Of equal grids the larger, while the picture fills half of its pixels.
        fills = area > 0.5 * (vision.side * vision.span) ** 2 * math.prod(grid)
        if own < difference or (own == difference and fills):
            best, difference = grid, own
    return best


def _text(vision: Vision, tiles: Sequence[tuple[int, ...]], columns: int) -> str:
    """What stands in the prompt for tiles of these heights and widths."""
    text, side, grid = vision.text, vision.side, ""
    *parts, whole = (
        text["break"].join([vision.token * (width // side * vision.rows)] * lines)
        for height, width in tiles
        for lines in (height // side,)
    )
    for place, part in enumerate(parts):
        row, column = (str(1 + number) for number in divmod(place, columns))
        grid += text["tile"].replace("{row}", row).replace("{column}", column) + part
        grid += text["line"] if place % columns == columns - 1 else ""
    grid += text["grid"] if parts else ""
    return f"{text['begin']}{grid}{text['whole']}{whole}{text['end']}"


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
        # First slots and rows of the pictures in `ids` that are read whole.
        self._whole: list[tuple[int, int]] = []
        self._reads_whole = contract.whole_pictures
        self.ids: Int64s = np.zeros(0, np.int64)
        self.seconds = 0.0
        self._lock = Lock()
        self._options = ort.RunOptions()
        if arena := _ARENAS.get(memory.device):
            self._options.add_run_config_entry(_FREE_AFTER_RUN, arena)
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
        self.ids, self._whole = np.zeros(0, np.int64), []
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
        self._whole = [place[:2] for place in placed if self._reads_whole]
        self.ids = ids
        return list(ids.tolist())

    def next_rows(self, slot: int, unread: int) -> tuple[int, int]:
        """The most rows that a pass may read from a slot on, and how many it must read.

        Where a picture that is read whole begins, both count its rows; elsewhere a pass
        need not read any, and it ends before the next such picture.
        """
        for first, rows in self._whole:
            if slot <= first:
                return (rows, rows) if slot == first else (min(first - slot, unread), 0)
        return unread, 0

    def put_into(self, tokens: Sequence[int], places: Sequence[int]) -> Sequence[int]:
        """The tokens of rows at these places of a text, with the ids of its rows."""
        if places[0] >= len(ids := self.ids):
            return tokens
        pairs = zip(tokens, places, strict=False)  # Padding has places, but no tokens.
        return [ids[at] if at < len(ids) else token for token, at in pairs]

    def boundary(self, kept: int) -> int:
        """How many of the kept rows can stay: none of a picture that they would cut."""
        cut_at = (first for first, rows in self._whole if first < kept < first + rows)
        return next(cut_at, kept)

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
