"""Does it learn as its peers do? Sensorium, TRL and examples/grpo_in_one_file.py on the same work, judged by one evaluator.

    python studies/parity.py [shapes] [text] [seeds=10|seed=0 …] [jobs=2]    # seeds of each, and what they say together
    python studies/parity.py gradient                                 # the first gradient of all three on one batch
    python studies/parity.py compare                                  # again from the stored results; runs nothing

``shapes`` is the demo's tiny Qwen3-VL and its pictures; ``text`` is a tiny Qwen3 that adds two-digit numbers, warmed up
once by SFT. Everything in ``Problem`` and ``SHARED`` is common: checkpoint, rows and their order, one reward function (the
example's: 0.9 for the right answer, 0.1 for the right form), AdamW without weight decay, a constant rate, gradients
clipped at norm 1, PPO's clip at 0.2, temperature 1, no KL, one update a step, and the loss averaged **over all tokens of
the update**, which all three compute exactly (Sensorium ``token_mean``, TRL ``dapo``, the example as it is).

What differs and stays: TRL samples by transformers' generate with its own random numbers, adds 1e-4 to a group's standard
deviation where the others add 1e-6, and keeps the special tokens, which the other two never sample, in the softmax. The
example draws the same random numbers as Sensorium, so the two are not independent of each other.

The example knows only pictures. For ``text`` it gets another model class, ``render`` and ``embed`` (``_WordModel``); its
sampling, advantages, log-probs, loss and step are its own.

**The margin**, fixed before any run of ten seeds: two systems are equivalent if the 95 % interval of their mean difference
in sampled held-out accuracy, paired by seed, lies within ±0.05. That is two one-sided t-tests at 2.5 % each. The reason for
0.05: nobody would choose a trainer for less; it is a tenth of what the demo's recipe gains (0.42 to 0.95), and a third of
what these shorter runs gain. An interval that leaves the margin but excludes 0 says "differs", any other "undecided".
Greedy accuracy is reported beside it.

Every system runs in a process of its own on one thread and leaves a checkpoint. A further process loads it with
transformers alone and answers the held-out rows, so that no system's own evaluation is believed.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import sensorium.models.torchvision_fix  # isort: skip
import torch
import transformers
from PIL import Image
from torch import Tensor

import sensorium as sn
from sensorium.data.media_store import MediaStore
from sensorium.data.rows import JsonlRows
from sensorium.data.shapes import Shapes
from sensorium.evaluation.summary import student_interval
from sensorium.models.checkpoint_path import find_checkpoint
from studies.seeds import circumstances, cpu_minutes

ROOT = Path(__file__).parents[1]
MARGIN = 0.05
SYSTEMS = ("sensorium", "one_file", "trl")
AS_TRL = "one_file_as_trl"  # the example with the two of TRL's differences that it can have, to see what they explain
SEEDS = 10
MEASURES = ("sampled", "greedy")
RESULTS = Path(__file__).parent / "results"
WORK = Path("runs") / "parity"
BETAS, EPS, CLIP, CLIP_NORM = (0.9, 0.99), 1e-8, 0.2, 1.0
SHARED = {
    "betas": BETAS, "eps": EPS, "weight decay": 0.0, "rate": "constant", "gradient norm at most": CLIP_NORM, "clip": CLIP,
    "temperature": 1.0, "KL": 0.0, "updates a step": 1, "loss": "mean over the tokens of the update", "threads": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A task and the work of one run; the same for all systems."""

    name: str
    steps: int
    prompts: int
    lr: float
    max_new_tokens: int
    group: int = 8
    held_out: int = 1000

    @property
    def pictures(self) -> bool:
        return self.name == "shapes"

    @property
    def options(self) -> dict[str, Any]:
        """How Sensorium's reader of rows takes them."""
        columns = {"prompt": "prompt", "answer": "answer"}
        return {"columns": columns | {"pictures": "image"}, "media_first": True} if self.pictures else {"columns": columns}

    def start(self, work: Path) -> Path:
        """The checkpoint that all systems start from."""
        return Path(find_checkpoint("package:shapes")) if self.pictures else work / "text_start"


PROBLEMS = {
    "shapes": Problem("shapes", steps=40, prompts=16, lr=5e-4, max_new_tokens=6),
    "text": Problem("text", steps=60, prompts=32, lr=3e-4, max_new_tokens=8),
}
WARM_STEPS = 170


# --- What all systems are given


