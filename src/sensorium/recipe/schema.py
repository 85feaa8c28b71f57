"""The sections of a recipe, each key with its description; docs/reference/recipe.md is generated from this file.

Sections are frozen and refuse unknown keys. Names (families, sources, environments, terms, losses) are checked against
``recipe.registry`` before anything is built.
"""

from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    model_validator,
)

from sensorium.recipe.estimators_and_losses import estimator_traits, loss_takes, loss_traits
from sensorium.vocabulary.secrets import holds_key


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _name_alone(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


named = model_validator(mode="before")(_name_alone)  # for sections that may be given by their name alone
FORMER_NAMES = {"worlds": "environments"}  # old names of sources in recipes and run directories
MOST_S = 1e7  # longest wait, some hundred days: with much more, clocks and sockets overflow
NO_LIMIT = 2**62  # `steps` while only epochs are given and the rows are not counted; written as null
StepCount = Annotated[
    int,
    BeforeValidator(lambda given: NO_LIMIT if given is None else given),
    PlainSerializer(lambda steps: None if steps == NO_LIMIT else steps),
]


class SourceSection(Section):
    """One source of tasks and its share of a mixture."""

    source: Annotated[str, AfterValidator(lambda name: FORMER_NAMES.get(name, name))] = Field(
        description="a registered source (jsonl, parquet, hub, environments, shapes, …) or your own, module:Name"
    )
    weight: float = Field(default=1.0, gt=0, description="its share of the mixture, relative to the other sources'")
    options: dict[str, Any] = Field(default={}, description="the source's own options; docs/guides/tasks.md lists them")


class PlannerSection(Section):
    """What decides which training task comes next. A plain text is short for the name alone: `planner: mixture`."""

    name: str = Field(default="mixture", description="mixture, success_curriculum, causal_history or your own module:Name")
    options: dict[str, Any] = Field(default={}, description="the planner's own options")

    _from_name = named


def _pair(given: Any) -> Any:
    if isinstance(given, list):
        if len(given) != 2:
            raise ValueError(f"a range [from, to], not of {len(given)} numbers")
        return tuple(given)
    return (given, given) if isinstance(given, int | float) and not isinstance(given, bool) else given


def _within(low: float, high: float) -> AfterValidator:
    """A range from ``low`` to ``high`` at most."""

    def checked(given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and not low <= given[0] <= given[1] <= high:
            raise ValueError(f"a range [from, to] between {low:g} and {high:g}, not [{given[0]:g}, {given[1]:g}]")
        return given

    return AfterValidator(checked)


Range = Annotated[tuple[float, float] | None, BeforeValidator(_pair)]  # [from, to]; one number is short for both


class PictureAugmentSection(Section):
    """How pictures are changed. Nothing is flipped or turned: left and right stay what a question means by them."""

    crop: Annotated[Range, _within(0.05, 1)] = Field(
        default=None, description="side of a random part, as a share; enlarged to the old size"
    )
    brightness: Annotated[Range, _within(0, 4)] = Field(default=None, description="factor, as [0.8, 1.2]")
    contrast: Annotated[Range, _within(0, 4)] = Field(default=None, description="factor")
    saturation: Annotated[Range, _within(0, 4)] = Field(default=None, description="factor; 0 is grey")
    blur: Annotated[Range, _within(0, 64)] = Field(
        default=None, description="radius of a Gaussian blur in pixels of the picture"
    )


class SoundAugmentSection(Section):
    """How sounds are changed, but not those that are interleaved with a video's frames."""

    speed: Annotated[Range, _within(0.25, 4)] = Field(
        default=None, description="factor of speed and pitch; below 1 a sound gets longer"
    )
    gain: Annotated[Range, _within(-60, 30)] = Field(default=None, description="decibels; cut at full scale")
    noise: Annotated[Range, _within(-20, 100)] = Field(default=None, description="white noise: signal to noise in decibels")


class VideoAugmentSection(Section):
    """How the frames that are taken of a video are changed."""

    jitter: Annotated[Range, _within(0, 1)] = Field(
        default=None, description="share of the gap between frames by which each may move"
    )


class AugmentSection(Section):
    """Random changes of the media in the messages of training tasks, for each draw of a task; docs/guides/media.md."""

    picture: PictureAugmentSection | None = Field(default=None, description="of pictures")
    sound: SoundAugmentSection | None = Field(default=None, description="of sounds")
    video: VideoAugmentSection | None = Field(default=None, description="of videos")


class TasksSection(Section):
    """Tasks to train on and to evaluate on. Bad rows and over-long prompts are refused, or skipped and counted."""

    train: tuple[SourceSection, ...] = Field(min_length=1, description="sources to train on; several are mixed by weight")
    evaluate: tuple[SourceSection, ...] = Field(default=(), description="sources of held-out tasks, with the same keys")
    on_bad_row: Literal["refuse", "skip"] = Field(default="refuse", description="what to do with an unreadable row")
    on_long_prompt: Literal["refuse", "skip"] = Field(
        default="refuse", description="what to do with a prompt over the context"
    )
    exclude: Path | None = Field(
        default=None, description="a list of rows to leave out, as `sensorium validate` writes it; docs/guides/tasks.md"
    )
    shuffle: bool = Field(default=True, description="pass through each source in a new order every epoch")
    planner: PlannerSection = Field(default=PlannerSection(), description="what decides which task comes next")
    augment: AugmentSection | None = Field(
        default=None, description="random changes of pictures, sounds and videos in training; docs/guides/media.md"
    )


class JudgeEndpointSection(Section):
    """Where a model is reached: ``base_url`` or ``azure_endpoint``. A recipe names the place of a key, never the key."""

    base_url: str = Field(default="", description="of an OpenAI-compatible server, with its /v1")
    azure_endpoint: str = Field(default="", description="of an Azure resource, instead of base_url")
    api_version: str = Field(default="", description="of Azure's API; needed with azure_endpoint")
    model: str = Field(default="", description="the model's name there (Azure: deployment); empty: as judges call it")
    api_key_env: str = Field(default="", description="environment variable that holds the key; empty: none is sent")
    api_key_file: Path | None = Field(default=None, description="file that holds the key alone, instead of api_key_env")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.base_url) == bool(self.azure_endpoint):
            raise ValueError("an endpoint has either base_url or azure_endpoint")
        if holds_key(self.base_url or self.azure_endpoint):  # errors and the log of calls show addresses, too
            raise ValueError("an endpoint whose address holds no key, user or query (api_key_env names the key)")
        if self.azure_endpoint and not self.api_version:
            raise ValueError("azure_endpoint needs api_version")
        if self.api_key_env and self.api_key_file:
            raise ValueError("an endpoint has api_key_env or api_key_file, not both")
        try:
            address = urlsplit(self.base_url or self.azure_endpoint)
            valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:  # a port that is no number, or too large
            valid = False
        if not valid:
            raise ValueError("an endpoint has an address such as http://127.0.0.1:8000/v1")
        return self


class PriceSection(Section):
    """What a model costs, for the metrics."""

    input: float = Field(default=0.0, ge=0, description="per million tokens read")
    output: float = Field(default=0.0, ge=0, description="per million tokens written")


class JudgesSection(Section):
    """Models that judge, by name; a term names the one it asks. Equal content is judged once; docs/guides/judges.md."""

    config: Path | None = Field(
        default=None,
        description="JSON file of endpoints by model name; default: the file M3_API_CONFIG names; without it, and "
        "without endpoints, configs/api_config.json",
    )
    endpoints: dict[str, tuple[JudgeEndpointSection, ...]] = Field(
        default={}, description="by model name; before those of config"
    )
    fallbacks: dict[str, tuple[str, ...]] = Field(default={}, description="models to ask, in order, when one cannot answer")
    cache: Path | None = Field(default=None, description="SQLite file, may be shared; default: the run's judges.sqlite")
    offline: bool = Field(default=False, description="answer only from the cache; a missing judgement ends the run")
    deadline_s: float = Field(default=60.0, gt=0, description="for one call of an endpoint")
    total_deadline_s: float = Field(default=300.0, gt=0, description="for one judgement, with all its calls and waits")
    retries: int = Field(default=5, ge=0, description="repeated calls per judgement: no answer, or HTTP 408, 429, 5xx")
    malformed_retries: int = Field(default=2, ge=0, description="repeated calls where an answer does not parse")
    concurrency: int = Field(default=32, ge=1, le=1024, description="concurrent calls, over all models")
    requests_per_minute: dict[str, float] = Field(default={}, description="by model; shared by all processes of a run")
    tokens_per_minute: dict[str, float] = Field(default={}, description="by model, read and written; shared likewise")
    limits: Path | None = Field(default=None, description="SQLite file to share these limits; default: the run's own")
    prices: dict[str, PriceSection] = Field(default={}, description="by model, for judge/MODEL/cost")
    structured: Literal["auto", "never"] = Field(
        default="auto", description="auto: send the answer's JSON schema to endpoints that accept it"
    )


class OptimizerSection(Section):
    """AdamW with warm-up, a schedule and clipping; rates by parameter group."""

    lr: float = Field(default=1e-6, gt=0, description="learning rate after warm-up")
    group_lr: dict[str, float] = Field(default={}, description="other rates for parts of the model, as in {vision: 1e-6}")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's decay of the two moments")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled decay of matrices, not of norms and biases")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate grows from near 0")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the rate after warm-up, down to final_lr_share"
    )
    final_lr_share: float = Field(default=0.0, ge=0, le=1, description="share of the rate that linear and cosine end at")
    clip_norm: float = Field(default=1.0, gt=0, description="the gradient's norm is clipped to this")
    moments: Literal["float32", "bfloat16", "8-bit"] = Field(
        default="float32",
        description="how AdamW's moments are stored; bfloat16 (stochastic rounding) takes half the memory, 8-bit "
        "(codes of a logarithmic scale) a quarter",
    )


