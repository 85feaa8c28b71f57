"""What every section of a recipe has in common."""

from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

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

from sensorium.recipe.traits import estimator_traits, loss_takes, loss_traits
from sensorium.vocabulary.secrets import holds_key


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _name_alone(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


named = model_validator(mode="before")(_name_alone)
"""For sections of a name and options: a plain text is short for the name alone."""


FORMER_NAMES = {"worlds": "environments"}
"""Sources that had another name, which recipes and run directories may still say."""


class SourceSection(Section):
    """One source of tasks and its share of a mixture."""

    source: Annotated[str, AfterValidator(lambda name: FORMER_NAMES.get(name, name))]
    weight: float = Field(default=1.0, gt=0)
    options: dict[str, Any] = Field(default={})


class PlannerSection(Section):
    """What decides which training task comes next. A plain text is short for the name alone: `planner: mixture`."""

    name: str = "mixture"
    options: dict[str, Any] = Field(default={})

    _from_name = named


class TasksSection(Section):
    """Tasks to train on and to evaluate on. Bad rows and over-long prompts are refused, or skipped and counted."""

    train: tuple[SourceSection, ...] = Field(min_length=1)
    evaluate: tuple[SourceSection, ...] = ()
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    on_long_prompt: Literal["refuse", "skip"] = "refuse"
    shuffle: bool = True
    planner: PlannerSection = PlannerSection()


# A recipe never holds a key: it names an environment variable or a file that does.


class JudgeEndpointSection(Section):
    """Where a model is reached: ``base_url`` of an OpenAI-compatible server, or ``azure_endpoint`` with ``api_version``."""

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
        address = urlsplit(self.base_url or self.azure_endpoint)
        if holds_key(self.base_url or self.azure_endpoint):  # errors and the log of calls show addresses, too
            raise ValueError("an endpoint whose address holds no key, user or query (api_key_env names the key)")
        if self.azure_endpoint and not self.api_version:
            raise ValueError("azure_endpoint needs api_version")
        if self.api_key_env and self.api_key_file:
            raise ValueError("an endpoint has api_key_env or api_key_file, not both")
        if address.scheme not in ("http", "https") or not address.hostname or not _port_fits(address):
            raise ValueError("an endpoint has an address such as http://127.0.0.1:8000/v1")
        return self


def _port_fits(address: SplitResult) -> bool:
    try:
        return address.port != 0
    except ValueError:
        return False


class PriceSection(Section):
    """What a model costs, for the metrics."""

    input: float = Field(default=0.0, ge=0, description="for a million tokens that it reads")
    output: float = Field(default=0.0, ge=0, description="for a million tokens that it writes")


class JudgesSection(Section):
    """Models that judge, by name; a term names the one it asks. Equal content is judged once; docs/guides/judges.md."""

    config: Path | None = Field(
        default=None,
        description="JSON file of endpoints by model name; default: the file M3_API_CONFIG names; without it, and without "
        "endpoints, configs/api_config.json",
    )
    endpoints: dict[str, tuple[JudgeEndpointSection, ...]] = Field(
        default={}, description="endpoints by model name; they come before those of config"
    )
    fallbacks: dict[str, tuple[str, ...]] = Field(default={}, description="models to ask, in turn, where one cannot answer")
    cache: Path | None = Field(
        default=None, description="SQLite file that runs may share; default: judges.sqlite of the run"
    )
    offline: bool = Field(default=False, description="answer from the cache alone; what it lacks ends the run")
    deadline_s: float = Field(default=60.0, gt=0, description="for one call of an endpoint")
    total_deadline_s: float = Field(default=300.0, gt=0, description="for one judgement, with all its calls and waits")
    retries: int = Field(
        default=5, ge=0, description="calls made again for one judgement: no answer, or HTTP 408, 429, 5xx"
    )
    malformed_retries: int = Field(default=2, ge=0, description="calls made again where an answer is not in its form")
    concurrency: int = Field(default=32, ge=1, le=1024, description="calls at once, of all models")
    requests_per_minute: dict[str, float] = Field(default={}, description="by model; shared by all processes of a run")
    tokens_per_minute: dict[str, float] = Field(default={}, description="by model, read and written; shared likewise")
    limits: Path | None = Field(
        default=None, description="SQLite file of these limits, for runs that share them; default: one of the run"
    )
    prices: dict[str, PriceSection] = Field(default={}, description="what models cost, by name; for judge/MODEL/cost")
    structured: Literal["auto", "never"] = Field(
        default="auto", description="auto: send the JSON schema of the answer along, and stop where an endpoint refuses it"
    )


class OptimizerSection(Section):
    """AdamW with warm-up, a schedule and clipping; rates by parameter group."""

    lr: float = Field(default=1e-6, gt=0)
    group_lr: dict[str, float] = Field(default={})
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    clip_norm: float = Field(default=1.0, gt=0)
    moments: Literal["float32", "bfloat16", "8-bit"] = "float32"


class AdvantageSection(Section):
    """Which estimator turns rewards into advantages. ``recipe.traits`` says which of the settings it takes."""

    name: str = "grpo"
    std: bool = True
    leave_one_out: bool = False
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount from token to token")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE's λ from token to token")
    turn_gamma: float = Field(default=1.0, ge=0, le=1, description="discount from turn to turn (Γ)")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="GAE's λ from turn to turn")
    post: Literal["none", "optimize_threshold"] = "none"


