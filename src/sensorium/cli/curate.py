"""Keep the questions of CapRL rows that a model answers when it sees the picture or video, and not without."""

import asyncio
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import JudgeFailure, RecipeError, TaskError

USAGE = "sensorium curate ROWS OUT --reader URL --model NAME [--draws N] [--seen-above 0.75] [--blind-below 0.25] …"


def configure(parser: ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("rows", help="JSONL (videos) or Parquet (pictures) as CapRL has them")
    parser.add_argument(
        "out",
        help="file for the rows that keep a question, in the same form; what was found is beside it, in OUT.curation.json",
    )
    parser.add_argument(
        "--reader",
        action="append",
        required=True,
        help="URL of an OpenAI-compatible server, with its /v1; several share the work",
    )
    parser.add_argument("--model", default="reader", help="the model's name there")
    parser.add_argument("--key-env", default="", help="environment variable that holds the servers' key")
    parser.add_argument(
        "--draws", type=int, default=8, help="tries of each question, each with its options in another order"
    )
    parser.add_argument(
        "--seen-above", type=float, default=0.75, help="keep what is answered more often than this when it is seen"
    )
    parser.add_argument(
        "--blind-below", type=float, default=0.25, help="keep what is answered less often than this when it is not"
    )
    parser.add_argument("--limit", type=int, default=0, help="only the first rows; 0: all")
    parser.add_argument("--calls", type=int, default=64, help="questions asked at once")
    parser.add_argument(
        "--cache", default="", help="SQLite file of answers; default: OUT.answers.sqlite, so that a second try goes on"
    )


def run(arguments: Namespace) -> int:
    """Try every question, and write what is kept."""
    from sensorium.cli.serve_reward import judges_section
    from sensorium.judges.client import JudgeClient
    from sensorium.media.store import MediaStore
    from sensorium.rewards.curation import Curation
    from sensorium.tasks.caprl import CaptionRows

    out = Path(arguments.out)
    if out.exists() or out.suffix != Path(arguments.rows).suffix:
        raise RecipeError(f"'{out}' exists already, or has another ending than '{arguments.rows}'; choose another name.")
    if arguments.draws < 1:
        raise RecipeError("curate: --draws must be 1 or more.")
    store = MediaStore()
    source = CaptionRows(arguments.rows, store, limit=arguments.limit)
    curation = Curation("reader", arguments.draws, arguments.seen_above, arguments.blind_below)
    cache = Path(arguments.cache) if arguments.cache else out.with_name(out.name + ".answers.sqlite")
    client = JudgeClient(
        judges_section(arguments.reader, arguments.model, arguments.key_env, cache, arguments.calls), store
    )
    try:
        found = asyncio.run(_tried(client, curation, source, arguments.calls))
    finally:
        client.close()
    kept = write_kept(Path(arguments.rows), out, found)
    questions = [one for row in found for one in row["questions"]]
    report = out.with_name(out.name + ".curation.json")
    report.write_text(json.dumps(found, indent=1) + "\n")
    counts = {fate: sum(one["keep"] is fate for one in questions) for fate in (True, None)}
    print(
        f"{len(questions)} questions of {len(found)} rows: {counts[True]} kept, in {kept} rows; {counts[None]} could not "
        f"be tried. {out}, {report}"
    )
    return 0


async def _tried(client: Any, curation: Any, source: Any, at_once: int) -> list[dict[str, Any]]:
    """What was found of each row's questions; one that the servers did not answer is kept out, and says why."""
    from sensorium.rewards.caption_judge import as_judged, described
    from sensorium.rewards.curation import answered
    from sensorium.vocabulary.caption_questions import question_of

    gate = asyncio.Semaphore(max(1, at_once // (2 * curation.draws)))

    async def one(question: Any, media: Any) -> dict[str, Any]:
        async with gate:
            try:
                seen, blind = await asyncio.gather(
                    answered(client, curation, question, media), answered(client, curation, question, None)
                )
            except JudgeFailure as error:
                return {"question": question.stem, "keep": None, "reason": str(error)}
        return {"question": question.stem, "seen": seen, "blind": blind, "keep": curation.keeps(seen, blind)}

    async def row(index: int) -> dict[str, Any]:
        try:
            task = source[index]
            media = as_judged(described(task))
        except TaskError as error:
            return {"row": index, "reason": str(error), "questions": []}
        questions = [question_of(raw) for raw in task.metadata["questions"]]
        return {"row": index, "questions": await asyncio.gather(*(one(question, media) for question in questions))}

    return list(await asyncio.gather(*(row(index) for index in range(len(source)))))


def write_kept(rows: Path, out: Path, found: list[dict[str, Any]]) -> int:
    """Write the rows that keep a question, with those alone; how many there are."""
    from sensorium.tasks.caprl import ground_truth

    def kept(row: dict[str, Any], tried: list[dict[str, Any]]) -> dict[str, Any]:
        truth = ground_truth(row["reward_model"]["ground_truth"])
        left = [question.to_json() for question, one in zip(truth, tried, strict=True) if one["keep"]]
        return {**row, "reward_model": {**row["reward_model"], "ground_truth": left}}

    if rows.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        raw = parquet.read_table(rows).to_pylist()
    else:
        raw = [json.loads(line) for line in rows.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    chosen = [kept(raw[one["row"]], one["questions"]) for one in found if any(q["keep"] for q in one["questions"])]
    if not chosen:
        raise TaskError("no question is answered with the picture and not without, so there is nothing to write.")
    if rows.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(chosen), out)
    else:
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))
    return len(chosen)