class AdvantageSection(Section):
    """Which estimator turns rewards into advantages. ``recipe.estimators_and_losses`` lists the settings it takes."""

    name: str = Field(default="grpo", description="the estimator, or your own module:Name; docs/reference/algorithms.md")
    std: bool = Field(default=True, description="divide by the group's standard deviation (false: Dr.GRPO)")
    leave_one_out: bool = Field(default=False, description="mean and deviation over the other members of the group")
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount from token to token")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE's λ from token to token")
    turn_gamma: float = Field(default=1.0, ge=0, le=1, description="discount from turn to turn (Γ)")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="GAE's λ from turn to turn")
    post: Literal["none", "optimize_threshold"] = Field(default="none", description="see docs/reference/algorithms.md")


class LossSection(Section):
    """Which policy loss, and its settings. ``recipe.estimators_and_losses`` says which of them it takes."""

    name: str = Field(default="clip", description="the loss, or your own module:Name; docs/reference/algorithms.md")
    clip_low: float | None = Field(default=None, ge=0, description="left out: as published with the loss")
    clip_high: float | None = Field(default=None, ge=0, description="left out: as published with the loss")
    dual_clip: float | None = Field(default=10.0, gt=1, description="bound of the ratio where A < 0; null: none")
    tau_positive: float = Field(default=1.0, gt=0, description="SAPO's temperature where the advantage is positive")
    tau_negative: float = Field(default=1.05, gt=0, description="SAPO's temperature where it is negative")
    ratio_cap: float = Field(default=20.0, gt=0, description="DPPO's largest weight of a token")
    cov_share: float = Field(default=2e-4, gt=0, le=1, description="share of tokens that clip_cov and kl_cov treat apart")
    cov_low: float = Field(default=1.0, description="clip_cov's lower bound of the covariance")
    cov_high: float = Field(default=5.0, description="clip_cov's upper bound of the covariance")
    cov_kl_coef: float = Field(default=1.0, ge=0, description="kl_cov's weight of the KL at those tokens")
    aggregation: Literal["auto", "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = Field(
        default="auto", description="how tokens become one number; auto: as in the loss's paper"
    )
    aggregation_constant: float = Field(default=1.0, gt=0, description="the divisor of aggregation: constant")
    entropy_coef: float = Field(default=0.0, description="weight of an entropy bonus")

    @model_validator(mode="after")
    def _published_clip(self) -> Self:
        for key, published in zip(("clip_low", "clip_high"), loss_traits(self.name).clip, strict=True):
            if getattr(self, key) is None and loss_takes(self.name, key):
                self.__dict__[key] = published  # the section is frozen, but not in use yet
        return self


