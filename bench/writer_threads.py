"""Does the writer's thread slow down training beside it? A model is trained alone, before and after another one is recorded.

OpenMP's threads spin between operations as long as there are no more of them than cores, and sleep from then on, also when
nothing is recorded any longer. Comparing with training alone in the same process does not show that; here the first line does.
"""

import numpy as np
from common import machine, work_folder
from language_overhead import STEPS, Loop

from dualstore.capture.background import QUEUE_BYTES

BLOCKS = 8


def main() -> None:
    print(machine())
    with work_folder() as folder:
        alone = Loop(None, {})
        alone.block()
        before = float(np.median([alone.block() for _ in range(BLOCKS)]))
        recorded = Loop(folder / "store", {"queue_bytes": QUEUE_BYTES})
        recorded.block()
        times = np.array([(alone.block(), recorded.block()) for _ in range(BLOCKS)])
        assert recorded.recorder is not None
        recorded.recorder.close()
    beside, so = np.median(times, axis=0)
    print(
        f"alone, before anything was recorded: {before:.0f} ms a step; alone, in turns with the recorded model: {beside:.0f}, "
        f"ratio {beside / before:.2f}; recorded: {so:.0f}, ratio {so / before:.2f} to before, {so / beside:.2f} to beside "
        f"({BLOCKS} blocks of {STEPS} steps each)"
    )


if __name__ == "__main__":
    main()
