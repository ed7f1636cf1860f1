"""Weights & Biases: one run there for each run here, offline unless asked otherwise.

The only file that imports wandb. It does not know what the numbers mean. Everything it writes lies in the run's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.network import answers
from harness.schema import Tracking

if TYPE_CHECKING:
    import wandb

_FOLDERS = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
_PROBE_S = 3.0
_INIT_S = 3.0
_FINISH_S = 30.0  # for what is still to be uploaded; the run's own file keeps all of it


class Tracker:
    """What a run tells W&B, one call each. The disabled one below takes the same calls and tells nobody."""

    mode = "disabled"

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """One point of the series named by the keys."""

    def summarise(self, values: Mapping[str, Any]) -> None:
        """The run's final numbers."""

    def histogram(self, name: str, values: Sequence[float]) -> None:
        """How these values are distributed."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of numbers and names."""

    def keep(self, path: Path, kind: str) -> None:
        """A file, as an artifact of this run."""

    def finish(self, failed: bool) -> None:
        """End the run there, marked failed or not. Must be called before another run starts in this process."""


class WandbTracker(Tracker):
    """A live W&B run, offline or online. What the service cannot take is said once and dropped: no measurement is lost to it."""

    def __init__(self, run: wandb.Run, mode: str, scope: ExitStack, say: Callable[[str], None]) -> None:
        self.mode = mode
        self._run = run
        self._scope = scope
        self._say = say
        self._complained = False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        with self._whatever_happens():
            self._run.log(dict(values), step=step)

    def summarise(self, values: Mapping[str, Any]) -> None:
        with self._whatever_happens():
            self._run.summary.update(dict(values))

    def histogram(self, name: str, values: Sequence[float]) -> None:
        import wandb

        with self._whatever_happens():
            if values:
                self._run.log({name: wandb.Histogram(list(values))})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        with self._whatever_happens():
            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def keep(self, path: Path, kind: str) -> None:
        import wandb

        with self._whatever_happens():
            artifact = wandb.Artifact(f"{kind}-{self._run.name}", type=kind)
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)

    def finish(self, failed: bool) -> None:
        import wandb

        try:
            with self._whatever_happens():
                self._run.finish(exit_code=1 if failed else 0)
        finally:
            wandb.teardown()  # finish returns before its last records are on disk; the end of wandb's own process is what waits for them
            self._scope.close()

    @contextmanager
    def _whatever_happens(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._complained:
                self._say(f"W&B could not take all of this run ({type(error).__name__}: {_first_line(error)}); the record has it")
            self._complained = True


def start_tracking(
    tracking: Tracking,
    folder: Path,
    run_id: str,
    config: Mapping[str, Any],
    job_type: str,
    tags: tuple[str, ...],
    say: Callable[[str], None],
) -> Tracker:
    """A tracker for one run. `folder` is made for its files; `say` hears, in one sentence, when an online run has to go on offline."""
    if tracking.mode == "disabled":
        return Tracker()
    folder = folder.absolute()  # wandb's own process may have been started elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    scope = ExitStack()
    scope.enter_context(_files_inside(folder / "wandb"))
    try:
        run, mode = _started(tracking, folder, run_id, config, job_type, tags, say)
    except BaseException:
        scope.close()
        raise
    return WandbTracker(run, mode, scope, say)


@contextmanager
def _files_inside(folder: Path) -> Iterator[None]:
    """wandb stages artifacts and keeps caches in the user's home unless these variables say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    before = {name: os.environ.get(name) for name in _FOLDERS}
    os.environ.update(dict.fromkeys(_FOLDERS, str(folder)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _started(
    tracking: Tracking,
    folder: Path,
    run_id: str,
    config: Mapping[str, Any],
    job_type: str,
    tags: tuple[str, ...],
    say: Callable[[str], None],
) -> tuple[wandb.Run, str]:
    """The run, and the mode that it really is in."""
    import wandb

    settings = wandb.Settings(
        quiet=True,
        silent=True,
        console="off",
        x_disable_stats=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=1.0,  # seconds: what a killed process can lose
        init_timeout=_INIT_S,
        finish_timeout=_FINISH_S,
    )

    def start(mode: str) -> wandb.Run:
        return wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            group=tracking.group,
            job_type=job_type,
            tags=tags,
            name=run_id,
            config=dict(config),
            dir=folder,
            mode=mode,
            reinit="finish_previous",  # a run that was left open must not swallow this one
            settings=settings,
        )

    if tracking.mode == "offline":
        return start("offline"), "offline"
    found = obstacle()
    if found is None:
        try:
            return start("online"), "online"
        except wandb.errors.Error as error:
            found = _first_line(error)
    say(f"tracking goes on offline, because {found}; `wandb sync {folder / 'wandb'}/offline-run-*` uploads it later")
    return start("offline"), "offline"


def obstacle() -> str | None:
    """Why nothing can be sent to the server, found out without wandb's long retries and without asking anybody; None if nothing is."""
    import wandb

    server = wandb.setup().settings.base_url
    if not answers(server, _PROBE_S):
        return f"the W&B server {server} cannot be reached"
    try:
        if wandb.login(prompt=False, verify=False):
            return None
    except wandb.errors.Error as error:
        return _first_line(error)
    return "nobody is logged in to W&B (`wandb login` first)"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