class KLSection(Section):
    """KL to the model that RL started from, in the loss or in the reward."""

    coef: float = Field(default=0.0, ge=0, description="weight; 0: no reference model is kept")
    estimator: Literal["k1", "abs", "k2", "k3", "k1_straight_through", "k3_straight_through"] = Field(
        default="k3", description="of each token's KL; docs/reference/algorithms.md"
    )
    place: Literal["loss", "reward"] = Field(default="loss", description="added to the loss, or taken off the reward")
    control: Literal["fixed", "adaptive"] = Field(default="fixed", description="of the coefficient, towards target")
    target: float = Field(default=0.1, gt=0, description="KL that adaptive control aims at")
    horizon: float = Field(default=10_000, gt=0, description="episodes over which adaptive control acts")


class CorrectionSection(Section):
    """Correction of the mismatch ρ = old / engine: importance weights, and rejection of sequences."""

    weights: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none", description="importance weights old / engine, by token, sequence or its geometric mean"
    )
    mode: Literal["truncate", "band"] = Field(default="truncate", description="cap at high, or drop outside [low, high]")
    low: float = Field(default=0.5, ge=0, description="the band's lower edge")
    high: float = Field(default=2.0, gt=0, description="the cap, or the band's upper edge")
    reject: Literal["none", "mean", "max"] = Field(default="none", description="drop sequences by this mismatch")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="of the mismatch, for reject")
    reject_above: float = Field(default=1.0, gt=0, description="the mismatch that rejects a sequence")
    engine_logprobs: Literal["policy", "sampled"] = Field(default="policy", description="sampled: after top-p and top-k")


