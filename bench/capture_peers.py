"""What do recorders of a language model's training cost and keep? Ours beside bergson's, each in an environment of its own.

The same small training by transformers' Trainer in each: a Llama-style model of two layers (d = 128), sequences of 128 of 256
tokens, batches of 8, two a step, AdamW, two epochs. Alone and recorded in turns; then recorded, killed in the middle behind a
checkpoint and resumed from it: how many of the training's examples have records in the end. A tool that cannot be installed or
run is named with the reason. captum records nothing while a model trains: it computes gradients again from checkpoints, so
there is nothing to compare here (bench/influence.py has its scores).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INSTALL = {"dualstore": ["-e", f"{ROOT}[hf]"], "bergson": ["bergson==2.5.1"]}
UNFIT = ["torchvision", "torchaudio"]
"""What bergson asks for but does not import here; builds that do not fit the installed torch keep transformers from loading."""
EXAMPLES, LENGTH, EPOCHS, KILLED = 160, 128, 2, 17
"""Ten steps an epoch; killed in the second one, two steps behind a checkpoint."""
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": EPOCHS,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "seed": 3,
}


# What runs in a tool's environment


def model_of() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=LENGTH, tie_word_embeddings=False))


def lines() -> list[dict[str, Any]]:
    import torch

    tokens = torch.randint(0, 256, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": line, "labels": line} for line in tokens.tolist()]


def trainer_of(tool: str, folder: Path, store: Path | None, *, kill: bool = False) -> tuple[Any, Any]:
    """A Trainer, recorded where a store is given, and a callable that says what is kept."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    saving = {"save_strategy": "steps" if kill else "no", "save_steps": 5}
    data: Any = lines()
    if tool == "bergson":
        from datasets import Dataset

        data = Dataset.from_list(data)
    arguments = TrainingArguments(str(folder / "checkpoints"), **SETTINGS, **saving)
    trainer = Trainer(model=model_of(), args=arguments, train_dataset=data, data_collator=default_data_collator)
    if store is None:
        return trainer, None
    return trainer, {"dualstore": ours, "bergson": bergson}[tool](trainer, store)


def ours(trainer: Any, store: Path) -> Any:
    import dualstore.hf

    trainer.add_callback(dualstore.hf.RecorderCallback(store, index=False))

    def kept() -> dict[str, Any]:
        found = dualstore.open(store)
        assert found.verify().ok, found.verify().problems
        (examples,) = found.sql("SELECT count(DISTINCT (epoch, sample_id)) AS n FROM patterns").to_dicts()
        return {
            "what": "every key and error of every position, verified against the weights",
            "bytes": sum(part.stat().st_size for part in (store / "patterns").rglob("*.parquet")),
            "rows": found.info()["rows"],
            "layers": len(found.layers),
            "examples": examples["n"],
        }

    return kept


def bergson(trainer: Any, store: Path) -> Any:
    import numpy as np
    from bergson.huggingface import GradientCollectorCallback, prepare_for_gradient_collection

    prepare_for_gradient_collection(trainer)
    callback = GradientCollectorCallback(store)
    trainer.add_callback(callback)

    def kept() -> dict[str, Any]:
        layers, examples, size = 0, 0, 0
        for folder in sorted((store / "train").glob("epoch_*")):
            layout = json.loads((folder / "info.json").read_text())
            width, layers = sum(layout["grad_sizes"].values()), len(layout["grad_sizes"])
            values = np.fromfile(folder / "gradients.bin", layout["base_dtype"]).reshape(-1, width)
            examples += int(values.any(1).sum())
            size += values.nbytes
        each = width // layers
        return {
            "what": f"a projected gradient ({each} numbers) of each example and layer, positions summed",
            "bytes": size,
            "rows": examples * layers,
            "layers": layers,
            "examples": examples,
        }

    return kept


