"""Make the pictures of the docs: ``make screenshots``.

Trains a few small runs in build/screenshots (a quarter of an hour on two cores; runs that lie there finished are used
again), opens their report and their live page in Chromium, and writes docs/*.png. Needs playwright and Chromium
(docs/start/browser.md).
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from sensorium.viewer import View
from sensorium.viewer.runs import ViewedRun

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/screenshots"
LARGEST = 250_000  # bytes of a picture
FEW = ["tasks.evaluate.0.options.size=64", "health.sight_tasks=0", "checkpoint.every=0"]
SHAPES = ["shapes", "steps=40", "batch.prompts_per_step=32", "evaluation.every=10", *FEW]
SMALL = ["steps=12", "batch.prompts_per_step=12", "evaluation.every=6", *FEW]
RUNS = {
    "frozen_lake": ["frozen_lake", *SMALL],
    "geometry": ["tiny/geo3k_multi_turn", *SMALL],
    "sight_and_sound": ["sight_and_sound", *SMALL],
    "shapes_slow": [*SHAPES, "optimizer.lr=5.0e-5"],
    "shapes": SHAPES,
}


def make_runs(work: Path) -> None:
    """Train the runs that are not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sensorium"]
    if not (work / "runs/demo/report.html").exists():
        subprocess.run([*command, "demo"], cwd=work, check=True)
    for name, recipe in RUNS.items():
        run = work / "runs" / name
        if run.exists() and ViewedRun(run, name).summary()["state"] == "finished":
            continue
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run([*command, "train", *recipe, f"name={name}"], cwd=work, check=True)


def keep(page: Page, name: str) -> None:
    """Write what the window shows as docs/NAME.png, in 256 colours."""
    page.evaluate("document.activeElement.blur()")
    seen = "image.complete || image.getBoundingClientRect().top > innerHeight"
    page.wait_for_function(f"[...document.images].every((image) => {seen})")
    shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
    path = ROOT / "docs" / f"{name}.png"
    shot.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}  {shot.width} × {shot.height}, {path.stat().st_size:,} bytes")
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path} is larger than {LARGEST:,} bytes: make its window smaller.")


def main() -> None:
    """Make the runs and all pictures."""
    chromium = shutil.which("chromium")
    make_runs(WORK)
    with sync_playwright() as playwright, View([WORK / "runs"]) as view:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def window(width: int, height: int) -> Page:
            page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2, bypass_csp=True)
            page.set_default_timeout(60_000)
            return page

        def episode(run: str, search: str, width: int, height: int, shown: Callable[[Page], object]) -> Page:
            """The first episode of a run's list, once what is to be seen there is seen."""
            page = window(width, height)
            page.goto(view.address)
            link = page.locator(".runs tbody th a").get_by_text(run, exact=True).get_attribute("href")
            page.goto(f"{view.address}{link}/episodes?{search}")
            page.locator(".count").filter(has_text=re.compile(r"of \d+ episodes?$")).wait_for()
            page.locator(".found a").first.click()
            page.locator(".episode").wait_for()
            shown(page)
            return page

        def runs(page: Page) -> None:
            for name in [*RUNS, "demo"]:
                box = page.get_by_label(f"show the curves of {name}", exact=True)
                box.set_checked(name.startswith("shapes"))
            page.locator(".plot").nth(2).filter(has_text="shapes_slow").wait_for()

        def tokens(page: Page) -> None:
            page.get_by_role("button", name="log-prob").click()
            page.locator(".token").nth(25).hover()

        def video(page: Page) -> None:
            page.wait_for_function("document.querySelector('video').readyState > 1")
            page.locator(".frames button").nth(1).click()

        def film(page: Page) -> None:
            page.keyboard.press("ArrowRight")
            page.wait_for_function("document.querySelector('.screen img').complete")

        page = window(1240, 900)
        page.goto(view.address)
        runs(page)
        keep(page, "view_runs")
        keep(episode("geometry", "correct=true&sort=turns", 1240, 830, tokens), "view_episode")
        keep(episode("sight_and_sound", "correct=true&log=train", 1240, 1040, video), "view_video")
        keep(episode("frozen_lake", "correct=true&sort=turns", 1240, 900, film), "view_film")
        page = window(1180, 800)
        page.goto((WORK / "runs/demo/report.html").as_uri())
        keep(page, "demo")
        browser.close()


if __name__ == "__main__":
    main()
