"""Episodes played by hand on tiny policies, and the same threads through the stock transformers model, row by row."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sensorium.data.media_store import MediaStore
from sensorium.learner.learner import CreditedEpisode, Learner
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.recipe.schema import AlgorithmSection, BatchSection, OptimizerSection
from sensorium.vocabulary import Episode, Media, Segment, Status, Thread, Turn, system, user
from tests.families import FAMILY_ROWS, stock_class

from ..models.clips import clip, heard_clip, noise, row_inputs, tone

Groups = list[list[CreditedEpisode]]


def open_policy(folder: Path, dtype: str = "float32", store: MediaStore | None = None, device: str = "cpu") -> Policy:
    return load_policy(str(folder), store=store or MediaStore(), dtype=dtype, device=device)


def make_learner(policy: Policy, **given: Any) -> Learner:
    settings: dict[str, Any] = {
        "optimizer": OptimizerSection(lr=1e-3),
        "algorithm": AlgorithmSection(),
        "batch": BatchSection(),
        "temperature": 1.0,
        "total_steps": 10,
    }
    return Learner(policy, **(settings | given))


class Player:
    """Plays random episodes: what the model 'writes' is drawn from the ids it may write.

    ``engine``: its log-probs of each response, by the response's text; others are drawn, too.
    """

    def __init__(self, policy: Policy, seed: int = 0, engine: Mapping[str, list[float]] | None = None) -> None:
        self.policy = policy
        self.engine = engine or {}
        self.rng = np.random.default_rng(seed)
        self.allowed = np.setdiff1d(np.arange(len(policy.chat.tokenizer)), policy.chat.forbidden_ids)
        self.count = self.episodes = 0

    def picture(self, width: int = 56, height: int = 56) -> Media:
        """A picture, or a sound of a family that sees none."""
        if "picture" not in self.policy.chat.modalities:
            return self.sound()
        return noise(self.policy.chat.store, int(self.rng.integers(1 << 30)), width, height)

    def film(self) -> Media:
        frames, seconds = int(self.rng.integers(2, 6)), float(self.rng.uniform(1, 12))
        if FAMILY_ROWS[self.policy.family].one_length == "model":
            frames = 3
        return clip(self.policy.chat.store, int(self.rng.integers(1 << 30)), frames, 56, 28, seconds)

    def heard_film(self) -> Media:
        seed, seconds = int(self.rng.integers(1 << 30)), float(self.rng.uniform(1, 4))
        return heard_clip(self.policy.chat.store, seed, FAMILY_ROWS[self.policy.family].heard_s or seconds)

    def sound(self) -> Media:
        shortest = max(0.05, FAMILY_ROWS[self.policy.family].shortest_s)
        return tone(self.policy.chat.store, int(self.rng.integers(1 << 30)), float(self.rng.uniform(shortest, 2.5)))

    def write(self, longest: int = 9) -> Segment:
        self.count += 1
        tokens = self.rng.choice(self.allowed, self.rng.integers(1, longest + 1)).tolist()
        text, drawn = f"response {self.count}", (-self.rng.random(len(tokens)) * 6).tolist()
        logprobs = self.engine.get(text, drawn)
        return self.policy.chat.written(tokens, logprobs, logprobs, text)

    def sample(self, threads: list[Thread], places: list[tuple[int, int]]) -> CreditedEpisode:
        turns = [
            Turn(i, (), threads[thread].segments[segment], thread, segment) for i, (thread, segment) in enumerate(places)
        ]
        self.episodes += 1
        name = f"episode {self.episodes}"
        episode = Episode(name, "task", "group", 0, tuple(threads), tuple(turns), Status.FINISHED)
        advantages = tuple(torch.from_numpy(self.rng.normal(size=len(turn.response.tokens))).float() for turn in turns)
        return CreditedEpisode(episode, advantages)

    def single_turn(
        self, size: int = 3, pictures: int = 1, longest: int = 9, side: int = 84, more: Sequence[Media] = ()
    ) -> list[CreditedEpisode]:
        """A question with pictures of sides up to ``side`` and with ``more``, answered ``size`` times."""
        sides = self.rng.integers(1, side // 28 + 1, (pictures, 2)) * 28
        shown = [*more, *(self.picture(int(width), int(height)) for width, height in sides)]
        prompt = self.policy.chat.render([user(*shown, "What colour?" + " is it?" * int(self.rng.integers(3)))])
        threads = [Thread((prompt, self.write(longest)), (False, True)) for _ in range(size)]
        return [self.sample([thread], [(0, 1)]) for thread in threads]

    def conversation(self, size: int = 3, turns: int = 3, late: Callable[[], Media] | None = None) -> list[CreditedEpisode]:
        """One thread an episode; a picture in the first question, and in every third turn one of its own (or ``late``)."""
        late = late or (lambda: self.picture(56, 28))
        prompt = self.policy.chat.render([user(self.picture(), "Where?")])
        samples = []
        for _ in range(size):
            segments, home, places = [prompt], [False], []
            for turn in range(turns):
                answer = self.write()
                segments.append(answer)
                home.append(True)
                places.append((0, len(segments) - 1))
                if turn < turns - 1:
                    shown = [late()] if turn == 1 else []
                    segments.append(self.policy.chat.extend([user(*shown, "and now?")], after=answer))
                    home.append(False)
            samples.append(self.sample([Thread(tuple(segments), tuple(home))], places))
        return samples

    def windowed(self, size: int = 2, turns: int = 4, window: int = 2) -> list[CreditedEpisode]:
        """A sliding window of turns: several threads an episode, answers recurring as context, pictures in every turn."""
        head = self.policy.chat.render([system("Answer briefly.")], generate=False)
        first = [user(self.picture(), "start")]
        samples = []
        for _ in range(size):
            questions = [first] + [[user(self.picture(28, 28 * turn), f"turn {turn}")] for turn in range(1, turns)]
            answers: list[Segment] = []
            threads, places = [], []
            for turn in range(turns):
                begin = max(0, turn - window + 1)
                segments = [head, self.policy.chat.render_after_head(questions[begin])]
                for i in range(begin, turn):
                    segments += [answers[i], self.policy.chat.extend(questions[i + 1], after=answers[i])]
                answers.append(self.write())
                segments.append(answers[-1])
                threads.append(Thread(tuple(segments), (False,) * (len(segments) - 1) + (True,)))
                places.append((turn, len(segments) - 1))
            samples.append(self.sample(threads, places))
        return samples


def stock_model(folder: Path) -> Any:
    """The checkpoint as transformers loads it, nothing of ours in it."""
    family = json.loads((folder / "config.json").read_text())["model_type"].removesuffix("_thinker")
    return stock_class(family).from_pretrained(folder, dtype=torch.float32).eval()


def stock_rows(
    model: Any, policy: Policy, groups: Groups, row: Callable[[CreditedEpisode, int, Tensor, Tensor], None]
) -> float:
    """Every turn's home thread as one plain forward: calls ``row(sample, turn, logits [T, V], tokens [T])``.

    Returns the largest logit seen.
    """
    scale = 0.0
    for sample in (sample for group in groups for sample in group):
        for turn in sample.episode.turns:
            given = stock_inputs(policy, sample, turn.index)
            logits = model(**given).logits[0]
            scale = max(scale, float(logits.detach().abs().max()))
            count = len(turn.response.tokens)
            row(sample, turn.index, logits[-count - 1 : -1], given["input_ids"][0, -count:])
    return scale


def stock_hidden(model: Any, policy: Policy, sample: CreditedEpisode, turn: int) -> Tensor:
    """The hidden states [T, H] of a turn's home thread up to its response, by a plain forward."""
    with torch.no_grad():
        hidden: Tensor = model.model(**stock_inputs(policy, sample, turn)).last_hidden_state[0]
    return hidden


def stock_inputs(policy: Policy, sample: CreditedEpisode, turn: int) -> dict[str, Tensor]:
    """What a plain forward over a turn's home thread takes."""
    place = sample.episode.turns[turn]
    segments = sample.episode.threads[place.thread].segments[: place.segment + 1]
    ids_T = torch.cat([policy.chat.layout(segment).ids_T for segment in segments])
    return row_inputs(policy, ids_T, [span.media for segment in segments for span in segment.media])


def distribution(policy: Policy, logits: Tensor, temperature: float) -> Tensor:
    """Log-probs of all ids: softmax(logits / temperature), forbidden ids left out."""
    scaled = logits.double() / temperature
    scaled = scaled.index_fill(1, torch.tensor(policy.chat.forbidden_ids), float("-inf"))
    return torch.log_softmax(scaled, dim=1)