def sums(held_out: bool) -> list[tuple[int, int]]:
    """All pairs of two-digit numbers of a side; a fifth is held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [(a, b) for a, b in pairs if (sha256(f"{a}+{b}".encode()).digest()[0] % 5 == 0) == held_out]


def write_rows(problem: Problem, folder: Path, count: int, seed: int, *, held_out: bool = False) -> Path:
    """Rows with prompt, answer and picture as a JSONL file. Held-out ones are the same for all seeds of a study."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    if problem.pictures:
        store = MediaStore()
        source = Shapes(store=store, split="test" if held_out else "train", size=count, seed=1000 + seed, picture_size=64)
        for index, task in enumerate(source):
            (folder / f"{index}.png").write_bytes(store.bytes_of(task.messages[0].media[0]))
            rows.append({"prompt": task.messages[0].text, "answer": task.answer, "image": f"{index}.png"})
    else:
        for a, b in random.Random(f"sums {seed}").choices(sums(held_out), k=count):
            rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b), "worked": f"<answer>{a + b}</answer>"})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows; pictures are opened."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "image" in row:
            row["image"] = Image.open(path.parent / row["image"]).convert("RGB")
    return rows


def load_example(problem: Problem) -> ModuleType:
    """A copy of the one-file example with this problem's sizes; for text, with what stands for the pictures replaced."""
    spec = importlib.util.spec_from_file_location(f"grpo_for_{problem.name}", ROOT / "examples" / "grpo_in_one_file.py")
    assert spec is not None
    assert spec.loader is not None
    flat = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = flat
    spec.loader.exec_module(flat)
    named: dict[str, Any] = {
        "GROUP_SIZE": problem.group, "MAX_NEW_TOKENS": problem.max_new_tokens, "LEARNING_RATE": problem.lr,
        "WARMUP_STEPS": 0, "CLIP": CLIP, "CLIP_NORM": CLIP_NORM,
    }  # fmt: skip
    if not problem.pictures:
        named |= {"Model": _WordModel, "render": partial(_render_words, flat), "embed": _embed_words}
    for name, value in named.items():
        assert hasattr(flat, name), name
        setattr(flat, name, value)
    return flat


class _WordModel:
    """What the example's ``Model`` is, of a text model."""

    def __init__(self, checkpoint: str) -> None:
        self.whole: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.processor: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.tokenizer: Any = self.processor
        self.language, self.head = _OneAxis(self.whole.model), self.whole.lm_head
        self.stop_ids = torch.tensor(self.whole.generation_config.eos_token_id)
        self.pad_id: int = self.whole.generation_config.pad_token_id
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        unowned = set(range(self.head.out_features)) - set(self.tokenizer.get_vocab().values())
        self.forbidden_ids = torch.tensor(sorted((special | unowned) - set(self.stop_ids.tolist())))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head, with forbidden ids at minus infinity."""
        return self.head(hidden).float().index_fill(-1, self.forbidden_ids, -torch.inf)


class _OneAxis:
    """A text model that takes positions of three axes, of which it needs one."""

    def __init__(self, core: Any) -> None:
        self._core, self.config, self.embed_tokens = core, core.config, core.embed_tokens

    def __call__(self, *, position_ids: Tensor, **given: Any) -> Any:
        return self._core(position_ids=position_ids[0], **given)


def _render_words(flat: ModuleType, model: _WordModel, tasks: Sequence[sn.Task], store: MediaStore) -> Any:
    texts = [f"<|im_start|>user\n{task.messages[0].text}<|im_end|>\n<|im_start|>assistant\n" for task in tasks]
    rows = [model.tokenizer(text).input_ids for text in texts]
    length = max(map(len, rows))
    ids_PT = torch.tensor([row + [model.pad_id] * (length - len(row)) for row in rows])
    real_PT = torch.arange(length) < torch.tensor([[len(row)] for row in rows])
    last_P = real_PT.sum(1) - 1
    positions_3PT = torch.arange(length).expand(3, len(rows), -1)
    return flat.Prompts(ids_PT, real_PT, positions_3PT, last_P, last_P + 1, torch.empty(0), torch.empty(0))


def _embed_words(model: _WordModel, prompts: Any, also: int = 0) -> tuple[Tensor, dict[str, Any]]:
    return model.language.embed_tokens(prompts.ids_PT), {}


def paid(task: sn.Task, episode: sn.Episode) -> float:
    """The example's reward as a term of Sensorium."""
    from examples.grpo_in_one_file import reward

    return reward(episode.turns[-1].response.text, task.answer)[0]


