"""Keep the questions of CapRL rows that a model answers when it sees the picture or video, and not without."""

import asyncio
import hashlib
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from sensorium.cluster.event_loop import run_async
from sensorium.data.media_store import MediaStore
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.judges.judgements import JudgeRequest
from sensorium.systems.caprl.caption_rows import CaptionQuestion, CaptionRows, drawn, first_row, ground_truth, question_of
from sensorium.systems.caprl.serve_reward import judges_section
from sensorium.systems.caprl.terms import FirstLetter, as_judged, described
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.errors import JudgeFailure, RecipeError, TaskError

USAGE = "sensorium curate ROWS OUT --reader URL --model NAME [--draws N] [--seen-above 0.75] [--blind-below 0.25] …"
FIRST_QUESTIONS = 3
REPORT_EVERY_S = 30.0
ASKED = "Answer the question. Reply with the letter of one option and nothing else.\n\n"
BLIND = "You are not shown what the question is about. Answer as well as you can. "


def configure(parser: ArgumentParser) -> None:
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
    cache = Path(arguments.cache) if arguments.cache else out.with_name(out.name + ".answers.sqlite")
    section = judges_section(arguments.reader, arguments.model, arguments.key_env, cache, arguments.calls)
    with closing(JudgeClient(section.model_copy(update={"retries": 1}), store)) as client:
        run_async(_refuse_silent_readers(client, arguments, source))
    with closing(JudgeClient(section, store)) as client:
        found = run_async(_tried(client, arguments, source))
    report = out.with_name(out.name + ".curation.json")
    report.write_text(json.dumps(found, indent=1) + "\n")
    rates = rates_text(found, arguments.seen_above, arguments.blind_below)
    kept = write_kept(Path(arguments.rows), out, found)
    if not kept:
        raise TaskError(
            f"no question is kept, so '{out}' was not written: {rates} Other bounds are --seen-above and --blind-below; "
            f"what was found of each question is in '{report}', and answers that came are not asked for again."
        )
    print(f"{rates} {out} ({kept} rows), {report}")
    return 0


def rates_text(found: Sequence[Mapping[str, Any]], seen_above: float, blind_below: float) -> str:
    """The numbers of questions kept, answered with the medium and without it, and not tried."""
    questions = [one for row in found for one in row["questions"]]
    tried = [one for one in questions if one["keep"] is not None]
    seen = sum(one["seen"] > seen_above for one in tried)
    guessed = sum(one["blind"] >= blind_below for one in tried)
    rows = sum(any(one["keep"] for one in row["questions"]) for row in found)
    text = (
        f"{len(questions)} questions of {len(found)} rows: {sum(bool(one['keep']) for one in tried)} kept, in {rows} rows; "
        f"{len(questions) - len(tried)} could not be tried{_first_reason(questions)}. Of the {len(tried)} tried, {seen} "
        f"were answered with the picture or video (in more than {seen_above:g} of the tries) and {guessed} "
        f"without it (in {blind_below:g} of them or more)."
    )
    unread = sum("reason" in row for row in found)
    return text + (f" {unread} rows could not be read{_first_reason(found)}." if unread else "")


def _first_reason(found: Sequence[Mapping[str, Any]]) -> str:
    reason = next((str(one["reason"]) for one in found if "reason" in one), "")
    return f", the first because: {reason.rstrip('.')}" if reason else ""


def _refuse_another_folder(rows: Path, out: Path) -> None:
    """Rows name files relative to their own folder, so OUT must be in it."""
    row = first_row(rows)
    media = [row.get("image"), *(videos if isinstance(videos := row.get("videos"), list) else [videos])]
    paths = [one.get("path") if isinstance(one, dict) and one.get("bytes") is None else one for one in media]
    relative = [one for one in paths if isinstance(one, str) and not one.startswith(("/", "data:"))]
    if relative and out.resolve().parent != rows.resolve().parent:
        raise RecipeError(
            f"curate: '{rows}' names files by paths from its own folder, such as '{relative[0]:.80}', which would lead "
            f"nowhere from '{out.parent}'. Choose an OUT in '{rows.parent}'."
        )


