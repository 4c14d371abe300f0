"""Makes ``turns.json``: how transformers renders turns of an assistant that have no content, by ways in which published templates ask
for it.

    golden/bin/python tests/golden/turns.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Transformers gives templates `None` for a content that is null. Where it then prints "None" or fails, the same turn with an empty
text is what is wanted ("as": "").
"""

from __future__ import annotations

import argparse
import json
import pathlib

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TURN = "{% for m in messages %}[{{ m.role }}]"
CALLS = "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
TEMPLATES = {
    "printed": TURN + "{{ m['content'] }}{% endfor %}",
    "added": TURN + "{{ m['content'] + ';' }}{% endfor %}",
    "trimmed": TURN + "{{ m.content | trim }}{% endfor %}",
    "truth": TURN + "{% if m.content %}{{ m.content }}{% endif %}" + CALLS + "{% endfor %}",
    "is none": TURN + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "is not none": TURN + "{% if m['content'] is not none %}{{ m['content'] }}{% endif %}" + CALLS + "{% endfor %}",
    "== none": TURN + "{% if m.content == none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "!= none": TURN + "{% if m['content'] != None %}{{ m['content'] }}{% else %}" + CALLS + "{% endif %}{% endfor %}",
    "defined": TURN + "{% if m.content is defined and m.content is not none %}{{ m.content }}{% endif %}" + CALLS + "{% endfor %}",
    "key": TURN + "{% if 'tool_calls' in m %}" + CALLS + "{% endif %}{{ m.content or '-' }}{% endfor %}",
}


def conversation(content: str | None, calls: bool) -> list[dict]:
    turn = {"role": "assistant", "content": content} | ({"tool_calls": [CALL]} if calls else {})
    return [{"role": "user", "content": "x"}, turn, {"role": "user", "content": "y"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    path = parser.parse_args().gguf
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cases = []
    for name, template in TEMPLATES.items() | {("smollm2", tokenizer.chat_template)}:
        for calls in (False, True):
            for content in ((None, "") if calls else ("",)):  # without calls, null is an empty answer
                try:
                    text = render_jinja_template([conversation(content, calls)], chat_template=template)[0][0]
                except TypeError:
                    continue
                if "None" not in text:
                    cases.append({"name": name, "calls": calls, "as": content, "text": text})
                    break
    cases.sort(key=lambda case: (case["name"], case["calls"]))
    templates = dict(sorted(TEMPLATES.items()))
    lines = ",\n".join(json.dumps(case) for case in cases)
    shown = ",\n".join(f"{json.dumps(name)}: {json.dumps(template)}" for name, template in templates.items())
    (HERE / "turns.json").write_text(f'{{"templates": {{\n{shown}\n}}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