# --- One run of each system: writes a checkpoint, returns the mean reward of every step


def run_sensorium(problem: Problem, start: Path, rows: Path, seed: int, out: Path) -> list[float]:
    """Sensorium, by a recipe."""
    run = sn.train(recipe_for(problem, start, rows, seed, out / "run"), rewards=[paid], show=False)
    save_weights(run.last_checkpoint, out)
    return [float(value) for value in run.metrics["reward/mean"]]


def recipe_for(problem: Problem, start: Path, rows: Path, seed: int, folder: Path) -> dict[str, Any]:
    """The shared settings as a recipe."""
    return {
        "name": "parity", "seed": seed, "steps": problem.steps, "run_dir": str(folder), "threads": 1,
        "model": {"path": str(start)},
        "tasks": {"train": [{"source": "jsonl", "options": {"path": str(rows), **problem.options}}], "shuffle": False},
        "batch": {"prompts_per_step": problem.prompts, "group_size": problem.group},
        "rollout": {"temperature": 1.0, "max_new_tokens": problem.max_new_tokens},
        "algorithm": algorithm(),
        "optimizer": {"lr": problem.lr, "betas": list(BETAS), "eps": EPS, "weight_decay": 0.0, "clip_norm": CLIP_NORM},
        "health": {"sight_tasks": 0},
    }  # fmt: skip


def algorithm() -> dict[str, Any]:
    """Sensorium's section ``algorithm``."""
    loss = {"name": "clip", "clip_low": CLIP, "clip_high": CLIP, "aggregation": "token_mean"}
    return {"advantage": {"name": "grpo"}, "loss": loss}


def run_one_file(problem: Problem, start: Path, rows: Path, seed: int, out: Path, *, as_trl: bool = False) -> list[float]:
    """The example, step by step; ``as_trl`` with every id in the softmax and 1e-4 added to a group's standard deviation."""
    flat, store = load_example(problem), MediaStore()
    tasks = JsonlRows(str(rows), store, **problem.options)
    model = flat.Model(str(start))
    if as_trl:
        model.forbidden_ids = model.forbidden_ids[:0]
        flat.advantages = lambda paid_PG: (paid_PG - paid_PG.mean(1, keepdim=True)) / (paid_PG.std(1, keepdim=True) + 1e-4)
    optimizer = torch.optim.AdamW(model.whole.parameters(), lr=problem.lr, betas=BETAS, eps=EPS, weight_decay=0.0)
    curve = []
    for step in range(1, problem.steps + 1):
        drawn = [tasks[i] for i in range((step - 1) * problem.prompts, step * problem.prompts)]
        done = flat.train_step(model, optimizer, drawn, store, seed, step)
        curve.append(float(done.rewards_PG.mean()))
    model.whole.save_pretrained(out / "model")
    return curve


