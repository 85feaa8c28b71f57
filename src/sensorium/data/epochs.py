"""Epochs as steps, once the rows of tasks.train can be counted.

    epochs: 3, 20,000 rows, batch.prompts_per_step: 128          → 60,000 rows in batches of 128: 468 steps
    the same with steps: 400                                     → 400 steps: the earlier end counts
    epochs: 1, 100 rows, batch.prompts_per_step: 128             → refused: one step needs more rows than the epoch has

An epoch is as many draws as the sources of tasks.train have rows together. Batches run on from one epoch into the next, and
rows that fill no batch at the very end are left out. (verl drops them at the end of every epoch: there the first example is
3 · 156 steps, too, but 3 epochs of 100 rows in batches of 64 are 3 steps there and 4 here.) Tasks that
``selection.oversample`` plays on top count; those that ``selection.dynamic`` draws in further rounds do not, since nobody
knows how many they will be.
"""

from fractions import Fraction

from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import make_sources
from sensorium.recipe.load import check_recipe
from sensorium.recipe.names import resolve
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import RecipeError


def resolve_epochs(recipe: Recipe) -> Recipe:
    """The recipe with the number of steps that its epochs are, or its own where that is lower. Opens tasks.train."""
    if not recipe.epochs:
        return recipe
    name = recipe.tasks.planner.name
    if not getattr(resolve("planner", name, "tasks.planner"), "row_by_row", False):
        raise RecipeError(
            f"epochs: the planner '{name}' (tasks.planner) draws rows again as it sees fit, so that a pass over them has "
            "no end. Give steps instead, or take the planner mixture."
        )
    rows = count_rows(recipe)
    played = recipe.selection.played(recipe.batch.prompts_per_step)
    steps = int(Fraction(recipe.epochs).limit_denominator(10**6) * rows / played)
    if steps < 1:
        raise RecipeError(
            f"epochs: {recipe.epochs:g} epochs of the {rows:,} rows in tasks.train are fewer tasks than one step plays "
            f"({played:,}; batch.prompts_per_step, selection.oversample). Lower that, raise epochs, or give steps with "
            "epochs=0: rows then come again as often as they are needed."
        )
    data = recipe.model_dump(mode="json") | {"steps": min(steps, recipe.steps)}
    return check_recipe(data, f"recipe '{recipe.name}', with {recipe.epochs:g} epochs of {rows:,} rows")


def count_rows(recipe: Recipe) -> int:
    """Rows of all training sources together."""
    total = 0
    for i, source in enumerate(make_sources(recipe.tasks.train, MediaStore(), "tasks.train")):
        try:
            total += len(source)
        except TypeError as error:
            raise RecipeError(
                f"epochs: source '{recipe.tasks.train[i].source}' (tasks.train.{i}) has no length, so that "
                "nobody knows when a pass over it ends. Give it __len__, or give steps instead of epochs."
            ) from error
    return total
