"""What does the index save where keys have both signs? The states of an LSTM that learns to write like Aesop.

The LSTM is written from two Linears, over characters; its layers are 0, the character (one-hot); 1, the state before it;
2, the state behind it, from which the next character is predicted. Keys of 1 and 2 lie in (-1, 1). Queries are
the states at held-out text. Answers are asserted equal to brute force before any time is printed.
"""

from pathlib import Path

import numpy as np
import torch
from common import arguments, machine, work_folder
from index_speed import EVERYTHING, compare
from torch import Tensor, nn

import dualstore

HIDDEN, LENGTH, BATCH = 256, 64, 32
CONDITIONS = EVERYTHING | {"step >= 100": lambda rows: rows["step"] >= 100}


class Writer(nn.Module):
    """Predicts each next character: (batch, length) numbers to (batch, length, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = characters
        self.of_input = nn.Linear(characters, 4 * HIDDEN)
        self.of_state = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, characters)

    def forward(self, text: Tensor) -> Tensor:
        """One step after another."""
        state = memory = torch.zeros(len(text), HIDDEN)
        inputs = self.of_input(nn.functional.one_hot(text, self.characters).float())
        states = []
        for position in range(text.shape[1]):
            gates = (inputs[:, position] + self.of_state(state)).chunk(4, dim=1)
            memory = gates[0].sigmoid() * memory + gates[1].sigmoid() * gates[2].tanh()
            state = gates[3].sigmoid() * memory.tanh()
            states.append(state)
        return self.head(torch.stack(states, dim=1))


def record(path: Path, text: Tensor, characters: int, steps: int) -> None:
    """Trains on all but the last tenth of the text; probes are sequences of that tenth."""
    torch.manual_seed(0)
    model = Writer(characters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    cut = len(text) * 9 // 10
    with dualstore.record(model, optimizer, path) as recorder:
        for _ in range(steps):
            starts = torch.randint(cut - LENGTH - 1, (BATCH,))
            batch = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
            with recorder.batch(sample_id=starts):
                loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        held = text[cut:][: 64 * LENGTH].view(64, LENGTH)
        with recorder.probe(test_id=range(64)):
            model(held)
    print(f"{steps} steps of {BATCH} x {LENGTH} characters, last loss {loss.item():.2f} nats")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a text file, Aesop's fables say")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--probes", type=int, default=100)
    options = parser.parse_args()
    print(machine(), f"torch {torch.__version__}")
    letters, numbers = np.unique(list(options.text.read_text()), return_inverse=True)
    with work_folder() as folder:
        record(folder / "store", torch.from_numpy(numbers), len(letters), options.steps)
        size = sum(file.stat().st_size for file in (folder / "store" / "index").rglob("*.arrow"))
        print(f"index: {size / 1e6:.0f} MB")
        for layer in (1, 2):
            compare(dualstore.open(folder / "store"), layer, options.probes, folder, CONDITIONS)


if __name__ == "__main__":
    main()