class LossSection(Section):
    """Which policy loss, and its settings. ``recipe.traits`` says which of them it takes.

    ``clip_low`` and ``clip_high`` that are left out become the published ones of the loss, where it clips at all.
    """

    name: str = "clip"
    clip_low: float | None = Field(default=None, ge=0, description="left out: as published with the loss")
    clip_high: float | None = Field(default=None, ge=0, description="left out: as published with the loss")
    dual_clip: float | None = Field(default=10.0, gt=1, description="bound of the ratio where A < 0; null: none")
    tau_positive: float = Field(default=1.0, gt=0)
    tau_negative: float = Field(default=1.05, gt=0)
    ratio_cap: float = Field(default=20.0, gt=0)
    cov_share: float = Field(default=2e-4, gt=0, le=1)
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = Field(default=1.0, ge=0)
    aggregation: Literal["auto", "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "auto"
    aggregation_constant: float = Field(default=1.0, gt=0)
    entropy_coef: float = 0.0

    @model_validator(mode="after")
    def _published_clip(self) -> Self:
        for key, published in zip(("clip_low", "clip_high"), loss_traits(self.name).clip, strict=True):
            if getattr(self, key) is None and loss_takes(self.name, key):
                self.__dict__[key] = published  # the section is frozen, and not yet anybody's
        return self


class KLSection(Section):
    """KL to the model as it was when RL began, in the loss or in the reward. Coefficient 0: no reference is kept.

    ``adaptive`` moves the coefficient towards ``target``, within ``horizon`` episodes.
    """

    coef: float = Field(default=0.0, ge=0)
    estimator: Literal["k1", "abs", "k2", "k3", "k1_straight_through", "k3_straight_through"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    control: Literal["fixed", "adaptive"] = "fixed"
    target: float = Field(default=0.1, gt=0)
    horizon: float = Field(default=10_000, gt=0)


class CorrectionSection(Section):
    """What is done about ρ = old / engine. ``truncate`` caps weights at ``high``; ``band`` drops those outside [low, high].

    ``weights`` are of each token, of the whole sequence (the product) or its geometric mean. ``reject`` leaves out
    sequences whose mean or largest ``estimator`` of the mismatch is above ``reject_above``. ``engine_logprobs`` are of the
    whole policy, or of what was ``sampled`` from: the policy cut off by top-p and top-k.
    """

    weights: Literal["none", "token", "sequence", "geometric"] = "none"
    mode: Literal["truncate", "band"] = "truncate"
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=2.0, gt=0)
    reject: Literal["none", "mean", "max"] = "none"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    reject_above: float = Field(default=1.0, gt=0)
    engine_logprobs: Literal["policy", "sampled"] = "policy"


class CriticSection(Section):
    """The value model: a trunk of its own, or a head on the policy's trunk. For the first steps only it learns.

    ``trunk_coef``: how much of the value loss a shared trunk sees; 0: none. ``path``: where an own trunk starts;
    empty: as the policy does when RL begins.
    """

    trunk: Literal["own", "shared"] = "own"
    path: str = ""
    trunk_coef: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    value_clip: float | None = Field(default=0.5, gt=0)
    freeze: tuple[str, ...] = ()
    optimizer: OptimizerSection = OptimizerSection(lr=1e-5)


class AlgorithmSection(Section):
    """Credit and loss. ``critic`` may be left out where the estimator needs none, and has its defaults where it does."""

    advantage: AdvantageSection = AdvantageSection()
    loss: LossSection = LossSection()
    kl: KLSection = KLSection()
    correction: CorrectionSection = CorrectionSection()
    router_coef: float = Field(default=0.0, ge=0, description="weight of the load-balancing loss of a mixture of experts")
    critic: CriticSection = CriticSection()
    loss_mask: bool = Field(
        default=True, description="train on what the model wrote only; false: on the text of observations after it, too"
    )
    gae_mask: bool = Field(
        default=True, description="run GAE over what the model wrote only; false: over observations, too"
    )

    @property
    def masked(self) -> bool:
        """Whether credit is a matter of the model's own tokens alone."""
        return self.loss_mask and self.gae_mask

    @property
    def sees_observations(self) -> bool:
        """Whether credit has positions at the environment's tokens."""
        return not self.masked or estimator_traits(self.advantage.name).observations


# Sections are frozen; unknown keys are refused. Names (families, sources, environments, terms, losses) are checked
# against ``recipe.names`` before anything is built.


MOST_S = 1e7
"""Seconds that a wait may be given, some hundred days: at much more, clocks and sockets overflow."""


NO_LIMIT = 2**62
"""``steps`` of a recipe that gives epochs alone, until its rows are counted; written as null."""

StepCount = Annotated[
    int,
    BeforeValidator(lambda given: NO_LIMIT if given is None else given),
    PlainSerializer(lambda steps: None if steps == NO_LIMIT else steps),
]


class LoraSection(Section):
    """Low-rank adapters on the linear layers of named groups; everything else is frozen. Rank 0: none."""

    rank: int = Field(default=0, ge=0)
    alpha: float = Field(default=32.0, gt=0)
    groups: tuple[str, ...] = ("language",)
    modules: tuple[str, ...] = Field(default=(), description="only layers whose name ends so; empty: all linear ones")


class ModelSection(Section):
    """Which checkpoint is trained, and how it is held."""

    path: str = Field(
        description="a folder, a hub id, 'package:NAME' (shipped), 'tiny:FAMILY' or 'tiny:FAMILY:LAYERS' (made on the spot)"
    )
    revision: str = Field(default="", description="a branch, tag or commit of a hub id; empty: the main branch")
    family: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    freeze: tuple[str, ...] = ()
    gradient_checkpointing: Literal[False, True, "selective", "auto"] = False
    precision: Literal["fast", "matched"] = "fast"
    dequantize: bool = Field(default=False, description="load FP8 weights as numbers of `dtype`; else they are refused")
    unused_weights: tuple[str, ...] = Field(
        default=(), description="first letters of weights that the checkpoint has and the model has no place for"
    )
    lora: LoraSection = LoraSection()


class MediaSection(Section):
    """How media are decoded, off the event loop, and kept: decoded videos and sounds on disk, and in memory what is in use.

    Runs may share a ``cache``. ``memory_gib`` bounds decoded and preprocessed media together: a quarter, and the rest.
    What is beyond ``max_…`` is refused before it is decoded, by row and path.
    """

    cache: Path | None = Field(default=None, description="folder of decoded clips; default: decoded/ in the run directory")
    cache_gib: float = Field(default=8.0, ge=0, description="0: no clips are kept on disk")
    memory_gib: float = Field(default=1.0, ge=0)
    threads: int = Field(default=2, ge=1, le=1024, description="media decoded at once")
    max_pixels: int = Field(default=64_000_000, gt=0, le=178_956_970, description="of a picture or frame; more is refused")
    max_file_mib: float = Field(default=2048, gt=0, description="of a medium's file")
    max_clip_s: float = Field(default=7200, gt=0, description="seconds of a video or sound, after its trim")
    max_clip_mib: float = Field(default=1024, gt=0, description="of a video or sound once decoded")


class BatchSection(Section):
    """The batch words, and no others."""

    prompts_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=1)
    epochs_per_step: int = Field(default=1, ge=1)
    updates_per_epoch: int = Field(default=1, ge=1)
    tokens_per_microbatch: int = Field(default=16384, ge=16)


