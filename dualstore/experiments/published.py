"""Numbers of the papers, by the names that our own have; shares in 0..1."""

from dualstore.experiments.findings import Published

__all__ = ["BETA", "CONTINUAL", "JOINT", "MNIST"]

_VOTES = {  # layer: target accuracy where the prediction is wrong, where it is right, output accuracy where it is wrong
    0: ((0.172, 0.027), (0.751, 0.000), (0.495, 0.015)),
    1: ((0.180, 0.029), (0.788, 0.008), (0.529, 0.029)),
    2: ((0.206, 0.026), (0.847, 0.011), (0.601, 0.045)),
}

MNIST = {
    "test accuracy": Published(0.97),
    **{
        f"layer {layer}: {what}": Published(*found)
        for layer, row in _VOTES.items()
        for what, found in zip(
            ("vote is the label, prediction wrong", "vote is the label, prediction right", "vote is the output, prediction wrong"),
            row,
            strict=True,
        )
    },
}
"""Irie, Csordas, Schmidhuber 2022 (arXiv 2202.05798), table 2 and section 4.1; five runs."""

JOINT: dict[str, Published] = {}
"""The paper shows examples; it gives no numbers."""

CONTINUAL = {"MNIST accuracy before Fashion-MNIST": Published(0.97), "MNIST accuracy after it": Published(0.45)}
"""Irie, Csordas, Schmidhuber 2022, section 4.3."""

_CURVE = (9.13, 28.65, 55.51, 77.73, 89.22, 94.52, 97.26, 98.53, 99.10, 99.48)

BETA = {
    "first task alone": Published(0.9972),
    **{f"beta {1 + tenth / 10:.1f}, on W_0 too": Published(value / 100) for tenth, value in enumerate(_CURVE)},
}
"""Gershman, Fiete, Irie 2025 (arXiv 2501.02950), one seed; their matrix of the first task contains W_0."""
