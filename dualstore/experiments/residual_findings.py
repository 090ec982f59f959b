"""How stiff the feature trajectories of a residual network are, at the end of its training and along it.

Source: Huang et al. 2023 (arXiv 2308.09939).
"""

from dualstore.experiments.findings import Measured
from dualstore.store import Store

__all__ = ["DEPTH", "OVER_M", "OVER_TRAINING", "measure_residual"]

M1 = [round(0.25 * quarter, 2) for quarter in range(13)]
SHOWN = 0.5
"""M1 of the ratio that is given as a number; M2 is 0."""
DEPTH, OVER_TRAINING, OVER_M = "index along depth", "over training", "ratio over M1, M2 = 0"


def measure_residual(store: Store) -> Measured:
    """Total neural stiffness, mean index and ratio over the probed test images; as tables by block, by step and by M1."""
    found = store.stiffness(m1=M1)
    last = max(row["step"] for row in found.steps)
    at_end = [row for row in found.steps if row["step"] == last]
    shown = next(row for row in at_end if row["m1"] == SHOWN)
    numbers = {
        "total neural stiffness": shown["tns"],
        "mean stiffness index": shown["nsi"],
        f"stiffness ratio at M = ({SHOWN:g}, 0)": shown["ratio"],
        f"trajectories with a stiff block at M = ({SHOWN:g}, 0)": shown["stiff"],
    }
    tables = {
        DEPTH: [{"block": row["name"], "nsi": row["nsi"]} for row in found.blocks if row["step"] == last],
        OVER_TRAINING: [
            {"step": row["step"], "tns": row["tns"], "nsi": row["nsi"], "ratio": row["ratio"]}
            for row in found.steps
            if row["m1"] == SHOWN
        ],
        OVER_M: [{"m1": row["m1"], "ratio": row["ratio"]} for row in at_end],
    }
    return Measured(numbers, tables, plain=["total neural stiffness", "mean stiffness index"])