def run_trl(problem: Problem, start: Path, rows: Path, seed: int, out: Path) -> list[float]:
    """TRL's trainer with transformers' generation."""
    from examples.grpo_in_one_file import reward

    curve: list[float] = []

    def scored(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [one[0]["content"] for one in completions]
        rewards = [reward(text, known)[0] for text, known in zip(texts, answer, strict=True)]
        curve.append(sum(rewards) / len(rewards))
        return rewards

    trainer = trl_trainer(problem, start, read_rows(rows), seed, out / "trl", scored)
    trainer.train()
    trainer.model.save_pretrained(out / "model")
    return curve


def trl_trainer(
    problem: Problem, start: Path, rows: list[dict[str, Any]], seed: int, folder: Path, scored: Callable[..., list[float]]
) -> Any:
    """The shared settings as TRL's; a step is one batch, so nothing is accumulated."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), seed=seed, max_steps=problem.steps, shuffle_dataset=False, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=problem.prompts * problem.group, gradient_accumulation_steps=1,
        num_generations=problem.group, max_completion_length=problem.max_new_tokens, temperature=1.0, top_p=1.0, top_k=0,
        learning_rate=problem.lr, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        adam_epsilon=EPS, weight_decay=0.0, max_grad_norm=CLIP_NORM, epsilon=CLIP, epsilon_high=CLIP, beta=0.0,
        loss_type="dapo", scale_rewards="group", use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", logging_steps=10**6,
    )  # fmt: skip
    kept = ("image", "answer")
    listed = [
        {"prompt": [{"role": "user", "content": row["prompt"]}]} | {key: row[key] for key in kept if key in row}
        for row in rows
    ]
    return GRPOTrainer(
        model=stock_model(problem, start), args=config, reward_funcs=scored, train_dataset=Dataset.from_list(listed),
        processing_class=stock_processor(problem, start),
    )  # fmt: skip


RUNNERS = {
    "sensorium": run_sensorium, "one_file": run_one_file, "trl": run_trl, AS_TRL: partial(run_one_file, as_trl=True),
}  # fmt: skip


# --- The evaluator: transformers alone


def stock_model(problem: Problem, folder: Path) -> Any:
    """A checkpoint as transformers loads it, in float32."""
    kind = transformers.AutoModelForImageTextToText if problem.pictures else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def stock_processor(problem: Problem, folder: Path) -> Any:
    """A checkpoint's processor, or its tokenizer where there are no pictures."""
    processor = (transformers.AutoProcessor if problem.pictures else transformers.AutoTokenizer).from_pretrained(folder)
    getattr(processor, "tokenizer", processor).padding_side = "left"
    return processor


def save_weights(checkpoint: Path, out: Path) -> None:
    """Link a run's checkpoint to where all systems leave theirs."""
    (out / "model").symlink_to(checkpoint.resolve(), target_is_directory=True)


def evaluate(problem: Problem, start: Path, model_folder: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Accuracy on rows, greedy and sampled at temperature 1; words, pictures and stop tokens are those of the start."""
    from examples.grpo_in_one_file import reward

    processor, model = stock_processor(problem, start), stock_model(problem, model_folder).eval()
    tokenizer = getattr(processor, "tokenizer", processor)
    usual = transformers.GenerationConfig.from_pretrained(start)
    stops = {"eos_token_id": usual.eos_token_id, "pad_token_id": usual.pad_token_id}
    torch.manual_seed(0)
    right = dict.fromkeys(MEASURES, 0)
    for begin in range(0, len(rows), 125):
        part = rows[begin : begin + 125]
        chats = [[{"role": "user", "content": _content(row)}] for row in part]
        inputs = processor.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", padding=True
        )
        for measure in MEASURES:
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            how = transformers.GenerationConfig(
                max_new_tokens=problem.max_new_tokens, **stops, **(sampling if measure == "sampled" else {})
            )
            with torch.no_grad():
                made = model.generate(**inputs, generation_config=how)[:, inputs["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(made, skip_special_tokens=True)
            right[measure] += sum(reward(text, row["answer"])[1] for text, row in zip(texts, part, strict=True))
    return {measure: count / len(rows) for measure, count in right.items()}


def _content(row: dict[str, Any]) -> Any:
    if "image" not in row:
        return row["prompt"]
    return [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["prompt"]}]


# --- A study: every part in a process of its own; what is stored is not done again


def prepare(work: Path) -> None:
    """Warm up the text model by SFT; nothing is done where that was done."""
    folder = PROBLEMS["text"].start(work)
    if folder.exists():
        return
    rows = write_rows(PROBLEMS["text"], work / "text_warm", 128 * WARM_STEPS, seed=-1)
    recipe = recipe_for(PROBLEMS["text"], Path("tiny:qwen3"), rows, 0, work / "text_warm" / "run") | {
        "steps": 0,
        "warm_start": {
            "steps": WARM_STEPS, "prompts_per_step": 128, "optimizer": {"lr": 2e-3, "warmup_steps": 20},
        },
    }  # fmt: skip
    recipe["tasks"]["train"][0]["options"]["columns"]["demonstration"] = "worked"
    run = sn.train(recipe, rewards=[paid], show=False, overwrite=True)
    folder.symlink_to(run.checkpoint.resolve(), target_is_directory=True)


def part(command: str, name: str, *given: str) -> dict[str, Any]:
    """What a process of its own says in its last line: ``run`` of a system or ``evaluate`` of a checkpoint."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    asked = [sys.executable, str(Path(__file__).resolve()), command, name, *given]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(asked[2:])} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def child(command: str, name: str, given: Sequence[str]) -> dict[str, Any]:
    """The work of one process."""
    torch.set_num_threads(1)
    problem = PROBLEMS[name]
    if command == "run":
        system, start, rows, seed, out = given
        torch.manual_seed(int(seed))
        curve = RUNNERS[system](problem, Path(start), Path(rows), int(seed), Path(out))
        return {"curve": [round(value, 5) for value in curve], "cpu_s": round(60 * cpu_minutes(), 1)}
    start, model, rows = given
    return evaluate(problem, Path(start), Path(model), read_rows(Path(rows)))


def study(name: str, seeds: Iterable[int], jobs: int, work: Path = WORK, results: Path = RESULTS) -> None:
    """Run what is missing of a problem's seeds, and store each system's outcome as soon as it is there."""
    problem, place = PROBLEMS[name], results / f"parity_{name}.json"
    if not problem.pictures:
        part("prepare", name, str(work))
    start = problem.start(work).resolve()
    held_out = write_rows(problem, work / name / "held_out", problem.held_out, seed=7, held_out=True)
    facts = {
        "study": name, "command": f"python studies/parity.py {name}", "margin": MARGIN, "problem": asdict(problem),
        "shared": json.loads(json.dumps(SHARED)), "start": sha256((start / "model.safetensors").read_bytes()).hexdigest(),
    }  # fmt: skip
    stored: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    if stored and any(stored[key] != value for key, value in facts.items()):
        raise SystemExit(f"{place} was made from another start or with other settings; move it away, or restore them.")
    if not stored:
        stored = facts | {"before": part("evaluate", name, str(start), str(start), str(held_out)), "runs": []}
    lock = Lock()

    def run(seed: int, system: str) -> None:
        out = work / name / f"{seed}" / system
        subprocess.run(["rm", "-rf", str(out)], check=True)
        out.mkdir(parents=True)
        rows = write_rows(problem, out / "rows", problem.steps * problem.prompts, seed)
        outcome = part("run", name, system, str(start), str(rows), str(seed), str(out))
        outcome |= part("evaluate", name, str(start), str(out / "model"), str(held_out))
        versions = {one: version(one) for one in ("torch", "transformers", *(("trl",) if system == "trl" else ()))}
        with lock:
            stored["runs"].append({"seed": seed, "system": system, **circumstances(), "versions": versions, **outcome})
            stored["runs"].sort(key=lambda run: (run["seed"], run["system"]))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(stored | {"comparison": compare(stored["runs"])}, indent=1) + "\n")
        print(
            f"{name} seed {seed} {system}: sampled {outcome['sampled']:.3f}, greedy {outcome['greedy']:.3f}, "
            f"{outcome['cpu_s']:.0f} CPU s",
            flush=True,
        )

    known = {(run["seed"], run["system"]) for run in stored["runs"]}
    todo = [(seed, system) for seed in seeds for system in RUNNERS if (seed, system) not in known]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: run(*one), todo))


