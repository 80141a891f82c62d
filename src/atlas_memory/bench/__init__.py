"""Synthetic benchmarks: tasks to train small models on, what untrained memories hold, and claims to be tried."""

from .associative_recall import mqar
from .mad import MAD
from .task import IGNORED, Task
from .task_training import Autoencoder, accuracy, task_model, train_on

__all__ = ["IGNORED", "MAD", "Autoencoder", "Task", "accuracy", "mqar", "task_model", "train_on"]
