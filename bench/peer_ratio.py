"""Why TRL logs an importance ratio of 0 with vLLM and pictures: ``python bench/peer_ratio.py``, with vLLM for a CPU.

TRL 1.16 hands vLLM a prompt whose picture is already one placeholder for each patch, and the picture too; vLLM expands the
first placeholder once more, and samples after another prompt than the trainer scores. This gives a tiny random model both
kinds of prompts, and sums the gaps of log-probs up as TRL does: over a response, with ratios above 3 set to 0.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
SETTINGS |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
RESPONSES, LENGTHS, LARGEST = 16, (16, 64, 256), 3.0


def main() -> None:
    """Print gaps and ratios of both kinds of prompts."""
    os.environ.update(SETTINGS)
    import sensorium.models.torchvision_fix  # isort: skip  # noqa: F401  (before anything imports transformers)
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from vllm import LLM, SamplingParams

    from sensorium.models.tiny import make_tiny

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny("qwen2_5_vl", Path(scratch) / "model")
        processor = AutoProcessor.from_pretrained(folder)
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (224, 224, 3), dtype=np.uint8))
        content = [{"type": "image", "image": picture}, {"type": "text", "text": "what colour is it? red green blue"}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            return_tensors="pt",
        )
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        expanded: list[int] = prompt["input_ids"][0].tolist()
        pad = model.config.image_token_id
        once = [token for place, token in enumerate(expanded) if token != pad or expanded[place - 1] != pad]
        special = {*processor.tokenizer.all_special_ids, *processor.tokenizer.added_tokens_decoder}
        words = [token for token in range(len(processor.tokenizer)) if token not in special]
        engine = LLM(
            model=str(folder), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=2 * RESPONSES,
            logprobs_mode="processed_logprobs",
        )  # fmt: skip
        sampling = SamplingParams(
            n=RESPONSES, max_tokens=max(LENGTHS), ignore_eos=True, logprobs=0, seed=1, allowed_token_ids=words
        )

        def trainers(response: list[int]) -> Any:
            row = torch.tensor([expanded + response])
            given = {name: value for name, value in prompt.items() if name not in ("input_ids", "attention_mask")}
            kinds = given["mm_token_type_ids"]
            given["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, len(response))], 1)
            with torch.no_grad():
                logits_TV = model(input_ids=row, **given).logits[0, len(expanded) - 1 : -1]
            masked_TV = torch.full_like(logits_TV, float("-inf"))
            masked_TV[:, words] = logits_TV[:, words]
            return masked_TV.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]

        for name, ids in (("one placeholder", once), ("expanded, as TRL does", expanded)):
            asked = {"prompt_token_ids": list(ids), "multi_modal_data": {"image": picture}}
            (found,) = engine.generate([asked], sampling, use_tqdm=False)  # type: ignore[list-item]
            gaps = []
            for response in found.outputs:
                tokens = list(response.token_ids)
                theirs = [at[token].logprob for at, token in zip(response.logprobs, tokens, strict=True)]
                gaps.append(trainers(tokens) - torch.tensor(theirs))
            gap_NT = torch.stack(gaps)
            print(f"{name}: {len(expanded)} tokens for the trainer, {len(found.prompt_token_ids)} for vLLM")
            print(f"  mean |gap| {gap_NT.abs().mean():.2g}")
            for length in LENGTHS:
                ratio_N = gap_NT[:, :length].sum(-1).exp()
                print(f"  {length} tokens: mean ratio {ratio_N.masked_fill(ratio_N > LARGEST, 0.0).mean():.2g}")


if __name__ == "__main__":
    main()
