"""The command line. An error is one paragraph on stderr, ``ExitCode`` its kind; a command imports torch only to run."""

import errno
import os
import signal
import sys
import threading
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sensorium import __version__
from sensorium.cluster.event_loop import collect_rarely, interrupt_here
from sensorium.cluster.python_process import end_with_parent
from sensorium.recipe.registry import import_system
from sensorium.report.terminal import Terminal, guard_streams
from sensorium.runs.durable import cannot_write, full_disk_error
from sensorium.vocabulary.errors import NothingTrained, SensoriumError, nearest

COMMANDS = {
    "demo": "watch a small model learn to see, on this machine, in minutes",
    "train": "train a model by a recipe",
    "sweep": "train a recipe with several seeds and settings, and compare them",
    "migrate": "make a recipe of another trainer's script or settings",
    "plan": "forecast a recipe on other hardware: memory, speed, cost",
    "validate": "check environments, tools, rewards and data, without a model",
    "view": "look at runs and their episodes in a browser, as they go on",
    "show": "show a task as the model sees it: prompt, media, rewards",
    "play": "act as the policy yourself, in the terminal",
    "record": "record demonstrations once, for warm starts to read",
    "eval": "evaluate a checkpoint on a recipe's held-out tasks",
    "compare": "compare models, runs or groups of seeds on the same tasks",
    "rescore": "score the stored episodes of a run again, by other rewards",
    "export": "write a run's model in the layout of its published checkpoint",
    "curate": "keep the questions that can be answered with their pictures only",
    "serve": "serve environments, a model or rewards to other processes",
    "cluster": "say what each process of a run does",
    "replay": "run a batch again that was kept because its update was not finite",
}
# Modules of commands that are not sensorium.cli.NAME.
MODULES = {
    "eval": "sensorium.cli.evaluate",
    "curate": "sensorium.systems.caprl.curate",
    "view": "sensorium.viewer",
    "serve env": "sensorium.cli.serve_env",
    "serve model": "sensorium.cli.serve_model",
    "serve reward": "sensorium.systems.caprl.serve_reward",
}
PARTS = {"serve": ("env", "model", "reward")}
PACKAGE = str(Path(__file__).parents[1])
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
# OpenMP's threads spin while they wait. With the default of 300,000 two runs on two cores took four times as long as with
# this; a run alone is not slower.
WAITING = {"GOMP_SPINCOUNT": "30000"}


class ExitCode(IntEnum):
    """How a command ended, for scripts."""

    DONE = 0
    PROBLEMS = 1
    ERROR = 2
    UNTRAINED = 3
    INTERRUPTED = 128 + signal.SIGINT
    BROKEN_PIPE = 128 + signal.SIGPIPE
    TERMINATED = 128 + signal.SIGTERM


# Shown in docs/reference/cli.md.
EXIT_CODES = {
    ExitCode.DONE: "done; warnings may have been printed",
    ExitCode.PROBLEMS: "the command worked, and what it looked at has problems: `validate` found errors, `migrate` wrote a "
    "recipe that would be refused as it is, a run of `sweep` failed or learned nothing, `cluster status` found a run that "
    "failed or was stopped. Also a traceback: an error that no command expects, please report it",
    ExitCode.ERROR: "the command could not do its work; one paragraph on stderr says why: wrong arguments or keys, data or "
    "files that cannot be used, memory or a disk that is full, a service that does not answer, a model that is not finite",
    ExitCode.UNTRAINED: "`train` and `demo`: the run ended and nothing was learned. No step, or no step of RL, made an "
    "update, or none of the last `health.stop_after`. What the run has is saved, and its report says why",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); `train` prints how to go on",
    ExitCode.BROKEN_PIPE: "whoever read the output closed it",
    ExitCode.TERMINATED: "terminated (SIGTERM); `train` prints how to go on",
}
LINGER_S = 30.0  # a finished command waits so long for threads of the user's code before it ends without them


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _print_help(Terminal())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"sensorium {__version__}")
        return 0
    for name, value in (QUIET | ({} if "OMP_WAIT_POLICY" in os.environ else WAITING)).items():
        os.environ.setdefault(name, value)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for the user's own modules: my_rewards:Brevity
    with stopping_in_order() as stop:
        try:
            return run_command(arguments[0], arguments[1:])
        except SensoriumError as error:
            return _report(error)
        except KeyboardInterrupt:
            print(f"\n{stop.word}", file=sys.stderr)
            return stop.code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.BROKEN_PIPE
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return _report(SensoriumError(f"the name '{str(error.filename)[:60]}…' is too long for a file or folder."))
            if full_disk_error(error) is None:
                raise
            return _report(cannot_write(error.filename or "the output", error))
        except Exception as error:
            if "torch" not in sys.modules:
                raise
            from sensorium.assembly.out_of_memory import memory_exhausted

            exhausted = memory_exhausted(error)
            if exhausted is None:
                raise
            return _report(exhausted)


