"""All tasks, by name."""

from __future__ import annotations

from benchmarks.budget.task import Task
from benchmarks.budget.tasks import clicks, faces, learned, pictures, texts, waves

TASKS: dict[str, Task] = {
    task.name: task
    for task in (*waves.TASKS, *clicks.TASKS, *texts.TASKS, *pictures.TASKS, *faces.TASKS, *learned.TASKS)
}
JUDGED = tuple(name for name, task in TASKS.items() if task.role == "judged")
LEARNED = tuple(name for name, task in TASKS.items() if task.role == "learned")