class CriticSection(Section):
    """The value model: a trunk of its own, or a head on the policy's trunk."""

    trunk: Literal["own", "shared"] = Field(default="own", description="a model of its own, or a head on the policy's")
    path: str = Field(default="", description="checkpoint an own trunk starts from; empty: as the policy when RL begins")
    trunk_coef: float = Field(default=0.0, ge=0, description="how much of the value loss a shared trunk sees")
    warmup_steps: int = Field(default=0, ge=0, description="first steps in which only the critic learns")
    value_clip: float | None = Field(default=0.5, gt=0, description="how far a value may move from its old one; empty: any")
    freeze: tuple[str, ...] = Field(default=(), description="parts of the critic's trunk that do not learn")
    optimizer: OptimizerSection = Field(default=OptimizerSection(lr=1e-5), description="the critic's optimizer")


class AlgorithmSection(Section):
    """Credit and loss."""

    advantage: AdvantageSection = Field(default=AdvantageSection(), description="from scores to advantages")
    loss: LossSection = Field(default=LossSection(), description="from advantages to gradients")
    kl: KLSection = Field(default=KLSection(), description="penalty for leaving the model that RL started from")
    correction: CorrectionSection = Field(default=CorrectionSection(), description="for the engine-learner mismatch")
    router_coef: float = Field(default=0.0, ge=0, description="weight of the load-balancing loss of a mixture of experts")
    router_replay: bool = Field(
        default=False, description="a mixture's tokens go to the experts that the engine sent them to, also in the learner"
    )
    critic: CriticSection = Field(default=CriticSection(), description="the value model of the gae estimators")
    loss_mask: bool = Field(default=True, description="train only on what the model wrote; false: also on observations")
    gae_mask: bool = Field(default=True, description="GAE only over what the model wrote; false: also over observations")

    @property
    def masked(self) -> bool:
        """Whether only the model's own tokens get credit."""
        return self.loss_mask and self.gae_mask

    @property
    def sees_observations(self) -> bool:
        """Whether tokens of the environment get credit or values."""
        return not self.masked or estimator_traits(self.advantage.name).observations


class LoraSection(Section):
    """Low-rank adapters on the linear layers of named groups; everything else is frozen. Rank 0: none."""

    rank: int = Field(default=0, ge=0, description="rank of the adapters; 0 trains the weights themselves")
    alpha: float = Field(default=32.0, gt=0, description="the adapters' output is scaled by alpha / rank")
    groups: tuple[str, ...] = Field(default=("language",), description="parts of the model that get adapters")
    modules: tuple[str, ...] = Field(default=(), description="only layers whose name ends so; empty: all linear ones")
    merge: bool = Field(
        default=True,
        description="on a GPU the language model samples and trains with one weight, base plus adapters, as fast as "
        "without them; takes the adapted weights once more. false: adapters are products of their own, slower",
    )


class ModelSection(Section):
    """Which checkpoint is trained, and how it is held."""

    path: str = Field(description="a folder, hub id, package:NAME (shipped) or tiny:FAMILY[:LAYERS] (generated)")
    revision: str = Field(default="", description="a branch, tag or commit of a hub id; empty: the main branch")
    family: str = Field(default="auto", description="which adapter reads the checkpoint; auto: by its config.json")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="bfloat16 keeps exact float32 master weights"
    )
    device: str = Field(default="auto", description="auto (the GPU where there is one), cpu, cuda or cuda:N")
    freeze: tuple[str, ...] = Field(
        default=(),
        description="parts that do not learn: vision, audio, projector, language, head. Features of a tower that "
        "is frozen with its projector are computed once and cached",
    )
    gradient_checkpointing: Literal[False, True, "selective", "auto"] = Field(
        default=False,
        description="recompute activations: slower, less memory; selective: on CUDA only those of MLPs and "
        "delta rules, elsewhere as true; auto: on CUDA as little as the memory forecast allows, elsewhere none. Towers on "
        "CUDA: always",
    )
    precision: Literal["fast", "matched"] = Field(
        default="fast",
        description="fast: engine and learner each sum in their fastest order; matched: both sum in one order and "
        "agree on log-probs bit for bit, at a cost (docs/internals/exactness.md; on a CPU: tiny "
        "models only)",
    )
    dequantize: bool = Field(default=False, description="load FP8 weights as `dtype`; false: refuse them")
    unused_weights: tuple[str, ...] = Field(default=(), description="name prefixes of checkpoint weights to ignore")
    lora: LoraSection = Field(default=LoraSection(), description="low-rank adapters")
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={},
        description="defaults of variables of the chat template, as {enable_thinking: false}; the run's checkpoints "
        "keep them",
    )


