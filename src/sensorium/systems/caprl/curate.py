"""Keep the questions of CapRL rows that a model answers when it sees the picture or video, and not without."""

import asyncio
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sensorium.cluster.event_loop import run_async
from sensorium.data.media_store import MediaStore
from sensorium.rewards.judges.client import JudgeClient
from sensorium.systems.caprl.caption_rows import CaptionRows, first_row, ground_truth
from sensorium.systems.caprl.questions import question_of
from sensorium.systems.caprl.serve_reward import judges_section
from sensorium.systems.caprl.terms import Curation, answered, as_judged, described
from sensorium.vocabulary.errors import JudgeFailure, RecipeError, TaskError

USAGE = "sensorium curate ROWS OUT --reader URL --model NAME [--draws N] [--seen-above 0.75] [--blind-below 0.25] …"
FIRST_QUESTIONS = 3
TELL_S = 30.0


def configure(parser: ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("rows", help="JSONL or Parquet as CapRL has them, of pictures or videos (docs/guides/tasks.md)")
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
    out = Path(arguments.out)
    if out.exists() or out.suffix != Path(arguments.rows).suffix:
        raise RecipeError(f"'{out}' exists already, or has another ending than '{arguments.rows}'; choose another name.")
    if arguments.draws < 1:
        raise RecipeError("curate: --draws must be 1 or more.")
    if not (0 <= arguments.seen_above < 1 and 0 < arguments.blind_below <= 1):
        raise RecipeError(
            f"curate: --seen-above {arguments.seen_above:g} and --blind-below {arguments.blind_below:g} keep no question "
            "whatever is answered: give shares, the first below 1, the second above 0."
        )
    _refuse_another_folder(Path(arguments.rows), out)
    store = MediaStore()
    source = CaptionRows(arguments.rows, store, limit=arguments.limit)
    curation = Curation("reader", arguments.draws, arguments.seen_above, arguments.blind_below)
    cache = Path(arguments.cache) if arguments.cache else out.with_name(out.name + ".answers.sqlite")
    section = judges_section(arguments.reader, arguments.model, arguments.key_env, cache, arguments.calls)
    with closing(JudgeClient(section.model_copy(update={"retries": 1}), store)) as client:
        run_async(_refuse_silent_readers(client, curation, source, arguments.reader))
    with closing(JudgeClient(section, store)) as client:
        found = run_async(_tried(client, curation, source, arguments.calls))
    report = out.with_name(out.name + ".curation.json")
    report.write_text(json.dumps(found, indent=1) + "\n")
    rates = told_rates(found, curation)
    kept = write_kept(Path(arguments.rows), out, found)
    if not kept:
        raise TaskError(
            f"no question is kept, so '{out}' was not written: {rates} Other bounds are --seen-above and --blind-below; "
            f"what was found of each question is in '{report}', and answers that came are not asked for again."
        )
    print(f"{rates} {out} ({kept} rows), {report}")
    return 0


def told_rates(found: Sequence[Mapping[str, Any]], curation: Any) -> str:
    """How many questions were kept, could be answered with the medium and without it, and could not be tried."""
    questions = [one for row in found for one in row["questions"]]
    tried = [one for one in questions if one["keep"] is not None]
    seen = sum(one["seen"] > curation.seen_above for one in tried)
    guessed = sum(one["blind"] >= curation.blind_below for one in tried)
    rows = sum(any(one["keep"] for one in row["questions"]) for row in found)
    told = (
        f"{len(questions)} questions of {len(found)} rows: {sum(bool(one['keep']) for one in tried)} kept, in {rows} rows; "
        f"{len(questions) - len(tried)} could not be tried{_first_reason(questions)}. Of the {len(tried)} tried, {seen} "
        f"were answered with the picture or video (in more than {curation.seen_above:g} of the tries) and {guessed} "
        f"without it (in {curation.blind_below:g} of them or more)."
    )
    unread = sum("reason" in row for row in found)
    return told + (f" {unread} rows could not be read{_first_reason(found)}." if unread else "")


def _first_reason(found: Sequence[Mapping[str, Any]]) -> str:
    reason = next((str(one["reason"]) for one in found if "reason" in one), "")
    return f", the first because: {reason.rstrip('.')}" if reason else ""


def _refuse_another_folder(rows: Path, out: Path) -> None:
    """Rows name files by paths from their own folder: in another one they would name nothing."""
    row = first_row(rows)
    media = [row.get("image"), *(videos if isinstance(videos := row.get("videos"), list) else [videos])]
    paths = [one.get("path") if isinstance(one, dict) and one.get("bytes") is None else one for one in media]
    relative = [one for one in paths if isinstance(one, str) and not one.startswith(("/", "data:"))]
    if relative and out.resolve().parent != rows.resolve().parent:
        raise RecipeError(
            f"curate: '{rows}' names files by paths from its own folder, such as '{relative[0]:.80}', which would lead "
            f"nowhere from '{out.parent}'. Choose an OUT in '{rows.parent}'."
        )


async def _refuse_silent_readers(client: Any, curation: Any, source: Any, readers: Sequence[str]) -> None:
    """Ask a question first: rows of which none can be read, and readers that answer nothing, are said at once."""
    unread, unanswered = list[str](), list[str]()
    for index in range(len(source)):
        try:
            questions, media = _questions(source, index)
            await answered(client, curation, questions[0], media)
            return
        except TaskError as error:
            unread.append(str(error))
        except JudgeFailure as error:
            unanswered.append(str(error))
        if len(unanswered) == FIRST_QUESTIONS:
            break
    if unanswered:
        raise RecipeError(
            f"curate: {', '.join(readers)} answered none of the first {len(unanswered)} questions: "
            f"{unanswered[0].rstrip('.')}. Is the server running, is the address right (with its /v1), and does "
            "the model take pictures?"
        )
    if unread:
        raise TaskError(f"curate: none of the {len(unread)} rows can be read, the first because: {unread[0]}")


def _questions(source: Any, index: int) -> tuple[list[Any], Any]:
    """The questions of a row, and what they are about."""
    task = source[index]
    return [question_of(raw) for raw in task.metadata["questions"]], as_judged(described(task))


async def _tried(client: Any, curation: Any, source: Any, at_once: int) -> list[dict[str, Any]]:
    """What was found of each row's questions; one that the servers did not answer is kept out, and says why."""
    gate = asyncio.Semaphore(max(1, at_once // (2 * curation.draws)))
    told_at, done = time.monotonic(), 0

    async def one(question: Any, media: Any) -> dict[str, Any]:
        nonlocal told_at, done
        try:
            seen, blind = await asyncio.gather(
                answered(client, curation, question, media), answered(client, curation, question, None)
            )
        except JudgeFailure as error:
            return {"question": question.stem, "keep": None, "reason": str(error)}
        finally:
            done += 1
            if time.monotonic() > told_at + TELL_S:
                told_at = time.monotonic()
                print(f"curate: {done} questions tried, of {len(source)} rows", file=sys.stderr, flush=True)
        return {"question": question.stem, "seen": seen, "blind": blind, "keep": curation.keeps(seen, blind)}

    async def row(index: int) -> dict[str, Any]:
        async with gate:  # a row is read when its turn has come: all at once would not fit into memory
            try:
                questions, media = _questions(source, index)
            except TaskError as error:
                return {"row": index, "reason": str(error), "questions": []}
            return {"row": index, "questions": [await one(question, media) for question in questions]}

    return list(await asyncio.gather(*(row(index) for index in range(len(source)))))


def write_kept(rows: Path, out: Path, found: list[dict[str, Any]]) -> int:
    """Write the rows that keep a question, with those alone; how many there are. None: no file."""

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
        return 0
    if rows.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(chosen), out)
    else:
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))
    return len(chosen)