async def answered(client: JudgeClient, question: CaptionQuestion, media: Media | None, draws: int) -> float:
    """The share of right answers, with a medium or without. JudgeFailure if any try was not answered."""
    random = Random(hashlib.sha256(f"0 {question}".encode()).hexdigest())
    before, shown = (BLIND + ASKED, ()) if media is None else (ASKED, (media,))
    requests, letters = [], []
    for number in range(draws):
        draw = drawn(question, random)
        message = Message("user", (*shown, Text(before + draw.text)))
        parameters = {"temperature": 0.6, "max_tokens": 10, "seed": number}
        requests.append(JudgeRequest("reader", (message,), "curation/1", FirstLetter(), parameters, number))
        letters.append(draw.letter)
    answers = await asyncio.gather(*(client.ask(request) for request in requests))
    return sum(answer.value == letter for answer, letter in zip(answers, letters, strict=True)) / draws


async def _refuse_silent_readers(client: JudgeClient, arguments: Namespace, source: Any) -> None:
    """Ask one question first, to report at once that no row can be read or that no reader answers."""
    unread, unanswered = list[str](), list[str]()
    for index in range(len(source)):
        try:
            questions, media = _questions(source, index)
            await answered(client, questions[0], media, arguments.draws)
            return
        except TaskError as error:
            unread.append(str(error))
        except JudgeFailure as error:
            unanswered.append(str(error))
        if len(unanswered) == FIRST_QUESTIONS:
            break
    if unanswered:
        raise RecipeError(
            f"curate: {', '.join(arguments.reader)} answered none of the first {len(unanswered)} questions: "
            f"{unanswered[0].rstrip('.')}. Is the server running, is the address right (with its /v1), and does "
            "the model take pictures?"
        )
    if unread:
        raise TaskError(f"curate: none of the {len(unread)} rows can be read, the first because: {unread[0]}")


def _questions(source: Any, index: int) -> tuple[list[Any], Any]:
    """The questions of a row, and their picture or video."""
    task = source[index]
    return [question_of(raw) for raw in task.metadata["questions"]], as_judged(described(task))


async def _tried(client: JudgeClient, arguments: Namespace, source: Any) -> list[dict[str, Any]]:
    """The findings for each row's questions; one that was not answered is left out, with the reason."""
    gate = asyncio.Semaphore(max(1, arguments.calls // (2 * arguments.draws)))
    reported_at, done = time.monotonic(), 0

    async def one(question: Any, media: Any) -> dict[str, Any]:
        nonlocal reported_at, done
        try:
            tries = [answered(client, question, shown, arguments.draws) for shown in (media, None)]
            seen, blind = await asyncio.gather(*tries)
        except JudgeFailure as error:
            return {"question": question.stem, "keep": None, "reason": str(error)}
        finally:
            done += 1
            if time.monotonic() > reported_at + REPORT_EVERY_S:
                reported_at = time.monotonic()
                print(f"curate: {done} questions tried, of {len(source)} rows", file=sys.stderr, flush=True)
        keep = seen > arguments.seen_above and blind < arguments.blind_below
        return {"question": question.stem, "seen": seen, "blind": blind, "keep": keep}

    async def row(index: int) -> dict[str, Any]:
        async with gate:  # rows are read one by one: all at once would not fit into memory
            try:
                questions, media = _questions(source, index)
            except TaskError as error:
                return {"row": index, "reason": str(error), "questions": []}
            return {"row": index, "questions": [await one(question, media) for question in questions]}

    return list(await asyncio.gather(*(row(index) for index in range(len(source)))))


def write_kept(rows: Path, out: Path, found: list[dict[str, Any]]) -> int:
    """Write the rows with the questions that they keep, and return their number; without any, no file."""
    in_parquet = rows.suffix == ".parquet"
    if in_parquet:
        import pyarrow
        from pyarrow import parquet

        raw = parquet.read_table(rows).to_pylist()
    else:
        raw = [json.loads(line) for line in rows.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    kept = []
    for one in found:
        if any(question["keep"] for question in one["questions"]):
            row = raw[one["row"]]
            truth = zip(ground_truth(row["reward_model"]["ground_truth"]), one["questions"], strict=True)
            left = [question.to_json() for question, tried in truth if tried["keep"]]
            kept.append({**row, "reward_model": {**row["reward_model"], "ground_truth": left}})
    if kept and in_parquet:
        parquet.write_table(pyarrow.Table.from_pylist(kept), out)
    elif kept:
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    return len(kept)
