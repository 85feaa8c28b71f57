"""What of a recipe is computed the slower way, or cannot be computed as it asks: known before a model is loaded."""

from collections.abc import Iterator

from sensorium.recipe.plan import PACKED_ROWS, packed_bytes
from sensorium.recipe.schema import LoraSection, Recipe
from sensorium.recipe.shape import IncompleteConfig, ModelShape, read_shape
from sensorium.vocabulary.errors import RecipeError

EIGHT_BITS_APART = (
    "optimizer.moments is '8-bit', and the learner is spread over ranks: blocks of 256 numbers would be cut where its rows "
    "are. Use optimizer.moments: bfloat16."
)


def computing_notes(recipe: Recipe) -> Iterator[str]:
    """Refuse what ``model.precision: matched`` or ranks have no way to compute; say what runs without a fast path."""
    try:
        shape = read_shape(recipe.model.path, recipe.model.revision)
    except IncompleteConfig:  # sizes are left to defaults: then the load tells
        shape = None
    experts = shape is not None and "moe" in shape.family
    if recipe.model.precision == "matched":
        engine = recipe.rollout.engine.name
        if experts:
            raise RecipeError(
                "model.precision is 'matched', and a mixture of experts computes a token together with others. Use "
                "model.precision: fast."
            )
        if engine == "vllm":
            raise RecipeError(
                f"model.precision is 'matched', and engine '{engine}' does not compute as the learner does. Use "
                "rollout.engine: native or process, or model.precision: fast."
            )
        if recipe.cluster.shared:
            why = f"learners is {recipe.cluster.learners}" if recipe.cluster.learners > 1 else "placement is 'ray'"
            raise RecipeError(
                f"model.precision is 'matched', and cluster.{why}: a sharded learner runs the stock layers. Use "
                "model.precision: fast."
            )
        if recipe.rollout.engine.options.get("kv") == "rows":
            raise RecipeError(
                "rollout.engine.options.kv is 'rows', and model.precision: matched attends over pages. Use auto or pages."
            )
    sections = (recipe.optimizer, recipe.warm_start.optimizer, recipe.algorithm.critic.optimizer)
    if recipe.cluster.shared and any(section.moments == "8-bit" for section in sections):
        raise RecipeError(EIGHT_BITS_APART)
    if experts and recipe.model.device != "cpu":
        yield (
            "model: on a GPU, decode steps of a mixture of experts run without CUDA graphs, which is slower: its routing "
            "is read on the host"
        )
    if shape is not None and (beyond := context_note(recipe, shape)):
        yield beyond
    frozen = {"vision", "audio"} & set(recipe.model.freeze)
    if frozen and "projector" not in recipe.model.freeze and not recipe.model.lora.rank:
        named = " and ".join(sorted(frozen, reverse=True))
        yield (
            f"model.freeze has {named} without projector, so media go through their tower in every step: features are kept "
            "only where the projector, which is a part of the tower, does not learn either. Freeze both to have each "
            "medium encoded once"
        )
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": LoraSection()})})
    if recipe.model.lora.rank and shape is not None and packed_bytes(plain, shape):
        yield (
            f"model: on a GPU, decode steps of at most {PACKED_ROWS} rows read weights in 16 bits instead of 12, since "
            "layers have adapters; they take up to a third longer. Attention takes several launches instead of one, which "
            "is up to a tenth of a step"
        )


def context_note(recipe: Recipe, shape: ModelShape) -> str:
    """What is said where prompts and responses may be longer than the model was made for; empty where they may not."""
    held_out = recipe.tasks.evaluate and recipe.held_out_rollout.max_context_tokens > recipe.rollout.max_context_tokens
    section = recipe.held_out_rollout if held_out else recipe.rollout
    longest = section.max_context_tokens
    if not shape.positions or longest <= shape.positions:
        return ""
    return (
        f"{section.context_key} is {longest}, and the model was made for {shape.positions} "
        "(max_position_embeddings in its config.json): what it writes behind that is likely to be noise. Lower it"
    )
