"""Makes ``evaluation.json``: what lm-eval reports of ``tiny_llama/`` with its ``hf`` backend, for two tasks.

    python -m venv hf && hf/bin/pip install "lm_eval[hf]==0.4.13" torch
    hf/bin/python tests/golden/evaluation.py

The tasks are local data: a choice between continuations, by their log-likelihood, and generation up to a stop string.
Contexts and choices have characters of one to three bytes, which are as many tokens; some choices are what greedy
decoding says, some begin with that. `run` calls lm-eval for tests, too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

HERE = pathlib.Path(__file__).parent
DOCUMENTS = [
    {"question": "so", "choices": ["\x0fg\x0f&", "\x0fg\x0f'", "\x0fg", " what"]},
    {"question": "Yes or no:", "choices": ["g", "yes", "no", " nein, naïve Straße"]},
    {"question": "The capital of France is", "choices": ["\x01Z", "\x01", " Paris"]},
    {"question": "日本", "choices": ["語", "、そして", "€", "a"]},
    {"question": "Wie heißt die Straße?", "choices": [" Königsallee", "q"]},
    {"question": "Hello, world", "choices": ["\b", "!", "\b!"]},
]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: documents.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
UNTIL, MAX_TOKENS = ["_", "h", "N"], 12
GENERATE = f"""
task: generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: documents.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: {json.dumps(UNTIL)}, max_gen_toks: {MAX_TOKENS}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
TASKS = {"choice": CHOICE, "generate": GENERATE}
ROWS = {"documents.jsonl": DOCUMENTS}


def run(
    command: Sequence[str],
    folder: pathlib.Path,
    tasks: Mapping[str, str],
    rows: Mapping[str, Sequence[Mapping]],
    model_args: Mapping[str, object],
    *options: str,
) -> dict[str, list[dict]]:
    """Runs lm-eval in a folder; what it writes for each document, in their order, by task."""
    for name, documents in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in documents))
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(task)
    command = [
        *command, "--tasks", *(str(folder / f"{name}.yaml") for name in tasks), "--log_samples",
        "--output_path", str(folder / "out"),
        "--model_args", ",".join(f"{key}={value}" for key, value in model_args.items()), *options,
    ]  # fmt: skip
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {}
    for name in tasks:
        (samples,) = (folder / "out").glob(f"**/samples_{name}_*.jsonl")
        found[name] = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return found


def answers(found: Mapping[str, list[dict]]) -> dict[str, list]:
    """(log-likelihood, whether greedy) of each choice, and the texts generated."""
    choices = [[[float(value), str(greedy) == "True"] for ((value, greedy),) in row["resps"]] for row in found["choice"]]
    return {"choice": choices, "generate": [row["resps"][0][0] for row in found["generate"]]}


def main() -> None:
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "1"]
    # The other backends of lm-eval add no BOS unless told to.
    arguments = {"pretrained": HERE / "tiny_llama", "dtype": "float32", "max_length": 256, "add_bos_token": False}
    with tempfile.TemporaryDirectory() as folder:
        content = answers(run(command, pathlib.Path(folder), TASKS, ROWS, arguments))
    content["versions"] = {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "torch")}
    (HERE / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
