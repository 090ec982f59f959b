"""The README is true: its commands and examples run, its claims about commands and files hold."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from dualstore.cli import commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def marked(name: str) -> str:
    """The code block behind the comment `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, name
    return found.group(1)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a `dualstore` command line as a user would."""
    words = shlex.split(command)
    assert words[0] == "dualstore"
    script = Path(sys.executable).with_name("dualstore")
    return subprocess.run([script, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)


def test_the_recording_example_runs_as_printed(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-W", "error", "-c", marked("recording")], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "top 5 of 1,536 patterns" in found.stdout


def test_the_example_of_transformers_runs_as_printed(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", marked("hf")], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "top 5 of 4,278 patterns: test 1" in found.stdout
    assert "sum of alpha by sample_id" in found.stdout


def test_the_example_of_lightning_runs_as_printed(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", marked("lightning")], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "top 5 of 1,536 patterns" in found.stdout


def test_the_demo_and_the_tour_run_as_printed(tmp_path: Path) -> None:
    demo = run("dualstore demo", tmp_path)
    assert demo.returncode == 0, demo.stderr
    for expected in ("layers", "top 20 of", "sum of alpha by label", "votes", "exact: the store rebuilds", "Try next"):
        assert expected in demo.stdout
    lines = marked("tour").splitlines()
    suggested = [line.strip() for line in demo.stdout.splitlines() if line.strip().startswith("dualstore ")]
    assert len(suggested) == 5
    for line in lines + suggested:
        found = run(line, tmp_path)
        assert found.returncode == 0, f"{line}: {found.stderr}"
        assert found.stdout.strip(), line
        assert ("path: " in found.stderr) if "--explain" in line else not found.stderr, line


def test_the_continual_example_runs_and_shows_the_effect(tmp_path: Path, data_folder: Path) -> None:
    first, *others = marked("continual").splitlines()
    smaller = f" --data {data_folder} --steps 400 --images 6000 --hidden 100 --lr 0.01"
    found = run(first + smaller, tmp_path)
    assert found.returncode == 0, found.stderr
    answers = [run(line, tmp_path) for line in others]
    for line, answer in zip(others, answers, strict=True):
        assert answer.returncode == 0, f"{line}: {answer.stderr}"
    assert "fashion" in answers[1].stdout
    assert "mnist" in answers[1].stdout
    assert "mnist" not in answers[2].stdout.split("\n", 1)[1]


def test_the_experiments_run_as_printed(tmp_path: Path, data_folder: Path) -> None:
    smaller = f" --data {data_folder} --batch-size 16 --scale 0.05 --steps 3"
    for line in marked("experiments").splitlines():
        found = run(line + smaller + " --runs 2" * ("reproduce" in line), tmp_path)
        assert found.returncode == 0, f"{line}: {found.stderr}"
        assert ("Try next" if "train" in line else "what it cost") in found.stdout
    assert (tmp_path / "reproduction" / "mnist.json").exists()


def test_every_command_is_in_the_table_of_commands() -> None:
    named = set(re.findall(r"^\| `(\w+)(?: [\w\\|]+)?` \|", README.split("## Python")[0], re.MULTILINE))
    assert set(commands.commands) == named


def test_the_two_commands_are_what_ci_runs() -> None:
    test_command = "pip install -c constraints.txt -e '.[test]' && pytest"
    assert test_command in README
    assert "pip install -c constraints.txt -e '.[demo]' && dualstore demo" in README
    assert test_command.replace("pip install", "pip install --quiet") in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("module", sorted((ROOT / "dualstore").glob("*.py")), ids=lambda path: path.name)
def test_every_module_is_on_the_map_of_the_code(module: Path) -> None:
    assert module.name in README or module.name == "__init__.py"