class MediaSection(Section):
    """How media are decoded and cached. Runs may share a ``cache``. Media beyond a ``max_…`` are refused undecoded."""

    cache: Path | None = Field(default=None, description="folder of decoded clips; default: decoded/ in the run directory")
    cache_gib: float = Field(default=8.0, ge=0, description="0: no clips are kept on disk")
    memory_gib: float = Field(default=1.0, ge=0, description="for decoded (a quarter) and preprocessed media")
    threads: int = Field(default=2, ge=1, le=1024, description="media decoded at once")
    max_pixels: int = Field(default=64_000_000, gt=0, le=178_956_970, description="of a picture or frame; more is refused")
    max_file_mib: float = Field(default=2048, gt=0, description="of a medium's file")
    max_clip_s: float = Field(default=7200, gt=0, description="seconds of a video or sound, after its trim")
    max_clip_mib: float = Field(default=1024, gt=0, description="of a video or sound once decoded")


class BatchSection(Section):
    """How much a step plays and trains on."""

    prompts_per_step: int = Field(default=8, ge=1, description="tasks a step trains on; one group of episodes for each")
    group_size: int = Field(default=8, ge=1, description="episodes of each task")
    epochs_per_step: int = Field(default=1, ge=1, description="passes over a step's episodes")
    updates_per_epoch: int = Field(default=1, ge=1, description="optimizer updates per pass, each on a share of the groups")
    tokens_per_microbatch: int = Field(default=16384, ge=16, description="computed at once; affects memory, not results")


class EngineSection(Section):
    """What samples. A plain text is short for the name alone: `engine: native`."""

    name: str = Field(default="native", description="native, process (a child process), vllm, or your own module:Name")
    options: dict[str, Any] = Field(default={}, description="such as max_rows (concurrent responses) of native")

    _from_name = named


class RolloutSection(Section):
    """How episodes are played: sampling, budgets, windows, deadlines."""

    engine: EngineSection = Field(default=EngineSection(), description="what samples, or its name alone")
    schedule: Literal["auto", "lockstep", "eager"] = Field(
        default="auto",
        description="lockstep repeats bit for bit; eager does not wait for slow environments and does not repeat; "
        "auto: lockstep, but eager with vLLM, several engines or `schedule: asynchronous`, which "
        "cannot repeat, and from the first step on where environments are slow",
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="fp8: native decoding multiplies by FP8 copies of the MLPs' weights, made anew after each update, "
        "while training stays in bfloat16; faster, on NVIDIA GPUs since Ada and Hopper. Sampled and trained "
        "log-probs then differ: set `algorithm.correction`",
    )
    temperature: float = Field(default=1.0, ge=1e-6, description="of the policy: the same in sampling and in training")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling: total probability to sample from")
    top_k: int = Field(default=0, ge=0, description="sample from the k most likely tokens; 0: from all")
    max_new_tokens: int = Field(default=64, ge=1, description="budget of one turn")
    max_turns: int = Field(default=1, ge=1, description="turns of an episode at most; 1 for questions")
    max_episode_tokens: int = Field(default=0, ge=0, description="tokens the model may write in an episode; 0: no limit")
    count_observations: bool = Field(default=False, description="max_episode_tokens includes prompt and observations")
    max_context_tokens: int = Field(
        default=4096,
        ge=16,
        description="expanded tokens of a thread, response included; memory forecasts assume prompts of pictures "
        "that fill it, so a lower limit lowers them",
    )
    window: int = Field(default=0, ge=0, description="turns in a thread, with the current one; 0: all, in one thread")
    keep_thoughts: bool = Field(
        default=False,
        description="let threads grow under a chat template that drops the thoughts of earlier turns (Qwen3, Qwen3.5): "
        "they stay as they were sampled; false: such a template needs `window: 1`",
    )
    stop: tuple[str, ...] = Field(default=(), description="texts that end a response; they stay part of it")
    ignore_stop_tokens: bool = Field(default=False, description="never sample a stop token: every response uses its budget")
    concurrency: int = Field(default=0, ge=0, description="episodes in flight; 0: all of the step")
    environment_deadline_s: float = Field(default=30.0, gt=0, le=MOST_S, description="for each call of an environment")
    environment_calls: int = Field(default=64, ge=1, le=100_000, description="concurrent calls of environments, in threads")
    mask_truncated: bool = Field(default=False, description="leave truncated episodes out of the loss")

    _own_limits = PrivateAttr(default=frozenset[str]())  # limits that evaluation sets, of Recipe.held_out_rollout

    @property
    def prompt_limit(self) -> tuple[int, str]:
        """Tokens that a prompt must stay below, and the recipe's key of this limit."""
        if self.count_observations and self.max_episode_tokens < self.max_context_tokens:
            return self.max_episode_tokens, "rollout.max_episode_tokens, which counts it (rollout.count_observations),"
        return self.max_context_tokens, self.context_key

    @property
    def context_key(self) -> str:
        """The recipe's key of ``max_context_tokens``, for messages."""
        return f"{'evaluation' if 'max_context_tokens' in self._own_limits else 'rollout'}.max_context_tokens"

    @property
    def new_tokens_key(self) -> str:
        """The recipe's key of ``max_new_tokens``, for messages."""
        return f"{'evaluation' if 'max_new_tokens' in self._own_limits else 'rollout'}.max_new_tokens"


