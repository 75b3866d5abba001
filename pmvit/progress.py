"""Progress of long work: a bar with an estimate of the time left, on standard error."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None, *, done: int = 0, show: bool = True) -> Iterator[T]:
    """Yield the items while a bar shows how many are done, `done` of them from an earlier run."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task(description, total=total, completed=done)
        for item in items:
            yield item
            progress.advance(task)
        if total is None or not progress.finished:
            progress.update(task, total=progress.tasks[0].completed)