class EngineSection(Section):
    """What samples. A plain text is short for the name alone: `engine: native`."""

    name: str = "native"
    options: dict[str, Any] = Field(default={})

    _from_name = named


class RolloutSection(Section):
    """How episodes are played: sampling, budgets, windows, deadlines."""

    engine: EngineSection = EngineSection()
    schedule: Literal["auto", "lockstep", "eager"] = "auto"
    temperature: float = Field(default=1.0, ge=1e-6)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int = Field(default=64, ge=1, description="budget of one turn")
    max_turns: int = Field(default=1, ge=1)
    max_episode_tokens: int = Field(default=0, ge=0, description="tokens the model may write in an episode; 0: no limit")
    count_observations: bool = Field(
        default=False, description="max_episode_tokens counts the prompt and what environments show, too, as slime does"
    )
    max_context_tokens: int = Field(
        default=4096,
        ge=16,
        description="expanded tokens of a thread, response included; forecasts of memory take every prompt to fill it with "
        "pictures, so a lower limit lowers them",
    )
    window: int = Field(
        default=0, ge=0, description="turns of history in a thread (the current one included); 0: all, one thread"
    )
    stop: tuple[str, ...] = ()
    ignore_stop_tokens: bool = False
    concurrency: int = Field(default=0, ge=0, description="episodes in flight; 0: all of the step")
    environment_deadline_s: float = Field(
        default=30.0, gt=0, le=MOST_S, description="for each call of an environment, once it begins"
    )
    environment_calls: int = Field(
        default=64, ge=1, le=100_000, description="calls of environments that run at once, in threads"
    )
    mask_truncated: bool = Field(default=False, description="leave truncated episodes out of the loss")

    @property
    def prompt_limit(self) -> tuple[int, str]:
        """Tokens that a prompt must stay below, and the recipe's key that says so."""
        if self.count_observations and self.max_episode_tokens < self.max_context_tokens:
            return self.max_episode_tokens, "rollout.max_episode_tokens, which counts it (rollout.count_observations),"
        return self.max_context_tokens, self.context_key

    @property
    def context_key(self) -> str:
        """The recipe's key of ``max_context_tokens``, for messages."""
        return "rollout.max_context_tokens"

    @property
    def new_tokens_key(self) -> str:
        """The recipe's key of ``max_new_tokens``, for messages."""
        return "rollout.max_new_tokens"