class EnvironmentsSection(Section):
    """Instances of environments that are expensive to start, such as browsers; docs/guides/environments.md."""

    pool: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="instances that are kept and reset for each episode, each in a process of its own; the other episodes "
        "wait. 0: each episode builds its own",
    )


class ScheduleSection(Section):
    """When a step's episodes are played. A plain text is short for the name alone: `schedule: one_step_off`."""

    name: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        default="synchronous",
        description="one_step_off: a step is played before the update of the step before it; asynchronous: groups "
        "are played all the time",
    )
    max_staleness: int = Field(default=2, ge=0, le=1000, description="asynchronous: largest age of a group, in steps")

    _from_name = named


class TermSection(Section):
    """One reward term."""

    name: str = Field(description="a registered term, or your own class or function, module:Name")
    weight: float = Field(default=1.0, description="of its score in the reward; 0: measured only")
    options: dict[str, Any] = Field(default={}, description="the term's own options; docs/reference/rewards.md lists them")


class RewardsSection(Section):
    """Named terms with weights; what happens when one is missing."""

    terms: tuple[TermSection, ...] = Field(min_length=1, description="the terms; the reward is their weighted sum")
    deadline_s: float = Field(default=30.0, gt=0, le=MOST_S, description="for one call of a term that is not instant")
    retries: int = Field(default=2, ge=0, description="repeated calls of a term that failed")
    retry_wait_s: float = Field(default=0.5, ge=0, le=MOST_S, description="pause between them")
    on_missing: Literal["drop_episode", "drop_group"] = Field(default="drop_episode", description="if a score is missing")


class SelectionSection(Section):
    """Which groups a step trains on."""

    dynamic: bool = Field(default=False, description="draw more tasks until enough groups have signal")
    max_rounds: int = Field(default=4, ge=1, description="draws of dynamic at most")
    variance_share: float = Field(
        default=1.0, gt=0, le=1, description="share of groups to train on, by variance of rewards"
    )
    oversample: float = Field(default=1.0, ge=1, description="play so many times the tasks; stop at enough complete groups")

    @property
    def rounds(self) -> int:
        """How many times a step may draw tasks."""
        return self.max_rounds if self.dynamic else 1

    def played(self, wanted: int) -> int:
        """How many tasks are played for so many groups."""
        return _rounded_up(self.oversample, wanted)

    def kept(self, groups: int) -> int:
        """How many of these groups variance_share keeps."""
        return _rounded_up(self.variance_share, groups)


def _rounded_up(factor: float, count: int) -> int:
    """The product rounded up, with the factor as the decimal in the recipe: 0.55 of 20 are 11, not 12."""
    return ceil(Fraction(factor).limit_denominator(10**6) * count)


class WarmStartSection(Section):
    """A supervised stage before RL, in the same loop: demonstrations are played, or read as recorded, and learned."""

    steps: int = Field(default=0, ge=0, description="supervised steps before RL; 0: none")
    prompts_per_step: int = Field(default=32, ge=1, description="demonstrations a step")
    demonstrations: Path | None = Field(
        default=None, description="folder of `sensorium record`, read instead of playing the tasks' demonstrations"
    )
    optimizer: OptimizerSection = Field(default=OptimizerSection(lr=1e-3), description="the warm start's own optimizer")