# --- What the seeds say together


def verdict(differences: Sequence[float], margin: float = MARGIN) -> dict[str, Any]:
    """The mean of differences, one a seed, its 95 % interval, and what that says."""
    mean, interval = sum(differences) / len(differences), student_interval(differences)
    if interval is None:
        word = "undecided"
    elif -margin < interval[0] and interval[1] < margin:
        word = f"equivalent within {margin:g}"
    elif interval[0] > 0 or interval[1] < 0:
        word = "differs"
    else:
        word = "undecided"
    return {"seeds": len(differences), "mean": mean, "interval": interval and list(interval), "verdict": word}


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the systems, and every pair's differences over the seeds that all systems have."""
    by_seed: dict[int, dict[str, Any]] = {}
    for run in runs:
        by_seed.setdefault(run["seed"], {})[run["system"]] = run
    whole = [systems for _, systems in sorted(by_seed.items()) if set(SYSTEMS) <= set(systems)]
    if not whole:
        return {}
    found: dict[str, Any] = {}
    for measure in MEASURES:
        values = {system: [systems[system][measure] for systems in whole] for system in SYSTEMS}
        means = {
            system: {"mean": sum(each) / len(each), "range": [min(each), max(each)], "interval": student_interval(each)}
            for system, each in values.items()
        }
        pairs = {
            f"{one} - {other}": verdict([a - b for a, b in zip(values[one], values[other], strict=True)])
            for one, other in combinations(SYSTEMS, 2)
        }
        for other in SYSTEMS:  # what makes the difference between them
            if both := [each[AS_TRL][measure] - each[other][measure] for each in whole if AS_TRL in each]:
                pairs[f"{AS_TRL} - {other}"] = verdict(both)
        found[measure] = {"systems": means, "differences": pairs}
    return found


