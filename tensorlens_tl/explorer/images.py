"""Images that the page shows: those that Python gave, and files that were uploaded, as the model reads them."""

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.drawing.heat_maps import picture_of
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.passes import FrozenPass

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_FILE = 4 * 2**20
"""Bytes of an uploaded file."""
MOST_PIXELS = 16 * 10**6
"""Pixels of an uploaded picture; a larger one is refused before it is decoded."""
SMALL = 64
"""Pixels of the longer side of a small picture, about."""
MOST_SMALL = 60
"""Small pictures that the page offers."""
MOST_IMAGES = 16
"""Uploaded images that stay in memory."""

SIGNATURES = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG"}
"""How the files that are read begin."""


class Images:
    """Images by name, each `[1, channel, height, width]`.

    Args:
        model: reads them; its config says their size and channels.
        given: images that the page offers, `[image, channel, height, width]`, prepared as the model reads them.
        processor: the model's image processor: called with a picture it returns ``{"pixel_values": …}``. None takes
            the model's, where it has one; else pictures are resized, and their values are 0 to 1.

    Raises:
        InvalidInputError: `given` is no batch of images.

    Attributes:
        given: the names of the images that Python gave.
        processor: what prepares uploaded pictures; None where they are resized.
    """

    def __init__(self, model: Any, given: Any = None, processor: Callable[..., Any] | None = None) -> None:
        self._config = getattr(getattr(model, "original_model", None), "config", None)
        self.processor = processor or getattr(model, "processor", None)
        self._uploads: OrderedDict[str, Tensor] = OrderedDict()
        self._given: dict[str, Tensor] = {}
        if given is not None:
            if not isinstance(given, Tensor) or given.ndim != 4:
                raise InvalidInputError("explore: images are a tensor [image, channel, height, width].")
            self._given = {str(number): image[None] for number, image in enumerate(given)}

    @property
    def given(self) -> list[str]:
        """The names of the images that Python gave."""
        return list(self._given)

    @property
    def pictures(self) -> list[str]:
        """Small pictures of the first images that Python gave; none where they have neither one channel nor three."""
        images = list(self._given.values())[:MOST_SMALL]
        if not images or images[0].shape[1] not in (1, 3):
            return []
        step = max(1, max(images[0].shape[2:]) // SMALL)
        return [picture_of(image[0, :, ::step, ::step].detach().cpu().double().numpy()) for image in images]

    def pixels(self, name: str) -> Float[Tensor, "1 channel height width"]:
        """An image as the model reads it."""
        image = self._given.get(name, self._uploads.get(name))
        if image is None:
            raise InvalidInputError(f"explorer: image is {name[:80]!r}, which is not here any more; upload it again.")
        return image

    def add(self, file: bytes) -> str:
        """Decode a PNG or JPEG file, and return the name of the image."""
        if find_spec("PIL") is None:
            raise InvalidInputError("explorer: uploads need Pillow, not installed here: pip install pillow.")
        name = f"upload-{hashlib.sha256(file).hexdigest()[:16]}"
        if name not in self._uploads:
            self._uploads[name] = self._prepared(decoded(file))
        self._uploads.move_to_end(name)
        while len(self._uploads) > MOST_IMAGES:
            self._uploads.popitem(last=False)
        return name

    def _prepared(self, picture: "Image") -> Float[Tensor, "1 channel height width"]:
        """A picture as the model reads it, by its processor or resized."""
        if self.processor is not None:
            return torch.as_tensor(self.processor(picture, return_tensors="pt")["pixel_values"])
        size = getattr(self._config, "image_size", None)
        channels = getattr(self._config, "num_channels", None)
        if size is None or channels not in (1, 3):
            raise InvalidInputError(
                "explorer: the model's config does not say which images it reads; pass processor= to tlens.explore."
            )
        height, width = size if isinstance(size, list | tuple) else (size, size)
        resized = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
        values = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).float() / 255
        return values.reshape(1, height, width, channels).permute(0, 3, 1, 2).contiguous()


def decoded(file: bytes) -> "Image":
    """A picture, 8 bits of red, green and blue, from the bytes of a PNG or JPEG file.

    It is turned as the file's EXIF data says, 16 bits of grey become 8, and what is transparent lies on white.
    """
    from PIL import Image, ImageOps

    kind = next((kind for start, kind in SIGNATURES.items() if file.startswith(start)), None)
    if kind is None:
        raise InvalidInputError("explorer: the file is no PNG and no JPEG; convert it first.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here
            picture = Image.open(BytesIO(file), formats=(kind,))
            width, height = picture.size
            if width * height <= MOST_PIXELS:
                return _opaque(ImageOps.exif_transpose(picture))
    except Exception as error:  # Pillow raises many kinds for broken files
        raise InvalidInputError(f"explorer: the {kind} file cannot be read ({type(error).__name__}).") from error
    raise InvalidInputError(f"explorer: the picture has {width} × {height} pixels; at most {MOST_PIXELS} are read.")


def _opaque(picture: "Image") -> "Image":
    """A picture in red, green and blue, on white where it is transparent."""
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits of grey; what Pillow converts itself is cut off at 255
        values = np.asarray(picture).astype(np.float64)
        grey = Image.fromarray((values / 257).round().astype(np.uint8))
        clear = picture.info.get("transparency")
        if isinstance(clear, int):
            grey.paste(255, mask=Image.fromarray(values == clear))
        return grey.convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def on_image(frozen: FrozenPass) -> dict[str, Any]:
    """The image of a pass as pictures (one in greys, to lie under scores), and how its patches lie on it."""
    image = frozen.prompt.image
    patches = frozen.view.patches
    if image is None or patches is None:
        raise UnsupportedModelError("explorer: this model's patches do not tile its image; they are not drawn.")
    rows, columns = patches.grid(frozen.prompt.kwargs["input"])
    values = image[0].double().numpy()
    return {
        "picture": picture_of(values),
        "greys": picture_of(values, greys=True),
        "rows": rows,
        "columns": columns,
        "special": frozen.prompt.special,
    }
