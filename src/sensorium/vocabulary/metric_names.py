"""The names of metrics, in one place: what a step and an evaluation produce, and what console and report call them.

Every metric of docs/reference/metrics.md is listed here, so that a recipe may choose checkpoints by it; those of an
open family need not be.
"""

OF_A_STEP = (
    "reward/mean", "reward/greedy", "accuracy", "tasks/skipped_bad", "tasks/skipped_long", "groups/zero_variance",
    "groups/trained", "groups/dropped", "groups/rounds", "groups/without_signal", "groups/short", "groups/cancelled",
    "groups/unused", "groups/too_alike", "episodes/length_mean", "episodes/length_max", "episodes/turns_mean",
    "episodes/truncated", "episodes/out_of_context", "episodes/empty", "episodes/failed", "episodes/dropped",
    "episodes/masked", "episodes/kept_length_mean", "episodes/kept_length_max", "episodes/dropped_length_mean",
    "episodes/dropped_length_max", "groups/open",
    "policy/loss", "policy/clip_fraction", "policy/entropy", "policy/grad_norm", "policy/kl_old", "policy/kl_ref",
    "policy/kl_coef", "policy/learning_share", "policy/lr", "policy/ratio_max", "policy/skipped",
)  # fmt: skip
OF_A_CRITIC = ("value/loss", "value/explained_variance", "value/mean", "value/clip_fraction", "value/grad_norm")
OF_AN_EVALUATION = ("accuracy", "reward", "length_mean", "turns_mean", "failed", "missing")
# Families that no recipe would choose a checkpoint by; any name in them is accepted.
OPEN_FAMILIES = (
    "mismatch", "correction", "router", "packing", "media", "time", "throughput", "memory", "health", "retries", "sight",
    "environment", "engine", "planner", "staleness", "wait", "worker",
)  # fmt: skip

# Kinds of tasks whose success is measured by name; what is beyond counts under the second name.
MOST_CATEGORIES, OTHER_CATEGORIES = 128, "other"

# Counted on the console: what a step left out, in words for one and for several. A row drawn twice is two skips.
TROUBLES = {
    "episodes/failed": ("episode failed", "episodes failed"),
    "episodes/dropped": ("episode dropped", "episodes dropped"),
    "episodes/out_of_context": ("episode out of context", "episodes out of context"),
    "tasks/skipped_bad": ("skip of a bad row", "skips of bad rows"),
    "tasks/skipped_long": ("skip of a long prompt", "skips of long prompts"),
    "policy/skipped": ("update skipped", "updates skipped"),
}
# Small charts of the report.
DETAILS = {
    "policy/entropy": "entropy",
    "policy/grad_norm": "gradient norm",
    "policy/kl_ref": "KL to the start",
    "policy/clip_fraction": "clipped share",
    "value/loss": "loss of the critic",
    "value/explained_variance": "variance that the critic explains",
    "mismatch/kl": "KL of engine and learner",
    "groups/zero_variance": "groups of equal reward",
    "episodes/length_mean": "tokens an episode",
    "episodes/turns_mean": "turns an episode",
    "environment/invalid_share": "turns without a valid action",
    "planner/success": "success at the level",
    "throughput/episodes_per_s": "episodes a second",
}
WAITS = {
    "wait/learner_for_episodes_s": "learner for episodes",
    "wait/learner_for_scores_s": "learner for scores",
    "wait/engine_for_learner_s": "engines for the learner",
}
# Counts since the run began or was resumed.
REPLACEMENTS = {
    "engine/replaced": "engines replaced",
    "engine/restarts": "vLLM started again",
    "engine/sampled_again": "responses sampled again",
    "worker/environment_replaced": "environment workers replaced",
    "worker/instances_replaced": "environment instances replaced",
    "worker/rolled_again": "episodes rolled again",
    "worker/reward_replaced": "reward workers replaced",
    "worker/asked_again": "scores asked again",
    "worker/given_up": "scores given up",
}