def report(results: Path = RESULTS) -> None:
    """Print what the stored results say, and draw the curves."""
    drawn = {}
    for name in PROBLEMS:
        place = results / f"parity_{name}.json"
        if not place.exists():
            continue
        stored = json.loads(place.read_text())
        stored["comparison"] = compare(stored["runs"])
        place.write_text(json.dumps(stored, indent=1) + "\n")
        drawn[name] = stored
        for measure, both in stored["comparison"].items():
            for system, each in both["systems"].items():
                print(f"{name} {measure}: {system} {stored['before'][measure]:.3f} → {each['mean']:.3f} {each['range']}")
            for pair, each in both["differences"].items():
                between = "" if each["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*each["interval"])
                print(f"{name} {measure}: {pair} = {each['mean']:+.3f}{between}, {each['seeds']} seeds: {each['verdict']}")
    if drawn:
        (results / "parity.svg").write_text(curves(drawn))


COLOURS = {"sensorium": "#1f77b4", "one_file": "#2ca02c", "trl": "#d62728"}
DASHES = {"one_file": 'stroke-dasharray="4 4"'}  # it often lies on Sensorium's


def curves(stored: dict[str, Any]) -> str:
    """Mean training reward of every step by system as an SVG, a panel a problem; thin lines are single seeds."""
    width, height, pad = 440, 280, 40
    parts = []
    for place, (name, result) in enumerate(stored.items()):
        steps = result["problem"]["steps"]
        parts.append(
            f'<g transform="translate({place * width} 0)"><text x="{pad}" y="24">{name}: mean reward of a step</text>'
        )
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = height - pad - share * (height - 2 * pad)
            parts.append(
                f'<path d="M{pad} {y:.1f}H{width - 10}" stroke="#ddd"/><text x="4" y="{y + 4:.1f}">{share:g}</text>'
            )
        parts.append(f'<text x="{width - 70}" y="{height - 20}">step {steps}</text>')
        for row, system in enumerate(SYSTEMS):
            own = [run["curve"] for run in result["runs"] if run["system"] == system]
            if not own:
                continue
            mean, dash = [sum(values) / len(values) for values in zip(*own, strict=True)], DASHES.get(system, "")
            for curve, style in [*((each, 'opacity=".2"') for each in own), (mean, 'stroke-width="2"')]:
                points = " ".join(
                    f"{pad + i / max(1, steps - 1) * (width - pad - 10):.1f},{height - pad - v * (height - 2 * pad):.1f}"
                    for i, v in enumerate(curve)
                )
                parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[system]}" {dash} {style}/>')
            parts.append(f'<text x="{pad + 8 + 110 * row}" y="{height - 4}" fill="{COLOURS[system]}">{system}</text>')
        parts.append("</g>")
    whole = width * len(stored)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" width="{whole}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


# --- The first gradient of all three on one batch


def write_batch(problem: Problem, start: Path, folder: Path, prompts: int = 16) -> None:
    """Prompts, pictures, sampled tokens, their log-probs and advantages, once for all systems; sampled by the example."""
    flat, store = load_example(problem), MediaStore()
    tasks = list(JsonlRows(str(write_rows(problem, folder, prompts, seed=0)), store, **problem.options))
    model = flat.Model(str(start))
    given = flat.render(model, tasks, store)
    keys_PG = torch.tensor([[flat.response_key(0, 1, task.id, g) for g in range(problem.group)] for task in tasks])
    tokens_PGR = flat.sample(model, given, keys_PG)
    advantages_PG = flat.advantages(flat.judge(model, tasks, tokens_PGR)[0])
    with torch.no_grad():
        logprobs_PGR = flat.logprobs(model, given, tokens_PGR)
    batch = {"advantages_PG": advantages_PG.tolist(), "tokens": [], "logprobs": []}
    for p, written_GR in enumerate(flat.written(model, tokens_PGR)):
        for key, values_PGR in (("tokens", tokens_PGR), ("logprobs", logprobs_PGR)):
            batch[key].append([row[mask].tolist() for row, mask in zip(values_PGR[p], written_GR, strict=True)])
    batch["prompts"] = [ids[real].tolist() for ids, real in zip(given.ids_PT, given.real_PT, strict=True)]
    (folder / "batch.json").write_text(json.dumps(batch))