def work(tool: str, task: str, folder: Path, name: str) -> dict[str, Any]:
    """One training in this process; what it took and what is kept of it."""
    trainer, kept = trainer_of(tool, folder, None if task == "alone" else folder / name, kill=task in ("killed", "resumed"))
    if task == "killed":
        trainer.add_callback(_killer(KILLED))
    start, busy = time.perf_counter(), time.process_time()
    trainer.train(resume_from_checkpoint=True if task == "resumed" else None)
    found = {"wall": time.perf_counter() - start, "busy": time.process_time() - busy}
    return {**found, **(kept() if kept is not None else {})}


def _killer(step: int) -> Any:
    from transformers import TrainerCallback

    class Killer(TrainerCallback):
        """Ends the process as a power cut would."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                os._exit(9)

    return Killer()


# What runs them


def environment(tool: str, folder: Path) -> Path:
    """The Python of the tool's environment, made where it is missing. Raises CalledProcessError where pip fails."""
    python = folder / tool / "bin" / "python"
    if not (folder / tool / "installed").exists():
        venv.create(folder / tool, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *INSTALL[tool]]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNFIT], check=True, capture_output=True, text=True)
        (folder / tool / "installed").touch()
    return python


def run(python: Path, tool: str, task: str, folder: Path, name: str = "store") -> dict[str, Any]:
    """What a training in the tool's environment says. Raises RuntimeError with its last line where it fails."""
    command = [python, __file__, "--worker", tool, task, str(folder), name]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if task == "killed" and found.returncode == 9:
        return {}
    if found.returncode:
        raise RuntimeError((found.stderr.strip() or "no message").splitlines()[-1])
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def compare(tool: str, python: Path, folder: Path, pairs: int) -> None:
    """Measures one tool and prints it. Raises RuntimeError where it cannot be run."""
    alone: list[dict[str, Any]] = []
    recorded: list[dict[str, Any]] = []
    for pair in range(pairs + 1):
        for task in ("alone", "recorded") if pair % 2 == 0 else ("recorded", "alone"):
            found = run(python, tool, task, folder, f"store{pair}")
            if pair:  # the first pair warms up
                (alone if task == "alone" else recorded).append(found)
        shutil.rmtree(folder / f"store{pair}")
    for name, what in (("wall", "wall time"), ("busy", "processor time")):
        before, after = ([run[name] for run in runs] for runs in (alone, recorded))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        print(f"  {what}: alone {statistics.median(before):.2f} s, recorded {statistics.median(after):.2f} s, ", end="")
        print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    kept = recorded[-1]
    positions = EPOCHS * EXAMPLES * LENGTH * kept["layers"]
    print(f"  kept: {kept['what']}: {kept['rows']:,} rows of {kept['layers']} layers, {kept['bytes'] / 2**20:,.1f} MiB, ", end="")
    print(f"{kept['bytes'] / positions:,.1f} bytes for each position and layer, {kept['bytes'] / kept['rows']:,.0f} a row")
    print(f"  examples with records: {kept['examples']} of {EPOCHS * EXAMPLES}", flush=True)
    run(python, tool, "killed", folder, "broken")
    resumed = run(python, tool, "resumed", folder, "broken")
    print(f"  killed at step {KILLED} and resumed from the last checkpoint: {resumed['examples']} of {EPOCHS * EXAMPLES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=Path, help="folder of the environments, kept and used again; by default a temporary one")
    parser.add_argument("--tools", nargs="+", choices=sorted(INSTALL), default=list(INSTALL))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        tool, task, folder, name = options.worker
        print(json.dumps(work(tool, task, Path(folder), name)))
        return
    from common import machine, work_folder

    print(machine())
    with work_folder(options.envs) as envs, work_folder() as folder:
        for tool in options.tools:
            print(f"{tool}: {' '.join(INSTALL[tool])}", flush=True)
            try:
                (folder / tool).mkdir()
                compare(tool, environment(tool, envs), folder / tool, options.pairs)
            except subprocess.CalledProcessError as error:
                print(f"  cannot be installed: {error.stderr.strip().splitlines()[-1]}")
            except RuntimeError as error:
                print(f"  cannot be run here: {error}")


if __name__ == "__main__":
    sys.exit(main())
