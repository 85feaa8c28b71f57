"""Chat templates that behave as the published ones do, written for these tests.

Qwen2.5-VL and Omni: a default system prompt, media markers, strings or blocks. Qwen3-VL: no default prompt, tool answers in
a user turn. Qwen3 (text): thoughts of assistant turns before the last question are dropped, and the generation prompt of
the thinking models opens a thought. GLM-4.1V: no mark ends a turn. As published it takes blocks in a user's turn only; that
of GLM-4.5V drops thoughts as Qwen3's does.
"""

MEDIA = (
    "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
PROMPT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"

QWEN2_5_VL = (
    MEDIA + "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' }}"
    "{%- endfor -%}" + PROMPT
)

QWEN2_5_OMNI = (
    QWEN2_5_VL.replace("vision_start", "vision_bos")
    .replace("vision_end", "vision_eos")
    .replace("image_pad", "IMAGE")
    .replace("video_pad", "VIDEO")
    .replace(
        "{%- elif 'text' in part -%}",
        "{%- elif part.type == 'audio' or 'audio' in part -%}<|audio_bos|><|AUDIO|><|audio_eos|>"
        "{%- elif 'text' in part -%}",
    )
)

QWEN3_VL = (
    MEDIA + "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' }}"
    "{%- endif -%}{%- endfor -%}" + PROMPT
)

QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1, looking=true) -%}"
    "{%- for message in messages[::-1] -%}{%- if ns.looking and message.role == 'user' -%}"
    "{%- set ns.looking = false -%}{%- set ns.last = messages|length - 1 - loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- set thought = '' -%}{%- set said = message.content -%}"
    "{%- if '</think>' in said -%}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) -%}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + said }}"
    "{%- else -%}{{ '<|im_start|>assistant\\n' + said }}{%- endif -%}{{ '<|im_end|>\\n' }}"
    "{%- else -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}" + PROMPT
)

THINKING = QWEN3.replace(
    "'<|im_start|>assistant\\n' }}{%- endif -%}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)

GLM4V = (
    MEDIA.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>").replace(
        "<|vision_start|><|video_pad|><|vision_end|>", "<|begin_of_video|><|video|><|end_of_video|>"
    )
    + "[gMASK]<sop>{%- for message in messages -%}{{ '<|' + message.role + '|>\\n' + show(message.content) }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)
GLM4_1V = GLM4V.replace(
    "show(message.content) }}", "(show(message.content) if message.role == 'user' else message.content|string) }}"
)
GLM4_5V = GLM4V.replace(
    "'<|' + message.role + '|>\\n' + show(message.content) }}",
    "'<|' + message.role + '|>' }}{%- set said = show(message.content) -%}{%- if message.role == 'assistant' -%}"
    "{{ '\\n<think></think>\\n' + said.split('</think>')[-1].strip() }}{%- else -%}{{ '\\n' + said }}{%- endif -%}",
).replace("'<|assistant|>\\n'", "'<|assistant|>'")