def gradient_sensorium(problem: Problem, start: Path, folder: Path) -> dict[str, Tensor]:
    """By Sensorium's learner: a step whose gradients are read just before the optimizer takes them."""
    from sensorium.learner.credited_episode import CreditedEpisode
    from sensorium.learner.learner import Learner
    from sensorium.models.load import load_policy
    from sensorium.recipe.schema import AlgorithmSection, BatchSection, OptimizerSection
    from sensorium.vocabulary import Episode, Status, Thread, Turn

    store, batch = MediaStore(), json.loads((folder / "batch.json").read_text())
    policy = load_policy(str(start), store=store, device="cpu")
    groups = []
    for p, task in enumerate(JsonlRows(str(folder / "rows.jsonl"), store, **problem.options)):
        prompt = policy.chat.render(task.messages)
        assert policy.chat.layout(prompt).ids_T.tolist() == batch["prompts"][p], task.id
        group = []
        for g, (tokens, logprobs) in enumerate(zip(batch["tokens"][p], batch["logprobs"][p], strict=True)):
            written = policy.chat.written(tokens, logprobs, logprobs, f"{p}/{g}")
            thread, turn = Thread((prompt, written), (False, True)), Turn(0, (), written, 0, 1)
            episode = Episode(f"{p}/{g}", task.id, task.id, g, (thread,), (turn,), Status.FINISHED)
            group.append(CreditedEpisode(episode, (torch.full((len(tokens),), batch["advantages_PG"][p][g]),)))
        groups.append(group)
    learner = Learner(
        policy, optimizer=OptimizerSection(lr=problem.lr), algorithm=AlgorithmSection(**algorithm()), batch=BatchSection(),
        temperature=1.0, total_steps=1,
    )  # fmt: skip
    found: dict[str, Tensor] = {}
    optimizer = learner._optimizer
    take = optimizer.step

    def step(share: float, norm: Tensor) -> None:
        found.update({name: gradient.clone() for name, gradient in optimizer.gradients().items()})
        take(share, norm)

    optimizer.step = step
    learner.step(groups)
    return found


def gradient_one_file(problem: Problem, start: Path, folder: Path, *, mask: bool = True) -> dict[str, Tensor]:
    """By the example's log-probs and loss. Without ``mask`` ids that are never sampled stay in the softmax, as in TRL."""
    flat, store, batch = load_example(problem), MediaStore(), json.loads((folder / "batch.json").read_text())
    tasks = list(JsonlRows(str(folder / "rows.jsonl"), store, **problem.options))
    model = flat.Model(str(start))
    if not mask:
        model.forbidden_ids = model.forbidden_ids[:0]
    given = flat.render(model, tasks, store)
    longest = max(len(tokens) for group in batch["tokens"] for tokens in group)
    padded = [[tokens + [model.pad_id] * (longest - len(tokens)) for tokens in group] for group in batch["tokens"]]
    tokens_PGR, advantages_PG = torch.tensor(padded), torch.tensor(batch["advantages_PG"])
    logprobs_PGR = flat.logprobs(model, given, tokens_PGR)
    written_PGR = flat.written(model, tokens_PGR)
    flat.policy_loss(logprobs_PGR, logprobs_PGR.detach(), advantages_PG, written_PGR).backward()
    return {name: p.grad for name, p in model.whole.named_parameters() if p.grad is not None}


def gradient_trl(problem: Problem, start: Path, folder: Path) -> dict[str, Tensor]:
    """By the loss of TRL's trainer on inputs as it prepares them: prompts padded left, completions right."""
    from trl.trainer.utils import pad

    rows, batch = read_rows(folder / "rows.jsonl"), json.loads((folder / "batch.json").read_text())
    trainer = trl_trainer(problem, start, rows, 0, folder / "trl", lambda completions, **_: [0.0] * len(completions))
    prompts = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows for _ in range(problem.group)]
    if problem.pictures:
        from trl.data_utils import prepare_multimodal_messages

        for row in prompts:
            row["prompt"] = prepare_multimodal_messages(row["prompt"], images=[row["image"]])
    ids, _, media = trainer._tokenize_prompts([row["prompt"] for row in prompts])
    assert ids[:: problem.group] == batch["prompts"]
    tokens = [torch.tensor(each) for group in batch["tokens"] for each in group]
    pad_id = trainer._tokenizer.pad_token_id
    given = [torch.tensor(each) for each in ids]
    inputs: dict[str, Any] = {
        "prompt_ids": pad(given, pad_id, "left"), "prompt_mask": pad([torch.ones_like(t) for t in given], 0, "left"),
        "completion_ids": pad(tokens, pad_id, "right"),
        "completion_mask": pad([torch.ones_like(t) for t in tokens], 0, "right"),
        "advantages": torch.tensor(batch["advantages_PG"]).flatten(),
        "num_items_in_batch": torch.tensor(sum(map(len, tokens))),
    }  # fmt: skip
    if problem.pictures:
        kinds = pad([torch.tensor(each) for each in media["mm_token_type_ids"]], 0, "left")
        inputs |= {key: torch.as_tensor(media[key]) for key in ("pixel_values", "image_grid_thw")}
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(inputs["completion_ids"])], dim=1)
        inputs["num_images"] = [1] * len(prompts)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.compute_loss(trainer.model, inputs).backward()
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


