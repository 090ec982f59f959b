"""What do contributions and influence cost? Queries on the paper's MNIST run, k = 20, by one warm scan each.

Answers are asserted equal to numpy in double precision first; beside them numpy in single precision over the same mapped files.
"""

from collections.abc import Callable

import numpy as np
from common import arguments, machine, mnist_run, seconds, spread, work_folder

import dualstore
from dualstore.schema import Layer
from dualstore.weights import coefficients_of

K, OUTPUT, TEST = 20, 3, 42
Block = tuple[np.ndarray, np.ndarray, np.ndarray]


def main() -> None:
    options = arguments(__doc__, store=True).parse_args()
    print(machine())
    with work_folder() as folder:
        store = dualstore.open(mnist_run(options, folder))
        for number in (2, 1):
            compare(store, store.layer(number))


def compare(store: dualstore.Store, layer: Layer) -> None:
    groups = store.patterns(layer).groups
    blocks = [tuple(group.part.mapping.array(group, name) for name in ("step", "x", "e")) for group in groups]
    text = f"SELECT x, g FROM probes WHERE layer = {layer.number} AND test_id = {TEST}"
    probe = store.sql(text).to_dicts()[0]
    x, g = (np.array(probe[name], np.float32) for name in ("x", "g"))
    c = coefficients_of(store, layer, "weight").at
    asked = {
        "contribution": lambda wide, block: times(wide, block, x) * (c(block[0]) * block[2][:, OUTPUT]),
        "influence": lambda wide, block: times(wide, block, x) * (c(block[0]) * (block[2].astype(wide) @ g.astype(wide))),
    }
    print(f"layer {layer.number}: {sum(group.rows for group in groups):,} patterns of {layer.d_in} + {layer.d_out}")
    for name, work in asked.items():
        how = {"score": name} | ({"output": OUTPUT} if name == "contribution" else {})

        def ours(how: dict[str, object] = how) -> np.ndarray:
            return store.query(test_id=TEST, layer=layer.number, top=K, **how).table.column(how["score"]).to_numpy()

        np.testing.assert_allclose(ours(), best(np.float64, blocks, work), rtol=1e-9)
        totals = seconds(lambda how=how: store.totals(test_id=TEST, layer=layer.number, by="label", **how), runs=3)
        beside = seconds(lambda work=work: best(np.float32, blocks, work))
        print(f"  {name:12s} query {spread(seconds(ours))} s, numpy {spread(beside)} s; totals by scan {spread(totals)} s")


def times(wide: type, block: Block, x: np.ndarray) -> np.ndarray:
    product: np.ndarray = block[1].astype(wide, copy=False) @ x.astype(wide)
    return product


def best(wide: type, blocks: list[Block], work: Callable[[type, Block], np.ndarray]) -> np.ndarray:
    """The K largest scores."""
    kept = [np.partition(work(wide, block), -K)[-K:] for block in blocks]
    return np.sort(np.concatenate(kept))[::-1][:K]


if __name__ == "__main__":
    main()
