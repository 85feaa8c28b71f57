"""The tokenizers and chat templates of the tiny checkpoints: byte-level BPE with each family's own special tokens."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
# Those of other families, by the names under which their processors ask the tokenizer for them.
OMNI_TOKENS = {
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>", "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|AUDIO|>",
}  # fmt: skip
OMNI3_TOKENS = {
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>", "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
}  # fmt: skip
INTERNVL_TOKENS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
SMOLVLM_TOKENS = {
    "end_of_utterance_token": "<end_of_utterance>", "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>", "global_image_token": "<global-img>",
}  # fmt: skip
TILE_TOKENS = {"smolvlm": tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))}
CLOSING = {"smolvlm": "<end_of_utterance>"}
"""What ends an assistant's turn where it is not ``<|im_end|>``."""
LLAVA_TOKENS = {"image_token": "<image>", "video_token": "<video>"}
OWN_TOKENS = {
    "llava_onevision": LLAVA_TOKENS,
    "smolvlm": SMOLVLM_TOKENS,
    "qwen2_5_omni": OMNI_TOKENS,
    "qwen3_omni_moe": OMNI3_TOKENS,
    "internvl": INTERNVL_TOKENS,
}

# Answers stand alone, words of a question follow a space: each becomes one token.
ANSWERS = (
    "red green blue yellow purple orange white black circle square triangle cross ring star diamond none "
    "left right up down top bottom middle yes no system user assistant Answer What Which How Where"
)
QUESTIONS = (
    "briefly what where which how many is are the in of to a colour shape shapes picture map move "
    "red green blue yellow circle square triangle cross none left right up down top bottom goal hole"
)
# What a family is told besides: the times of a video's frames, the words for sounds.
MORE_QUESTIONS = {
    "qwen2_5_omni": "video sound hear see tone high low loud soft",
    "qwen3_omni_moe": "video sound hear see tone high low loud soft",
    "qwen3_vl": "seconds",
    "qwen3_vl_moe": "seconds",
    "internvl": "Frame",
    "smolvlm": "User Assistant You provided following series frames from video Frame",
}
# Added tokens, as <think> is one of Qwen3's: `<answer>red</answer>` is three tokens.
TAGS = ("<answer>", "</answer>", "<think>", "</think>", "<action>", "</action>")
# Qwen's own way of cutting text into pieces.
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SYSTEM_PROMPT = "Answer briefly."

TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif block.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
)
OMNI_TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif block.type == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif block.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
)
OMNI3_TURN = TURN.replace(
    "{% elif block.type == 'text' %}",
    "{% elif block.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% elif block.type == 'text' %}",
)
SMOLVLM_TURN = (
    "{{ message.role | capitalize }}{% if message.content[0].type == 'image' %}:{% else %}{{ ': ' }}{% endif %}"
    "{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}{% elif block.type == 'image' %}<image>"
    "{% elif block.type == 'video' %}<video>{% endif %}{% endfor %}<end_of_utterance>\n"
)
INTERNVL_TURN = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<IMG_CONTEXT>{{ '\n' }}{% elif block.type == 'video' %}<video>{{ '\n' }}"
    "{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
)
LLAVA_TURN = INTERNVL_TURN.replace("<IMG_CONTEXT>", "<image>")
# Qwen3's own way: thoughts of assistant turns before the last question are not shown again.
THOUGHTLESS_TURN = (
    "{% set roles = messages | map(attribute='role') | list %}"
    "{% set last = roles[::-1].index('user') if 'user' in roles else 0 %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else "
    "message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join %}"
    "{% if message.role == 'assistant' and loop.revindex0 > last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n" + SYSTEM_PROMPT + "<|im_end|>\n{% endif %}"
)  # fmt: skip
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH_TURN = "{% for message in messages %}" + TURN + "{% endfor %}"
TEMPLATES = {
    "internvl": "{% for message in messages %}" + INTERNVL_TURN + "{% endfor %}" + GENERATION,
    "llava_onevision": "{% for message in messages %}" + LLAVA_TURN + "{% endfor %}" + GENERATION,
    "smolvlm": "<|im_start|>{% for message in messages %}" + SMOLVLM_TURN + "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    "qwen2_5_omni": DEFAULT_SYSTEM + "{% for message in messages %}" + OMNI_TURN + "{% endfor %}" + GENERATION,
    "qwen3_omni_moe": "{% for message in messages %}" + OMNI3_TURN + "{% endfor %}" + GENERATION,
    "qwen2_5_vl": DEFAULT_SYSTEM + EACH_TURN + GENERATION,
    "qwen3_vl": EACH_TURN + GENERATION,
    "qwen3_vl_moe": EACH_TURN + GENERATION,
    "qwen2": DEFAULT_SYSTEM + EACH_TURN + GENERATION,
    "qwen3": THOUGHTLESS_TURN + GENERATION,
}


def tiny_tokenizer(family: str, longest: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the family's special tokens, trained on the words of the shipped tasks."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    specials = special_tokens(family)
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(TAGS),
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(family), trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    others = [token for token in specials if token not in (closing_token(family), "<|endoftext|>")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=closing_token(family),
        pad_token="<|endoftext|>",
        extra_special_tokens=others,
        **({"model_specific_special_tokens": dict(OWN_TOKENS[family])} if family in OWN_TOKENS else {}),
        chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )


def special_tokens(family: str) -> tuple[str, ...]:
    """The special tokens of a family, in the order of their ids."""
    if family not in OWN_TOKENS:
        return SPECIAL_TOKENS
    return (*SPECIAL_TOKENS[:3], *OWN_TOKENS[family].values(), *TILE_TOKENS.get(family, ()))


def closing_token(family: str) -> str:
    """What ends an assistant's turn."""
    return CLOSING.get(family, "<|im_end|>")


def _corpus(family: str) -> list[str]:
    """Every word often enough to become one token."""
    questions = f"{QUESTIONS} {MORE_QUESTIONS.get(family, '')}"
    return [*ANSWERS.split() * 8, *(f" {word}" for word in questions.split() * 8)]