GRADIENTS = {
    "sensorium": gradient_sensorium, "one_file": gradient_one_file, "trl": gradient_trl,
    "one_file, no mask": partial(gradient_one_file, mask=False),
}  # fmt: skip


def compare_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Any]:
    """How far two gradients are apart, tensor by tensor: the difference's norm over the second's, and the cosine."""
    missing = sorted(set(one) ^ set(other))
    tensors = {}
    for name in sorted(set(one) & set(other)):
        a, b = one[name].double().flatten(), other[name].double().flatten()
        size = float(b.norm()) or 1.0
        cosine = float(a @ b) / (float(a.norm()) * size or 1.0)
        tensors[name] = {"relative": float((a - b).norm()) / size, "cosine": cosine, "norm": float(b.norm())}
    both = sorted(tensors)
    a, b = (torch.cat([each[name].double().flatten() for name in both]) for each in (one, other))
    worst = max(both, key=lambda name: tensors[name]["relative"])
    return {
        "relative": float((a - b).norm() / b.norm()), "cosine": float(a @ b / (a.norm() * b.norm())),
        "norms": [float(a.norm()), float(b.norm())], "worst": worst, "worst relative": tensors[worst]["relative"],
        "only in one": missing, "tensors": tensors,
    }  # fmt: skip


def compare_gradients(work: Path = WORK, results: Path = RESULTS) -> None:
    """The gradients of all systems for both problems, into parity_gradient.json."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {**circumstances(), "trl": version("trl"), "transformers": version("transformers")}
    part("prepare", "text", str(work))
    for name, problem in PROBLEMS.items():
        folder, start = work / name / "gradient", problem.start(work).resolve()
        write_batch(problem, start, folder)
        for system in GRADIENTS:
            part("gradient", name, system, str(start), str(folder))
        gradients = {system: load_file(folder / f"{system}.safetensors") for system in GRADIENTS}
        found[name] = {
            f"{one} - {other}": compare_tensors(gradients[one], gradients[other])
            for one, other in (*combinations(SYSTEMS, 2), ("one_file, no mask", "trl"))
        }
        for pair, each in found[name].items():
            print(
                f"{name}: {pair}: relative difference {each['relative']:.1e}, cosine {each['cosine']:.9f}, "
                f"worst {each['worst relative']:.1e} ({each['worst']})"
                + (f", only in one: {each['only in one']}" if each["only in one"] else "")
            )
    (results / "parity_gradient.json").write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    """What the command line asks for."""
    if arguments[:1] == ["prepare"]:
        prepare(Path(arguments[2]))
        print("{}")
    elif arguments[:1] == ["gradient"] and len(arguments) > 1:
        from safetensors.torch import save_file

        name, system, start, folder = arguments[1:]
        gradients = GRADIENTS[system](PROBLEMS[name], Path(start), Path(folder))
        save_file({key: each.contiguous() for key, each in gradients.items()}, Path(folder) / f"{system}.safetensors")
        print("{}")
    elif arguments[:1] in (["run"], ["evaluate"]):
        print(json.dumps(child(arguments[0], arguments[1], arguments[2:])))
    elif arguments == ["gradient"]:
        compare_gradients()
    else:
        count = next((int(each.removeprefix("seeds=")) for each in arguments if each.startswith("seeds=")), SEEDS)
        seeds = [int(each.removeprefix("seed=")) for each in arguments if each.startswith("seed=")] or range(count)
        jobs = next((int(each.removeprefix("jobs=")) for each in arguments if each.startswith("jobs=")), 1)
        names = [each for each in arguments if each in PROBLEMS]
        for name in names or ([] if "compare" in arguments else PROBLEMS):
            study(name, seeds, jobs)
        report()


if __name__ == "__main__":
    main(sys.argv[1:])
