"""Recording a training run: hooks on the model's linear layers and its optimiser. The only package that needs torch."""

from dualstore.capture.ids import indexed
from dualstore.capture.recorder import Recorder, record

__all__ = ["Recorder", "indexed", "record"]