class EvaluationSection(Section):
    """Evaluation during training, into ``eval/…`` metrics."""

    every: int = Field(default=0, ge=0, description="steps between evaluations (of a warm start, only its end); 0: never")
    at_start: bool = Field(default=False, description="evaluate before the first step, too")
    limit: int = Field(default=0, ge=0, description="tasks at most, drawn from all of them; 0: all")
    temperature: float = Field(default=1.0, ge=0, description="of evaluation; 0: greedy")
    samples: int = Field(default=1, ge=1, description="attempts at each held-out task")
    max_context_tokens: int = Field(default=0, ge=0, description="of held-out tasks, ≥ 16; 0: as in rollout")
    max_new_tokens: int = Field(default=0, ge=0, description="of a held-out task's turn; 0: as in rollout")


class CheckpointSection(Section):
    """When to save, how many to keep, and which metric decides the best one."""

    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: at the ends of warm start and run")
    keep: int = Field(default=2, ge=1, description="how many of the latest are kept; the best is kept besides")
    best: str = Field(
        default="eval/accuracy",
        description="metric of the best checkpoint (or eval/reward); empty: none",
    )


class ClusterSection(Section):
    """How many processes learn, sample, play environments and score, and where they are.

    Several learners hold a part of the weights each (FSDP2) and compute a part of every update. With ``sequence_parallel``
    so many of them share the tokens of each micro-batch, for contexts that one cannot hold. With ``ray`` all of them
    are placed by Ray, on as many machines as its cluster has; all must see the run directory under the same path.
    """

    learners: int = Field(default=1, ge=1, le=4096, description="ranks of the learner; 1: this process, or an actor of Ray")
    sequence_parallel: int = Field(default=1, ge=1, le=64, description="learners that share each micro-batch's tokens")
    placement: Literal["processes", "ray"] = Field(default="processes", description="of this machine, or Ray actors")
    address: str = Field(default="", description="of a running Ray cluster; empty: one is started for the run")
    engines: int = Field(default=1, ge=1, le=1024, description="of rollout.engine, each with weights of its own")
    environments: int = Field(default=0, ge=0, le=4096, description="workers that play environments; 0: the driver does")
    rewards: int = Field(default=0, ge=0, le=4096, description="workers that score by slow terms; 0: the driver does")
    restarts: int = Field(default=3, ge=0, description="replacements of failed processes, where a kind has several")
    backend: Literal["auto", "gloo", "nccl"] = Field(default="auto", description="auto: nccl on GPUs, gloo on CPUs")
    share_gpus: bool = Field(default=False, description="engines of this machine may share GPUs, also the learner's")
    offload: bool = Field(default=False, description="keep weights and moments in the machine's memory, not the GPU's")
    hang_s: float = Field(default=20.0, gt=0, le=MOST_S, description="silence after which a worker is replaced")
    start_s: float = Field(default=600.0, gt=0, le=MOST_S, description="for all ranks to load the model and connect")
    reply_s: float = Field(default=3600.0, gt=0, le=MOST_S, description="for a step; after it a silent rank is lost")

    @property
    def shared(self) -> bool:
        """True if the learner runs in other processes."""
        return self.learners > 1 or self.placement == "ray"


class LoggingSection(Section):
    """Loggers beside console and metrics.jsonl, which always run."""

    loggers: tuple[str, ...] = Field(
        default=(), description="tensorboard, wandb, mlflow, trackio, or your own, module:Name"
    )
    episodes: int = Field(default=0, ge=0, description="episodes written per step; 0: all")
    full_steps: int = Field(default=200, ge=0, description="last steps whose episodes stay whole on disk; 0: all steps")
    sampled_steps: int = Field(default=1000, ge=0, description="older steps that keep one group, evenly spread; 0: none")
    episodes_gib: float = Field(default=4.0, gt=0, description="disk for episode logs; beyond it the oldest are removed")
    project: str = Field(default="sensorium", description="the project's name for loggers that have projects")
    layout: Literal["", "taskmem"] = Field(
        default="", description="taskmem: also write TaskMem's STEP/VIDEO.json, history/ and global_step_STEP"
    )
    generations: int = Field(default=0, ge=0, description="held-out episodes per evaluation sent to loggers")


