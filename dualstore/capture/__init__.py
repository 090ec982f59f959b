"""Recording a training run: hooks on the model's linear layers and its optimiser. The only package that needs torch."""

from dualstore.capture.recorder import Recorder, record

__all__ = ["Recorder", "record"]
