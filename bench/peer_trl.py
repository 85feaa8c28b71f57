"""TRL's GRPO trainer on a workload, driven one optimizer step at a time so that its steps interleave with ours.

As a command it is a process of its own, which answers every line that it is sent with the seconds of one more step::

    python bench/peer_trl.py '{"model": FOLDER, "work": {"prompts": 8, …}, "microbatch": 16, "folder": FOLDER, …}'
"""

import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import sensorium.models.torchvision_fix  # isort: skip  # noqa: F401  (before anything imports transformers)
import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from workload import QUESTION, Workload, arithmetic

LIMIT_S = 1800  # of one step


class TrlPeer:
    """Runs TRL in a thread that stops before every step until asked for one; on a GPU in bfloat16, with vLLM if asked."""

    def __init__(
        self,
        model: Path,
        work: Workload,
        steps: int,
        microbatch: int,
        folder: Path,
        device: str = "cpu",
        vllm: bool = False,
    ) -> None:
        self.go: queue.Queue[bool] = queue.Queue()
        self.done: queue.Queue[float | BaseException] = queue.Queue()
        self.loaded = threading.Event()
        self.microbatch = microbatch
        self.device, self.vllm = device, vllm
        trainer = self._trainer(model, work, steps, microbatch, folder)
        threading.Thread(target=self._run, args=(trainer,), daemon=True).start()

    def step(self) -> float:
        """One step; returns its seconds."""
        self.go.put(True)
        seconds = self.done.get(timeout=LIMIT_S)
        if isinstance(seconds, BaseException):
            raise seconds
        return seconds

    def wait_until_loaded(self) -> None:
        """Wait until the next step's rows are loaded: beside a step of ours that would slow it, and count nowhere."""
        self.loaded.wait(timeout=LIMIT_S)

    def _run(self, trainer: GRPOTrainer) -> None:
        try:
            trainer.train()
        except BaseException as error:
            self.done.put(error)
            self.loaded.set()

    def _trainer(self, model: Path, work: Workload, steps: int, microbatch: int, folder: Path) -> Any:
        peer, cuda = self, self.device == "cuda"
        colocated = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": work.context}
        sampler = {"use_vllm": True} | colocated if self.vllm else {}

        class Turnstile(TrainerCallback):
            """Waits for leave before each optimizer step's first micro-batch, and reports when the step is over."""

            started = 0.0

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                peer.loaded.set()
                peer.go.get()
                peer.loaded.clear()
                self.started = time.perf_counter()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                if cuda:
                    torch.cuda.synchronize()
                peer.done.put(time.perf_counter() - self.started)

        config = GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=microbatch, max_steps=steps, report_to=[],
            gradient_accumulation_steps=work.prompts * work.group // microbatch, num_generations=work.group,
            max_completion_length=work.new_tokens, save_strategy="no", use_cpu=not cuda, bf16=cuda, beta=0.0,
            learning_rate=1e-6, logging_steps=10**6, disable_tqdm=True, gradient_checkpointing=cuda,
            generation_kwargs={"ignore_eos": True} if self.vllm else {"min_new_tokens": work.new_tokens}, **sampler,
        )  # fmt: skip
        kind = torch.bfloat16 if cuda else torch.float32
        model_class = AutoModelForImageTextToText if work.pictures else AutoModelForCausalLM
        loaded = model_class.from_pretrained(model, dtype=kind, attn_implementation="sdpa")

        def reward(completions: list[Any], **_: Any) -> list[float]:
            return [float(len(str(c)) % 7) for c in completions]

        return GRPOTrainer(
            model=loaded, args=config, reward_funcs=reward, callbacks=[Turnstile()],
            processing_class=(AutoProcessor if work.pictures else AutoTokenizer).from_pretrained(model),
            train_dataset=Dataset.from_list(rows_of(work, work.prompts * (steps + 1))),
        )  # fmt: skip


def rows_of(work: Workload, count: int) -> list[dict[str, Any]]:
    """Prompts as TRL takes them: a question of arithmetic each, or one about a picture of noise."""
    if not work.pictures:
        return [{"prompt": [{"role": "user", "content": arithmetic(index)}]} for index in range(count)]
    rng, shape = np.random.default_rng(0), (work.pixels, work.pixels, 3)
    pictures = [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": QUESTION}], "image": picture} for picture in pictures]


def main(asked: dict[str, Any]) -> None:
    """Make steps as they are asked for; the rows of the next are loaded before the answer."""
    torch.set_num_threads(asked["threads"])
    peer = TrlPeer(Path(asked["model"]), Workload(**asked["work"]), 1000, asked["microbatch"], Path(asked["folder"]))
    peer.wait_until_loaded()
    for _ in sys.stdin:
        seconds = peer.step()
        peer.wait_until_loaded()
        print(json.dumps({"step_s": seconds}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
