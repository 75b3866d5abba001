"""Progress of long work: a bar with an estimate of the time left, on standard error."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


class Bar:
    """A bar of steps with a text that changes; `done` of them are from an earlier run."""

    def __init__(self, description: str, total: int | None, *, done: int = 0, show: bool = True) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not show)
        self._task = self._progress.add_task(description, total=total, completed=done)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, description: str | None = None) -> None:
        self._progress.update(self._task, advance=1, description=description)

    def finish(self) -> None:
        """What was done is all there was."""
        self._progress.update(self._task, total=self._progress.tasks[0].completed)


def track(items: Iterable[T], description: str, total: int | None, *, done: int = 0, show: bool = True) -> Iterator[T]:
    """Yield the items while a bar shows how many are done, `done` of them from an earlier run."""
    with Bar(description, total, done=done, show=show) as bar:
        for item in items:
            yield item
            bar.advance()
        bar.finish()