def entry() -> None:
    """The program: run the command of the arguments and end the process with its exit code."""
    end_with_parent()
    collect_rarely()
    guard_streams()
    warnings.formatwarning = warning_text
    code = main()
    end_without_hung_threads(code)
    sys.exit(code)


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of this package in one paragraph; those of others with their place in the code."""
    where = "" if filename.startswith(PACKAGE) else f"{filename}:{lineno}: {category.__name__}: "
    return f"warning: {where}{message}\n"


def _report(error: SensoriumError) -> int:
    words = " ".join([str(error), *getattr(error, "__notes__", ())])
    text = Text.assemble(("error: ", "bold red"), " ".join(words.split()))
    Terminal(stderr=True).print(text, soft_wrap=True)
    return ExitCode.UNTRAINED if isinstance(error, NothingTrained) else ExitCode.ERROR


def run_command(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        raise SensoriumError(f"there is no command '{name}'{nearest(name, list(COMMANDS))}")
    if name in PARTS:
        chooser = Parser(prog=f"sensorium {name}", description=COMMANDS[name], allow_abbrev=False)
        chooser.add_argument("what", choices=PARTS[name], help="each has its own --help")
        name, arguments = f"{name} {chooser.parse_args(arguments[:1]).what}", arguments[1:]
    command = import_system(place_of(name), f"sensorium {name}")
    return int(command.run(parser_of(name, command).parse_intermixed_args(arguments)))


def place_of(name: str) -> str:
    return MODULES.get(name, f"sensorium.cli.{name}")


def parser_of(name: str, command: ModuleType) -> "Parser":
    parser = Parser(prog=f"sensorium {name}", description=command.__doc__, allow_abbrev=False)
    add = parser.add_argument
    command.configure(parser)
    if name.startswith("serve "):
        add("--host", default="127.0.0.1", help="address to listen on; beyond this machine a key is needed")
        further = "a further name that clients use, such as a proxy's"
        add("--allowed-host", action="append", default=[], metavar="NAME", help=further)
    parser.usage = getattr(command, "USAGE", None)
    return parser


class Parser(ArgumentParser):
    """Suggests the right option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("--")] if "unrecognized" in message else []
        options = [name for name in self._option_string_actions if name.startswith("--")]
        super().error(message + (nearest(unknown[0], options) if unknown else ""))


def _print_help(console: Console) -> None:
    console.print(
        Text.assemble(("sensorium", "bold"), "  trains models that see, hear and act, by reinforcement learning\n")
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, words in COMMANDS.items():
        table.add_row(f"  {name}", words)
    console.print(table)
    console.print(
        Text.assemble(
            ("\n  sensorium demo\n", "bold"),
            ("  sensorium train my.yaml steps=200 optimizer.lr=1e-5\n", "bold"),
            ("  sensorium COMMAND --help  describes each", "dim"),
        )
    )


@dataclass
class Stop:
    """Which signal ended the command, its exit code (128 + signal, as in shells) and a word for people."""

    number: int = signal.SIGINT

    @property
    def code(self) -> int:
        return 128 + self.number

    @property
    def word(self) -> str:
        return "terminated" if self.number == signal.SIGTERM else "interrupted"


@contextmanager
def stopping_in_order() -> Iterator[Stop]:
    """In this context SIGTERM raises KeyboardInterrupt as Ctrl-C does, also if SIGINT is ignored (``nohup``)."""
    stop = Stop()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield stop
        return

    def terminate(number: int, frame: object) -> None:
        stop.number = signal.SIGTERM
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, so asyncio has not replaced it
            if interrupt_here():
                return
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)  # type: ignore[arg-type]  # of an event loop, which ends its tasks first

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def end_without_hung_threads(code: int) -> None:
    """End the process with this code within ``LINGER_S``, even if a non-daemon thread of the user's code never ends."""

    def leave() -> None:
        time.sleep(LINGER_S)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        hung = [thread.name for thread in others if not thread.daemon]
        names = f"{len(hung)} threads that an environment, a reward or a source started do not end ({', '.join(hung[:5])})"
        print(f"{names}; the process ends without them.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=leave, name="leave", daemon=True).start()


if __name__ == "__main__":
    entry()