class HeldOutRollout(RolloutSection):
    """How held-out tasks are played: as ``rollout`` says, within the limits of ``evaluation``. Not a section of its own."""

    _own = PrivateAttr(default=frozenset[str]())  # names of the limits that evaluation itself sets

    @property
    def context_key(self) -> str:
        """The key of evaluation's own limit, or of rollout's where that counts."""
        return f"{'evaluation' if 'max_context_tokens' in self._own else 'rollout'}.max_context_tokens"

    @property
    def new_tokens_key(self) -> str:
        """The key of evaluation's own limit, or of rollout's where that counts."""
        return f"{'evaluation' if 'max_new_tokens' in self._own else 'rollout'}.max_new_tokens"


class ScheduleSection(Section):
    """When a step's episodes are played. A plain text is short for the name alone: `schedule: one_step_off`."""

    name: Literal["synchronous", "one_step_off", "asynchronous"] = "synchronous"
    max_staleness: int = Field(default=2, ge=0, le=1000)

    _from_name = named


class TermSection(Section):
    """One reward term."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = Field(default={})


class RewardsSection(Section):
    """Named terms with weights; what happens when one is missing."""

    terms: tuple[TermSection, ...] = Field(min_length=1)
    deadline_s: float = Field(default=30.0, gt=0, le=MOST_S)
    retries: int = Field(default=2, ge=0)
    retry_wait_s: float = Field(default=0.5, ge=0, le=MOST_S)
    on_missing: Literal["drop_episode", "drop_group"] = "drop_episode"


class SelectionSection(Section):
    """Which groups a step trains on.

    ``dynamic``: draw more tasks until ``prompts_per_step`` groups have signal, in at most ``max_rounds`` rounds.
    ``variance_share``: keep this share of the groups, those with the most variance. ``oversample``: play so many times
    ``prompts_per_step`` tasks and stop when enough of them are complete.
    """

    dynamic: bool = False
    max_rounds: int = Field(default=4, ge=1)
    variance_share: float = Field(default=1.0, gt=0, le=1)
    oversample: float = Field(default=1.0, ge=1)

    @property
    def rounds(self) -> int:
        """How many times a step may draw tasks."""
        return self.max_rounds if self.dynamic else 1

    def played(self, wanted: int) -> int:
        """How many tasks are played for so many groups."""
        return _rounded_up(self.oversample, wanted)

    def kept(self, groups: int) -> int:
        """How many of so many groups the share of variance keeps."""
        return _rounded_up(self.variance_share, groups)


def _rounded_up(factor: float, count: int) -> int:
    """The product rounded up, the factor taken as the decimal it was written as: 0.55 of 20 are 11, not 12."""
    return ceil(Fraction(factor).limit_denominator(10**6) * count)


class WarmStartSection(Section):
    """A supervised stage before RL, in the same loop: demonstrations are played and learned."""

    steps: int = Field(default=0, ge=0)
    prompts_per_step: int = Field(default=32, ge=1)
    optimizer: OptimizerSection = OptimizerSection(lr=1e-3)


class EvaluationSection(Section):
    """Evaluation during training, into ``eval/…`` metrics."""

    every: int = Field(default=0, ge=0)
    at_start: bool = False
    limit: int = Field(default=0, ge=0, description="tasks at most, drawn from all of them; 0: all")
    temperature: float = Field(default=1.0, ge=0)
    samples: int = Field(default=1, ge=1)
    max_context_tokens: int = Field(
        default=0, ge=0, description="of held-out tasks, the sight check's too: 16 at least, or 0: as in rollout"
    )
    max_new_tokens: int = Field(default=0, ge=0, description="of a held-out task's turn; 0: as in rollout")


class CheckpointSection(Section):
    """When to save, how many to keep, and which metric decides the best one."""

    every: int = Field(default=0, ge=0, description="0: only at the end, and at that of a warm start")
    keep: int = Field(default=2, ge=1)
    best: str = Field(
        default="eval/accuracy",
        description="metric whose best checkpoint is kept (eval/reward where evaluations have no accuracy); empty: none",
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
    restarts: int = Field(default=3, ge=0, description="processes of a kind that are replaced in a run, if several")
    backend: Literal["auto", "gloo", "nccl"] = Field(default="auto", description="auto: nccl on GPUs, gloo on CPUs")
    share_gpus: bool = Field(default=False, description="engines of this machine may share GPUs, also the learner's")
    offload: bool = Field(default=False, description="keep weights and moments in the machine's memory, not the GPU's")
    hang_s: float = Field(
        default=20.0,
        gt=0,
        le=MOST_S,
        description="after it a worker that plays or scores and gives no sign of life is replaced",
    )
    start_s: float = Field(default=600.0, gt=0, le=MOST_S, description="for all ranks to load the model and meet")
    reply_s: float = Field(
        default=3600.0, gt=0, le=MOST_S, description="for a step; after it a rank that is silent is lost"
    )

    @property
    def shared(self) -> bool:
        """True if the learner is not the one of this process."""
        return self.learners > 1 or self.placement == "ray"


class LoggingSection(Section):
    """Loggers beside console and metrics.jsonl, which always run."""

    loggers: tuple[str, ...] = ()
    episodes: int = Field(default=0, ge=0, description="episodes written per step; 0: all")
    full_steps: int = Field(default=200, ge=0, description="last steps whose episodes stay whole on disk; 0: all steps")
    sampled_steps: int = Field(
        default=1000, ge=0, description="older steps of which the first group stays, evenly spread; 0: none"
    )
    episodes_gib: float = Field(default=4.0, gt=0, description="disk for episode logs; beyond it the oldest are removed")
    project: str = "sensorium"
    layout: Literal["", "taskmem"] = Field(
        default="", description="taskmem: also write TaskMem's files, STEP/VIDEO.json, history/ and global_step_STEP"
    )
    generations: int = Field(
        default=0, ge=0, description="held-out episodes of each evaluation sent to wandb, with their pictures and text"
    )


class HealthSection(Section):
    """When a run that learns nothing stops, and whether it is checked that the model looks and listens.

    The **sight check** plays held-out tasks greedily at the start and at the end, as they are and once more for each of
    picture, video and sound that they have, with that blanked. It runs where the recipe evaluates.
    """

    stop_after: int = Field(
        default=20, ge=0, description="steps in a row without an update that end the run; 0: any number"
    )
    sight_tasks: int = Field(default=32, ge=0, description="held-out tasks of the sight check; 0: none")


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run directory")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    steps: StepCount = Field(default=NO_LIMIT, ge=0)
    epochs: float = Field(default=0, ge=0)
    run_dir: Path | None = Field(default=None, description="default: runs/NAME")
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads; 0: as the machine or OMP_NUM_THREADS has")
    model: ModelSection
    tasks: TasksSection
    media: MediaSection = MediaSection()
    batch: BatchSection = BatchSection()
    selection: SelectionSection = SelectionSection()
    rollout: RolloutSection = RolloutSection()
    schedule: ScheduleSection = ScheduleSection()
    rewards: RewardsSection
    judges: JudgesSection = JudgesSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    warm_start: WarmStartSection = WarmStartSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    health: HealthSection = HealthSection()
    cluster: ClusterSection = ClusterSection()

    @property
    def lockstep(self) -> bool:
        """True if episodes wait for each other before each token, so that a run repeats: by default wherever it could."""
        rollout = self.rollout
        if rollout.schedule != "auto":
            return rollout.schedule == "lockstep"
        return rollout.engine.name != "vllm" and self.cluster.engines == 1 and self.schedule.name != "asynchronous"

    @property
    def counts_rows(self) -> bool:
        """True while the number of steps is unknown: epochs are given alone, and the rows were not counted yet."""
        return self.steps == NO_LIMIT

    @property
    def held_out_rollout(self) -> HeldOutRollout:
        """The section ``rollout`` as held-out tasks are played, with the limits of ``evaluation``."""
        own = self.evaluation
        limits = {"max_context_tokens": own.max_context_tokens, "max_new_tokens": own.max_new_tokens}
        limits = {name: limit for name, limit in limits.items() if limit}
        section = HeldOutRollout.model_construct(**dict(self.rollout) | limits)
        section._own = frozenset(limits)
        return section

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, the warm start included."""
        return self.warm_start.steps + self.steps

    def evaluates_after(self, step: int) -> bool:
        """True if the held-out tasks are played after this step: at the start (0), at the end of the warm start, in RL.

        The end of the warm start is measured wherever anything is, since there RL begins.
        """
        section, warm = self.evaluation, self.warm_start.steps
        if step == 0:
            return section.at_start
        if step == warm:
            return bool(section.every) or section.at_start
        due = bool(section.every) and (step % section.every == 0 or step == self.total_steps)
        return due and step > warm

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is due after this step, whatever its metrics are."""
        every = self.checkpoint.every
        return bool(every and step % every == 0) or step == self.total_steps

    def plays_ahead(self, step: int) -> bool:
        """True if the step after this one is played before this one's update; nothing is saved or measured in between."""
        if self.schedule.name != "one_step_off" or not self.warm_start.steps < step < self.total_steps:
            return False
        return not self.saves_after(step) and not self.evaluates_after(step)

    @property
    def checks_sight(self) -> bool:
        """True if the sight check is asked for, and there is anything to play."""
        evaluates = bool(self.evaluation.every) or self.evaluation.at_start
        return self.health.sight_tasks > 0 and evaluates and bool(self.tasks.evaluate) and self.total_steps > 0

    @property
    def directory(self) -> Path:
        """Where the run is kept."""
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name
