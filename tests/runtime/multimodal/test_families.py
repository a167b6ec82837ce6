"""The tokens of images are those that transformers' processors write."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from vision_models import PLACEHOLDERS, QWEN, config_of, image_processor_of, random_image, tokenizer_of

from aiakq.errors import AiakqError
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.multimodal.preprocessor import MediaInput, PromptMedia
from aiakq.runtime.multimodal.processor import ImagePreprocessor

#: Of each shape of tiles and rows that the tiny processors make.
IMAGES = [
    random_image(1),
    random_image(2, 24, 40),
    random_image(3, 16, 16),
    random_image(4, 80, 9),
    random_image(5, 5, 70),
]
#: Arguments of transformers' processors, which the published models have in their files.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "llava": {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_siglip": {"patch_size": 4, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
    "mistral3": {"patch_size": 4, "spatial_merge_size": 2},
    "internvl": {"image_seq_length": 4},
    "gemma3": {"image_seq_length": 4},
    **dict.fromkeys(QWEN, {}),
}


class ByteTokenizer:
    """The part of aiakq's tokenizer that a preprocessor uses."""

    encodes_chats = False

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    def raw_tokens(self, ids: list[int]) -> list[str]:
        return list(self.hf.convert_ids_to_tokens(ids))

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self.hf.decode(ids, skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.hf(text, add_special_tokens=add_special_tokens)["input_ids"])


def preprocessor(kind: str, **arguments: Any) -> PromptMedia:
    model = config_of(kind)
    names = {"idefics3": "Idefics3", "smolvlm": "SmolVLM", "mistral3": "Mistral3", "internvl": "InternVL"}
    names |= {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
    names |= {"gemma3": "Gemma3", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_vl_moe": "Qwen3VLMoe"}
    config = MultimodalConfig(
        architecture=f"{names.get(kind, 'Llava')}ForConditionalGeneration",
        token_ids={"image": model.image_token_id},
        raw=model.to_dict(),
        processor_kwargs=arguments,
    )
    tokenizer: Any = ByteTokenizer(tokenizer_of(kind))
    return PromptMedia(tokenizer, [ImagePreprocessor(config, image_processor_of(kind), tokenizer)])


def given(*images: Any) -> list[MediaInput]:
    return [MediaInput("image", image, "") for image in images]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llava", {}), ("llava_siglip", {}), ("idefics3", {}), ("idefics3", {"do_image_splitting": False})],
    ids=["llava", "llava_siglip", "idefics3 in tiles", "idefics3 whole"],
)
def test_prompts_have_the_tokens_of_transformers_processor(kind, options):
    module, name = {"idefics3": ("idefics3", "Idefics3Processor")}.get(kind, ("llava", "LlavaProcessor"))
    found = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    tokenizer = tokenizer_of(kind)
    processor = getattr(found, name)(image_processor_of(kind), tokenizer, **ARGUMENTS[kind])
    text = "".join(f"{number}: <image>\n" for number in range(len(IMAGES)))
    expected = processor(images=IMAGES, text=text, images_kwargs=dict(options))["input_ids"][0]
    ids = tokenizer(text)["input_ids"]
    assert preprocessor(kind, **options).expanded(ids, given(*IMAGES))[0] == list(expected)


@pytest.mark.parametrize("kind", ["smolvlm", "internvl", "mistral3", *QWEN])
def test_texts_of_images_are_those_of_transformers_processor(kind):
    """Their classes need packages for video; the function that writes the text does not."""
    if kind == "mistral3":
        pytest.importorskip("torchvision")
    module, name = {
        "smolvlm": ("smolvlm", "SmolVLM"),
        "internvl": ("internvl", "InternVL"),
        "mistral3": ("pixtral", "Pixtral"),
        "qwen2_vl": ("qwen2_vl", "Qwen2VL"),
        "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL"),
    }.get(kind, ("qwen3_vl", "Qwen3VL"))
    found = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    tokens = SimpleNamespace(
        image_token=PLACEHOLDERS[kind],
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        start_image_token="<img>",
        end_image_token="</img>",
        image_break_token="[IMG_BREAK]",
        image_processor=image_processor_of(kind),
        **ARGUMENTS[kind],
    )
    tokens.image_end_token = "[IMG_END]"
    one, tokenizer = preprocessor(kind), tokenizer_of(kind)
    options = {
        "smolvlm": {"return_row_col_info": True},
        "internvl": {"crop_to_patches": True},
        "mistral3": {"patch_size": {"height": 8, "width": 8}},
    }.get(kind, {})
    for image in IMAGES:
        processed = image_processor_of(kind)([image], return_tensors="np", **options)
        text = getattr(found, f"{name}Processor").replace_image_token(tokens, processed, 0)
        assert one.expanded(tokenizer(PLACEHOLDERS[kind])["input_ids"], given(image))[0] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("options", [{}, {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 4}], ids=["", "pan"])
