"""Forecast a recipe on so many GPUs of a kind: memory on each, the parts of a step, tokens a second, and cost by a price.

No model is loaded and nothing is run; where a vision tower would learn, two rows of each source are read. Figures come
from a cost model that is fitted to measurements on one H200, and from a simulation of the schedule; notes say what was
measured, scaled or assumed. See docs/guides/scaling.md.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from sensorium.cli.dry_run import read_a_few
from sensorium.data.mixture import resolve_epochs
from sensorium.engines.options import check_vllm_options, check_writer_options
from sensorium.forecast.costs import GpuMemory, kinds, planned_shape
from sensorium.forecast.forecast import Asked, Forecast, forecast
from sensorium.forecast.simulator import SCHEDULES, Deployment
from sensorium.recipe.load import load_recipe
from sensorium.recipe.memory_estimate import engine_rows, tower_bytes
from sensorium.recipe.schema import Recipe
from sensorium.report.tables import bytes_text, count_text
from sensorium.report.terminal import Terminal, say
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError

USAGE = "sensorium plan RECIPE [key=value …] --gpus N --kind h200 [--engines K] [--schedule NAME] [--price P] [--json]"
# Largest values. Every GPU and every group that may be open is simulated.
MOST = {
    "gpus": 10_000, "prompt_tokens": 1e9, "response_tokens": 1e9, "scoring_s": 1e7, "price": 1e9, "staleness": 1000,
    "network": 1e9,
}  # fmt: skip
ENGINE_OPTIONS = {"native": check_writer_options, "process": check_writer_options, "vllm": check_vllm_options}
STYLES = {"measured": "green", "scaled": "yellow", "computed": "yellow", "assumed": "yellow", "not run": "red"}


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", help="a YAML file, a shipped recipe (caprl_image), or a run directory")
    add("overrides", nargs="*", metavar="key=value", help="change the recipe: model.dtype=bfloat16")
    add("--gpus", type=int, required=True, help="GPUs in all")
    add("--kind", required=True, help=", ".join(kinds()))
    add("--engines", type=int, help="engines among them, the others learn; default: the fastest division")
    add("--schedule", choices=SCHEDULES, help="default: the recipe's")
    add("--staleness", type=int, help="of asynchronous: updates that a group may be old; default: the recipe's")
    add("--prompt-tokens", type=int, default=0, help="of the longest prompt with its media; default: as the context allows")
    add("--response-tokens", type=float, default=0, help="mean of an episode; default: its budget")
    add("--scoring-s", type=float, default=0, help="seconds from the end of a group to its rewards")
    add("--network", type=float, help="GB a second and GPU between machines; default 50 (400 Gbit/s)")
    add("--price", type=float, help="of a GPU hour; without it no cost is shown")
    add("--shape", default="", help="plan with a published model's sizes: Qwen2.5-VL-7B")
    add("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    for name, most in MOST.items():
        value = getattr(arguments, name)
        if value is not None and not 0 <= value <= most:
            words = "it cannot be negative" if value < 0 else f"a plan takes a number up to {most:,.0f}"
            raise RecipeError(f"--{name.replace('_', '-')} {value:g}: {words}.")
    if arguments.network == 0:
        raise RecipeError("--network 0: machines that cannot reach each other train nothing together; leave it out.")
    recipe, uncounted = load_recipe(arguments.recipe, arguments.overrides), ""
    try:
        recipe = resolve_epochs(recipe)
    except (TaskError, MediaError) as error:  # a plan needs no data
        uncounted = str(error)
    if recipe.rollout.engine.name in ENGINE_OPTIONS:
        try:
            ENGINE_OPTIONS[recipe.rollout.engine.name](recipe.rollout.engine.options)
        except ValueError as error:
            raise RecipeError(f"rollout.engine.options: {error}.") from error
    asked = Asked(**{name: getattr(arguments, name) for name in Asked.__dataclass_fields__})
    tower = tower_bytes(recipe, planned_shape(recipe.model, asked.shape)[0])
    found = forecast(recipe, asked, *(read_a_few(recipe) if tower else ()))
    if arguments.json:
        row = asdict(found)
        row["rank"]["total"] = found.rank.total
        if found.engine is not None:
            row["engine"]["total"] = found.engine.total
        row["notes"] = [{"what": what, "how": how, "words": words} for what, how, words in found.notes]
        print(json.dumps(row, indent=1, ensure_ascii=False))
        return 0
    console = Terminal()
    console.print(_plan_page(found, asked.price, _placing(recipe, found.deployment)))
    for what, how, words in found.notes:
        console.print(Text.assemble((f"{how:>9}", STYLES[how]), f"  {what}: {words}"), soft_wrap=True)
    cluster, plan = recipe.cluster, found.deployment
    divided = (cluster.learners, cluster.engines)
    if arguments.engines is None and plan.apart and divided not in ((1, 1), (plan.learners, plan.engines)):
        asked_for = f"the recipe asks for {cluster.learners} learner ranks and {cluster.engines} engines"
        other = f"--engines {cluster.engines} forecasts the recipe's number of engines"
        say(f"{asked_for}; this is the fastest division of the GPUs instead. {other}", console)
    if uncounted:
        say(f"how long the run takes is not shown; give steps=N for that. {uncounted}", console)
    elif found.cost is None:
        say("no cost is shown: --price says what a GPU costs in an hour", console)
    return 0


def _placing(recipe: Recipe, plan: Deployment) -> str:
    if not plan.apart:
        return ""
    wanted: dict[str, tuple[object, object]] = {"cluster.learners": (plan.learners, recipe.cluster.learners)}
    wanted["cluster.engines"] = (plan.engines, recipe.cluster.engines)
    if plan.engines > 1:
        engine = recipe.rollout.engine.name
        wanted["rollout.engine.name"] = ("process" if engine == "native" else engine, engine)
        if recipe.rollout.schedule == "lockstep":
            wanted["rollout.schedule"] = ("eager", "lockstep")
    wanted["cluster.placement"] = ("ray", recipe.cluster.placement)
    if plan.max_rows < min(recipe.rollout.concurrency or 10**9, engine_rows(recipe)):
        wanted["rollout.engine.options.max_rows"] = (plan.max_rows, None)  # more would not fit
    return " ".join(f"{key}={value}" for key, (value, has) in wanted.items() if value != has)


def _plan_page(found: Forecast, price: float | None, keys: str = "") -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    plan, run, work = found.deployment, found.run, found.work
    rows.add_row("model", f"{count_text(found.parameters)} parameters, {found.model}")
    division = f"samples and learns in turn, with {'two sets' if plan.pushed_bytes else 'one set'} of weights"
    if plan.apart:
        each = f" of {plan.engine_gpus} GPUs" if plan.engine_gpus > 1 else ""
        shared = f", {plan.sequence_parallel} share each micro-batch's tokens" if plan.sequence_parallel > 1 else ""
        division = f"{plan.engines} engine{'s' if plan.engines > 1 else ''}{each}, {plan.learners} learner ranks{shared}"
    rows.add_row("GPUs", f"{plan.gpus} × {found.kind.title}: {division}")
    if keys:
        rows.add_row("placed by", keys)
    lengths = f"mean {work.response:g}, longest {work.tail * work.response:g}" if work.tail > 1 else f"{work.response:g}"
    rows.add_row(
        "a step", f"{work.prompts} × {work.group} episodes, prompts of {work.prompt:,} tokens, responses of {lengths}"
    )
    bound = f", at most {plan.staleness} updates old" if plan.schedule == "asynchronous" else ""
    rows.add_row("schedule", f"{plan.schedule}{bound}")
    way = {False: "kept", True: "layers are recomputed", "selective": "MLPs are recomputed"}[found.recompute]
    chosen = "auto chose " if found.by_auto else ""
    rows.add_row("activations", f"{way} (model.gradient_checkpointing: {chosen}{str(found.recompute).lower()})")
    _add_memory(rows, "memory, learner" if plan.apart else "memory", found.rank, found.kind.memory)
    if found.engine is not None:
        _add_memory(rows, "memory, engine", found.engine, found.kind.memory)
    rows.add_row("step", Text(f"{run.step_s:.2f} s", style="bold"))
    parts = {"rollout": run.rollout_s, "scoring": run.scoring_s, "update": run.update_s, "gather, reduce": run.gather_s}
    parts |= {"weight push": run.push_s, "credit, record": run.other_s}
    for name, seconds in parts.items():
        if seconds >= 0.005:
            bar = "█" * min(24, round(24 * seconds / run.step_s)) or "▏"
            rows.add_row("", Text.assemble(f"{name:<18}{seconds:>8.2f} s  ", (bar, "cyan")))
    rows.add_row("busy", f"engines {run.engines_busy:.0%}, learners {run.learners_busy:.0%} of the time")
    if run.stale_max:
        rows.add_row("staleness", f"mean {run.stale_mean:.2f}, at most {run.stale_max} updates")
    rows.add_row("speed", f"{run.tokens_per_s:,.0f} sampled tokens/s, {run.tokens_per_s / plan.gpus:,.0f} a GPU")
    if found.hours is None:
        rows.add_row("the run", "unknown: it is given in epochs, and the rows of tasks.train cannot be counted here")
        return rows
    lasts = f"{found.hours:,.1f} hours" if found.hours >= 1 else f"{60 * found.hours:,.1f} minutes"
    rows.add_row("the run", f"{lasts}, {found.hours * plan.gpus:,.1f} GPU hours")
    if found.cost is not None:
        rows.add_row("cost", f"{found.cost:,.0f} at {price:g} a GPU hour")
    return rows


def _add_memory(rows: Table, name: str, memory: GpuMemory, room: float) -> None:
    host = f", and {bytes_text(memory.host)} of the machine's for each" if memory.host else ""
    rows.add_row(
        name, Text.assemble((bytes_text(memory.total), "bold"), f" of {bytes_text(round(room))} on each GPU{host}")
    )
    for use, amount in memory.uses.items():
        bar = "█" * round(24 * amount / memory.total) or "▏"
        rows.add_row("", Text.assemble(f"{use:<26}{bytes_text(amount):>10}  ", (bar, "cyan")))
