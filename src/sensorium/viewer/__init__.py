"""Look at runs in a browser: how they do, their curves side by side, and every episode that they logged.

The page follows runs that go on. It is served to this machine's browsers alone, at an address with a token. Runs are only
read; each gets an index of its episodes (view.sqlite). docs/guides/view.md says what the page shows.
"""

import threading
import webbrowser
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from sensorium.report.terminal import Terminal, say
from sensorium.vocabulary.errors import SensoriumError

USAGE = "sensorium view [RUNS …] [--port P] [--no-open] [--device D]"
DRAIN_S = 2  # what requests under way may take when the viewer ends


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUNS", help="runs, and folders of runs; default: runs")
    add("--port", type=int, default=0, help="0: any free one")
    add("--no-open", action="store_true", help="print the address, open no browser")
    add("--device", default="auto", help="of models that are asked what if: cpu, cuda; auto: the GPU, unless a run goes on")


def run(arguments: Namespace) -> int:
    with View(arguments.runs or [Path("runs")], arguments.port, arguments.device) as view:
        say(f"serving {view.address} (Ctrl-C ends it)", Terminal())
        if not arguments.no_open:
            view.open()
        view.wait()
    return 0


class View:
    """The page of some runs, which this process serves at ``address`` until it is closed."""

    def __init__(self, places: Sequence[str | Path], port: int = 0, device: str = "auto") -> None:
        try:
            import uvicorn

            from sensorium.services.application import listen_on
            from sensorium.viewer.server import make_view, new_token
        except ImportError as error:
            raise SensoriumError(f"view needs FastAPI and uvicorn: pip install 'sensorium[serve]' ({error}).") from error
        token = new_token()
        app = make_view([Path(place) for place in places], token, device=device)
        listening = listen_on("127.0.0.1", port)
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
        self._closing = app.state.viewer.closed
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=DRAIN_S, ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="view", daemon=True)
        self._thread.start()
        self._link: TemporaryDirectory[str] | None = None

    def open(self) -> None:
        """Show the page in this machine's browser, if it has one."""
        if self._link is None:  # other users see what a browser is started with, so that is not the address
            self._link = TemporaryDirectory(prefix="view-")
            page = f'<!doctype html><meta http-equiv="refresh" content="0; url={self.address}"><title>Sensorium</title>'
            (Path(self._link.name) / "view.html").write_text(page)
        webbrowser.open((Path(self._link.name) / "view.html").as_uri())

    def wait(self) -> None:
        """Return when the viewer has ended."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # without a timeout Ctrl-C would not be noticed everywhere

    def close(self) -> None:
        """End the server and what it has open."""
        self._closing.set()
        self._server.should_exit = True
        self._thread.join()
        if self._link is not None:
            self._link.cleanup()

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank" rel="noreferrer">the live page</a>'

    def __repr__(self) -> str:
        return f"View('{self.address}')"