def test_prompts_of_gemma_3_are_tokenized_with_the_line_ends_around_images(options):
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer = tokenizer_of("gemma3")
    processor = Gemma3Processor(image_processor_of("gemma3"), tokenizer, image_seq_length=4)
    mark, one = PLACEHOLDERS["gemma3"], preprocessor("gemma3", **options)
    texts = [f"a\n{mark}b", f"{mark}\n\nb\n", f"a\n\n\n{mark}\n{mark}", f"\n{mark}{mark}"]
    texts += [] if options else [f"a {mark} b", f"a{mark}"]
    for text in texts:
        images = [random_image(6, 40, 20), random_image(7, 16, 60)][: text.count(mark)]
        expected = processor(images=images, text=text, images_kwargs=dict(options))["input_ids"][0]
        found, items = one.expanded(tokenizer(text)["input_ids"], given(*images))
        assert found == list(expected), text
        assert all(item.is_whole for item in items)
        assert [found[first : first + count] for item in items for first, count in item.places] == (
            [[5] * 4] * (found.count(5) // 4)
        )


def test_what_an_image_of_gemma_3_cannot_follow():
    one = preprocessor("gemma3", do_pan_and_scan=True, pan_and_scan_min_crop_size=4)
    tokenizer, mark = tokenizer_of("gemma3"), PLACEHOLDERS["gemma3"]
    with pytest.raises(AiakqError, match="with pan and scan, an image has to begin a line"):
        one.expanded(tokenizer(f"a{mark}")["input_ids"], given(random_image(6, 40, 20)))
    with pytest.raises(AiakqError, match="it has the token 5, which stands for a part of an image"):
        one.expanded(tokenizer(f"a<image_soft_token>{mark}")["input_ids"], given(random_image(6, 40, 20)))


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        ("qwen2_vl", {"nonsense": 1}, "'nonsense' is no argument of Qwen2VLImageProcessor"),
        ("qwen2_vl", {"patch_size": 8}, "'patch_size' is set by the model"),
        ("qwen2_vl", {"min_pixels": "many"}, "Field 'min_pixels' expected int, got str"),
        ("qwen2_vl", {"size": {"longest": 3}}, "the model's image processor rejects it .*longest"),
        ("llava", {"data_format": "channels_last"}, "'data_format' is set by the model"),
        ("llava", {"min_pixels": 64}, "'min_pixels' is no argument of CLIPImageProcessor"),
        ("internvl", {"crop_to_patches": False}, "'crop_to_patches' is set by the model"),
        ("idefics3", {"return_row_col_info": False}, "'return_row_col_info' is set by the model"),
    ],
)
def test_arguments_that_the_processor_does_not_take_are_refused_by_name(kind, arguments, reason):
    with pytest.raises(AiakqError, match=reason) as caught:
        preprocessor(kind, **arguments)
    assert caught.value.id == "bad_option" and "\n" not in str(caught.value.message)


def test_the_remedy_for_an_unknown_argument_lists_the_known_ones():
    with pytest.raises(AiakqError) as caught:
        preprocessor("qwen2_vl", nonsense=1)
    hint = caught.value.remedy
    assert "max_pixels, min_pixels" in hint and "patch_size" not in hint and "return_tensors" not in hint


def test_a_worker_of_the_tokenizer_does_not_start_with_a_wrong_argument(monkeypatch):
    """Other failures leave text to be served; this one is a mistake of the command line."""
    from aiakq.server.process.text_loading import load_media

    def load(config: Any, tokenizer: Any) -> PromptMedia:
        return preprocessor("llava", nonsense=1)

    monkeypatch.setattr(ImagePreprocessor, "load", load)
    setup: Any = SimpleNamespace(media=SimpleNamespace(refusal="", kind="image", max_items={"image": 1}, refusals={}))
    loaded: Any = SimpleNamespace(media_failures={})
    tokenizer: Any = None
    with pytest.raises(AiakqError, match="--mm-processor-kwargs is .*'nonsense' is no argument"):
        load_media(setup, tokenizer, [], loaded)
