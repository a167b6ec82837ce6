"""How each family writes an image in its prompt: which tokens take the place of the placeholder.

The rules are those of transformers' processors, which need packages for video that images do not. The numbers come from
config.json, as those of the encoder do. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

#: Special tokens of the tokenizer by the name under which a tokenizer's config has them.
SpecialToken = Callable[[str, str], str]


class ImageText(ABC):
    """How a family writes an image.

    defaults  arguments of its image processor unless --mm-processor-kwargs has others.
    options   arguments of its image processor.
    tensors   outputs of the image processor that the encoder reads.
    placeholder_key  key of config.json with the token that stands for an image in a prompt; "" if that is the token of
                     which there is one for each embedding.
    is_whole  see ``MediaItem``.
    """

    defaults: dict[str, Any] = {}
    options: dict[str, Any] = {}
    tensors: tuple[str, ...] = ("pixel_values",)
    placeholder_key = ""
    is_whole = False

    def __init__(self, config: Mapping[str, Any], image_token: str, special_token: SpecialToken) -> None:
        """special_token: returns a token by its name in the tokenizer's config, or the default."""
        self.config, self.vision = config, config["vision_config"]
        self.image_token, self.special_token = image_token, special_token

    @abstractmethod
    def text(self, processed: Mapping[str, Any]) -> str:
        """Return the text of one image, with a placeholder for each embedding. ``processed`` is what its processor has
        returned for it alone.
        """

    def grid(self, processed: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return the rows and columns of its placeholders if their positions depend on them; None if they do not."""
        return None


class LlavaText(ImageText):
    """One placeholder for each patch: of a square image, or in rows with Pixtral's encoder."""

    def text(self, processed: Mapping[str, Any]) -> str:
        """See ImageText."""
        height, width = processed["pixel_values"].shape[-2:]
        patch = side(self.vision["patch_size"])
        # The class token is the first of CLIP's, and "default" leaves it out; SigLIP has none.
        has_class_token = self.vision.get("model_type") == "clip_vision_model"
        keeps_first = self.config.get("vision_feature_select_strategy", "default") != "default"
        count: int = int(height // patch) * int(width // patch) + has_class_token - (not keeps_first)
        return self.image_token * count


class PixtralText(ImageText):
    """Rows of placeholders, with a token between them and another after the last (Pixtral, Mistral 3)."""

    tensors = ("pixel_values", "image_sizes")

    def __init__(self, config: Mapping[str, Any], image_token: str, special_token: SpecialToken) -> None:
        super().__init__(config, image_token, special_token)
        self.patch = side(self.vision["patch_size"]) * int(config.get("spatial_merge_size") or 1)
        self.options = {"patch_size": {"height": self.patch, "width": self.patch}}

    def text(self, processed: Mapping[str, Any]) -> str:
        """See ImageText."""
        [(height, width)] = processed["image_sizes"]
        if int(height) // self.patch * (int(width) // self.patch) == 1 and self.config["model_type"] == "mistral3":
            raise ValueError("it is too small: transformers' Mistral 3 encodes no image of one token")
        row = self.image_token * (int(width) // self.patch)
        line, end = self.special_token("image_break_token", "[IMG_BREAK]"), "[IMG_END]"
        return line.join([row] * (int(height) // self.patch)) + self.special_token("image_end_token", end)


class Gemma3Text(ImageText):
    """The whole image between two tokens and empty lines, and parts of it after that if it is long (pan and scan)."""

    defaults = {
        **{"do_convert_rgb": True, "do_pan_and_scan": False, "pan_and_scan_min_crop_size": 256},
        **{"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2},
    }
    placeholder_key = "boi_token_index"
    is_whole = True

    def text(self, processed: Mapping[str, Any]) -> str:
        """See ImageText."""
        [crops] = processed["num_crops"]
        begin = self.special_token("boi_token", "<start_of_image>")
        end = self.special_token("eoi_token", "<end_of_image>")
        placeholders = self.image_token * int(self.config["mm_tokens_per_image"])
        one = f"\n\n{begin}{placeholders}{end}\n\n"
        if not crops:
            return one
        several = " ".join([one] * int(crops))
        return f"Here is the original image {one} and here are some crops to help you see better {several}"


class Idefics3Text(ImageText):
    """Tiles in rows and columns, and the whole image after them (Idefics 3, SmolVLM)."""

    options = {"return_row_col_info": True}
    tensors = ("pixel_values", "pixel_attention_mask")

    def text(self, processed: Mapping[str, Any]) -> str:
        """See ImageText."""
        [[rows]], [[columns]] = processed["rows"], processed["cols"]
        patches = side(self.vision["image_size"]) // side(self.vision["patch_size"])
        tile = self.image_token * int(patches**2 / int(self.config.get("scale_factor", 2)) ** 2)
        around = self.special_token("fake_image_token", "<fake_token_around_image>")
        whole = f"{around}{self.special_token('global_image_token', '<global-img>')}{tile}{around}"
        if not (rows or columns):
            return whole
        lines = (
            "".join(f"{around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


class InternVLText(ImageText):
    """The placeholders of all tiles between two tokens."""

    options = {"crop_to_patches": True}

    def text(self, processed: Mapping[str, Any]) -> str:
        """See ImageText."""
        patches = side(self.vision["image_size"]) // side(self.vision["patch_size"])
        tile = int(patches**2 * float(self.config.get("downsample_ratio", 0.5)) ** 2)
        start = self.special_token("start_image_token", "<img>")
        end = self.special_token("end_image_token", "</img>")
        return f"{start}{self.image_token * (tile * len(processed['pixel_values']))}{end}"


class QwenText(ImageText):
    """One placeholder for each square of merged patches, in rows (Qwen2-VL, 2.5-VL, 3-VL and 3.5)."""

    tensors = ("pixel_values", "image_grid_thw")

    def text(self, processed: Mapping[str, Any]) -> str:
        """See ImageText."""
        rows, columns = self.grid(processed)
        return self.image_token * (rows * columns)

    def grid(self, processed: Mapping[str, Any]) -> tuple[int, int]:
        """See ImageText."""
        [(_, height, width)] = processed["image_grid_thw"]
        merged = int(self.vision.get("spatial_merge_size") or 2)
        return int(height) // merged, int(width) // merged


def image_text(
    architecture: str, config: Mapping[str, Any], image_token: str, special_token: SpecialToken
) -> ImageText:
    """Return how the family of ``architecture`` writes images. ``config`` is config.json with all defaults."""
    kind: type[ImageText] = FAMILIES[architecture]
    if kind is LlavaText and config["vision_config"].get("model_type") == "pixtral":
        kind = PixtralText
    return kind(config, image_token, special_token)


#: Architecture -> how it writes images.
FAMILIES: dict[str, type[ImageText]] = {
    "Gemma3ForConditionalGeneration": Gemma3Text,
    "Idefics3ForConditionalGeneration": Idefics3Text,
    "InternVLForConditionalGeneration": InternVLText,
    "LlavaForConditionalGeneration": LlavaText,
    "Mistral3ForConditionalGeneration": PixtralText,
    "SmolVLMForConditionalGeneration": Idefics3Text,
    "Qwen2VLForConditionalGeneration": QwenText,
    "Qwen2_5_VLForConditionalGeneration": QwenText,
    "Qwen3VLForConditionalGeneration": QwenText,
    "Qwen3VLMoeForConditionalGeneration": QwenText,
    "Qwen3_5ForConditionalGeneration": QwenText,
    "Qwen3_5MoeForConditionalGeneration": QwenText,
}


def side(size: Any) -> int:
    """Return the side of a square, given as a number or as height and width."""
    return int(size[0] if isinstance(size, (list, tuple)) else size)
