"""The health of a run at the top of its page: what is wrong and since when, what is over, and the sight checks."""

from html import escape

from sensorium.record.findings import HealthRecord, Notice, SightResult
from sensorium.report.tables import share

WORDS = {
    "picture": ("pictures", "pictures blanked"),
    "video": ("videos", "videos blanked"),
    "sound": ("sound", "sound muted"),
}


def health_panel(record: HealthRecord, steps: int, planned: int = 0) -> str:
    """The panel; without findings a line that says so, and whether all planned steps were made. Nothing before a step."""
    lasting = [notice for notice in record.last() if notice.state != "ended"]
    over = [notice for notice in record.last() if notice.state == "ended"]
    sight = "".join(f"<p>{_sight(step, result)}</p>" for step, results in record.sight for result in results)
    if not (lasting or over or sight or steps):
        return ""
    lasting.sort(key=lambda notice: not notice.grave)
    kind = "well" if not lasting else "grave" if any(notice.grave for notice in lasting) else "caution"
    title = {"grave": "This run does not learn as it should", "caution": "This run needs a look"}.get(
        kind, "Healthy again" if over else "Healthy"
    )
    part = f" The run was to have {planned:,} steps: it goes on, or was interrupted." if steps < planned else ""
    title += " so far" if kind == "well" and part else ""
    none = f"Nothing was found wrong at the end of {steps:,} steps." if not lasting else f"{steps:,} steps were made."
    none += " What was found before, and is over, stands below." if over and not lasting else ""
    none = f"<p>{none}{part}</p>" if part or not lasting else ""
    items = "".join(_lasting(notice, record.began(notice.rule)) for notice in lasting)
    past = "".join(_over(notice, record.began(notice.rule)) for notice in over)
    more = f'<ul class="over">{past}</ul>' if past else ""
    return (
        f'<section class="health {kind}"><h2>{title}</h2>{none}'
        f"{f'<ul>{items}</ul>' if items else ''}{more}{f'<div class=sight>{sight}</div>' if sight else ''}</section>\n"
    )


def _lasting(notice: Notice, began: int) -> str:
    kind = "grave" if notice.grave else "caution"
    since = f"since step {began}" if began else "since the start"
    return f'<li class="{kind}"><b>{_name(notice)}</b> <span class="since">{since}</span><p>{escape(notice.text)}</p></li>'


def _over(notice: Notice, began: int) -> str:
    return f"<li><b>{_name(notice)}</b> from step {began} to step {notice.step}: {escape(notice.text)}</li>"


def _name(notice: Notice) -> str:
    return escape(notice.rule.replace("_", " "))


def _sight(step: int, found: SightResult) -> str:
    shown, blanked = WORDS.get(found.kind, (found.kind, f"{found.kind} blanked"))
    when = "at the start" if step == 0 else f"after step {step}"
    if found.measure != "accuracy":
        return (
            f"Sight check {when}, {found.tasks} held-out tasks: {escape(found.measure)} <b>{found.shown:.2f}</b> with "
            f"{shown}, <b>{found.blanked:.2f}</b> with {blanked}."
        )
    return (
        f"Sight check {when}, {found.tasks} held-out tasks: <b>{share(found.shown)}</b> right with {shown}, "
        f"<b>{share(found.blanked)}</b> with {blanked}."
    )