class HealthSection(Section):
    """When a run that learns nothing stops, and the sight check: does the model look and listen?

    The **sight check** plays held-out tasks greedily at the start and at the end: as they are, and with pictures, videos
    and sounds blanked, one kind at a time. It runs where the recipe evaluates.
    """

    stop_after: int = Field(default=20, ge=0, description="consecutive steps without an update that end a run; 0: never")
    sight_tasks: int = Field(default=32, ge=0, description="held-out tasks of the sight check; 0: none")


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run directory")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63, description="decides order, sampling and fresh weights")
    steps: StepCount = Field(default=NO_LIMIT, ge=0, description="steps of RL; may be left out where epochs are given")
    epochs: float = Field(
        default=0, ge=0, description="passes over tasks.train; the earlier of steps and epochs ends a run; 0: steps"
    )
    run_dir: Path | None = Field(default=None, description="default: runs/NAME")
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads; 0: as the machine or OMP_NUM_THREADS has")
    model: ModelSection = Field(description="the checkpoint to train")
    tasks: TasksSection = Field(description="sources of training and held-out tasks")
    media: MediaSection = Field(default=MediaSection(), description="decoding and caches of media; docs/guides/media.md")
    batch: BatchSection = Field(default=BatchSection(), description="size of a step")
    selection: SelectionSection = Field(default=SelectionSection(), description="which groups a step trains on")
    rollout: RolloutSection = Field(default=RolloutSection(), description="how episodes are played")
    environments: EnvironmentsSection = Field(default=EnvironmentsSection(), description="instances of environments")
    schedule: ScheduleSection = Field(default=ScheduleSection(), description="when episodes are played, or its name")
    rewards: RewardsSection = Field(description="reward terms and their weights")
    judges: JudgesSection = Field(default=JudgesSection(), description="models that judge; docs/guides/judges.md")
    algorithm: AlgorithmSection = Field(default=AlgorithmSection(), description="docs/reference/algorithms.md")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="of the policy in RL")
    warm_start: WarmStartSection = Field(default=WarmStartSection(), description="supervised steps before RL")
    evaluation: EvaluationSection = Field(default=EvaluationSection(), description="on held-out tasks, during training")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="what is saved, and when")
    logging: LoggingSection = Field(default=LoggingSection(), description="loggers and episode logs")
    health: HealthSection = Field(default=HealthSection(), description="stopping and sight check; docs/reference/health.md")
    cluster: ClusterSection = Field(default=ClusterSection(), description="processes; docs/guides/scale_out.md")

    @property
    def lockstep(self) -> bool:
        """True if episodes wait for each other before each token, so that a run repeats bit for bit."""
        rollout = self.rollout
        if rollout.schedule != "auto":
            return rollout.schedule == "lockstep"
        return rollout.engine.name != "vllm" and self.cluster.engines == 1 and self.schedule.name != "asynchronous"

    @property
    def counts_rows(self) -> bool:
        """True while the number of steps is unknown: only epochs are given, and the rows are not counted yet."""
        return self.steps == NO_LIMIT

    @property
    def held_out_rollout(self) -> RolloutSection:
        """The section ``rollout`` for held-out tasks, with the limits of ``evaluation``."""
        own = self.evaluation
        limits = {"max_context_tokens": own.max_context_tokens, "max_new_tokens": own.max_new_tokens}
        limits = {name: limit for name, limit in limits.items() if limit}
        section = self.rollout.model_copy(update=limits)
        section._own_limits = frozenset(limits)
        return section

    @property
    def total_steps(self) -> int:
        return self.warm_start.steps + self.steps

    def evaluates_after(self, step: int) -> bool:
        """True if held-out tasks are played after this step (0: the start).

        If anything is evaluated, the end of the warm start is too, since RL begins there.
        """
        section, warm = self.evaluation, self.warm_start.steps
        if step == 0:
            return section.at_start
        if step == warm:
            return bool(section.every) or section.at_start
        due = bool(section.every) and (step % section.every == 0 or step == self.total_steps)
        return due and step > warm

    @property
    def evaluation_count(self) -> int:
        """How often held-out tasks are played in the whole run."""
        if not self.tasks.evaluate:
            return 0
        every, warm, total = self.evaluation.every, self.warm_start.steps, self.total_steps
        counted = self.evaluates_after(0) + (warm > 0 and self.evaluates_after(warm))
        if every and total > warm:
            counted += total // every - warm // every + (total % every > 0)  # the last step is always evaluated
        return counted

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is due after this step, whatever its metrics are."""
        every = self.checkpoint.every
        return bool(every and step % every == 0) or step == self.total_steps

    def plays_ahead(self, step: int) -> bool:
        """True if the next step is played before this one's update: nothing is saved or evaluated in between."""
        if self.schedule.name != "one_step_off" or not self.warm_start.steps < step < self.total_steps:
            return False
        return not self.saves_after(step) and not self.evaluates_after(step)

    @property
    def checks_sight(self) -> bool:
        """True if the sight check runs: it is enabled, and the recipe evaluates."""
        evaluates = bool(self.evaluation.every) or self.evaluation.at_start
        return self.health.sight_tasks > 0 and evaluates and bool(self.tasks.evaluate) and self.total_steps > 0

    @property
    def directory(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name
