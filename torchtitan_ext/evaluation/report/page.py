"""A report as one HTML file that needs nothing else, and as Markdown with pictures beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchtitan_ext.evaluation.report.blocks import Block, Page, Picture, Section, Table, Text

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9de; --faint: #5c6670; --page: #fff; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3b424a; --faint: #a3acb5; --page: #15181b; --band: #20252a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.3rem 0; }
h2, summary { font-size: 1.2rem; font-weight: 600; margin: 1.8rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.4rem; }
p { margin: 0.5rem 0; }
p, figcaption { color: var(--faint); font-size: 0.9rem; }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; font-size: 0.9rem; }
summary { cursor: pointer; }
.box { overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: separate; border-spacing: 0; font-size: 0.875rem; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; overflow-wrap: normal; background: var(--page); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--band); }
thead th[colspan] { text-align: center; border-left: 1px solid var(--line); }
th:first-child { position: sticky; left: 0; text-align: left; font-weight: 600; z-index: 1;
  background: var(--band); border-right: 1px solid var(--line); }
.words td, .words thead th { text-align: left; vertical-align: top; }
.words td { white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; }
.words tbody th { white-space: normal; overflow-wrap: break-word; max-width: 40vw; vertical-align: top;
  font-weight: 500; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(28rem, 100%), 1fr)); }
figure { margin: 0; min-width: 0; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
@media (max-width: 40rem) { body { padding: 0.75rem; } th, td { padding: 0.25rem 0.45rem; } }
"""

_TEMPLATE = """\
{%- macro table(t) %}
{%- if t.title %}<h3>{{ t.title }}</h3>
{% endif -%}
<div class="box" tabindex="0"><table{% if t.words %} class="words"{% endif %}>
<thead>
{%- if t.groups %}
<tr>{% for title, span in t.groups -%}
<th{% if not loop.first %} colspan="{{ span }}"{% endif %}>{{ title }}</th>
{%- endfor %}</tr>
{%- endif %}
<tr>{% for cell in t.head %}<th>{{ cell }}</th>{% endfor %}</tr>
</thead>
<tbody>
{%- for row in t.rows %}
<tr>{% for cell in row -%}
{% if loop.first %}<th>{{ breakable(cell) }}</th>{% else %}<td>{{ cell }}</td>{% endif %}
{%- endfor %}</tr>
{%- endfor %}
</tbody>
</table></div>
{%- if t.note %}
<p>{{ t.note }}</p>
{%- endif %}
{% endmacro -%}
{%- macro picture(p) %}
<figure>
<img alt="{{ p.title }}" src="data:image/png;base64,{{ base64(p.png) }}">
<figcaption>{{ p.title }}</figcaption></figure>
{% endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ page.title }}</h1>
<p>{{ page.lead }}</p>
<nav>{% for section in page.sections %}<a href="#s{{ loop.index }}">{{ section.title }}</a>
{% endfor %}</nav>
</header>
<main>
{%- for section in page.sections %}
<section id="s{{ loop.index }}">
{% if section.folded %}<details><summary>{{ section.title }}</summary>
{% else %}<h2>{{ section.title }}</h2>
{% endif %}
{%- for kind, blocks in runs_of(section.blocks) %}
{%- if kind == "Picture" %}<div class="pictures">
{%- for block in blocks %}{{ picture(block) }}{% endfor %}</div>
{% else %}
{%- for block in blocks %}{% if kind == "Table" %}{{ table(block) }}{% else %}<p>{{ block.text }}</p>
{% endif %}{% endfor %}
{%- endif %}
{%- endfor %}
{%- if section.folded %}</details>
{% endif %}</section>
{%- endfor %}
</main>
</body>
</html>
"""


def html(page: Page) -> str:
    """The whole page; everything in it is escaped, and nothing is fetched."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        page=page,
        style=Markup(_STYLE),
        base64=lambda data: base64.b64encode(data).decode("ascii"),
        breakable=_breakable,
        runs_of=_runs_of,
    )


def _breakable(text: str) -> Any:
    """Escaped text that may also break after the dots and lines of a key."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._/])", text))


def _runs_of(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Neighbours of one kind together, so that pictures may stand side by side."""
    out: list[tuple[str, list[Block]]] = []
    for block in blocks:
        kind = type(block).__name__
        if not out or out[-1][0] != kind:
            out.append((kind, []))
        out[-1][1].append(block)
    return out


def markdown(page: Page) -> str:
    """The same in Markdown (tables as on GitHub); pictures are named, not held."""
    parts = [f"# {escaped(page.title)}", escaped(page.lead)]
    for section in page.sections:
        parts.append(f"## {escaped(section.title)}")
        parts += [_markdown_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Text():
            return escaped(block.text)
        case Picture():
            return f"![{escaped(block.title)}]({block.file})\n\n{escaped(block.title)}"
        case Table():
            return _markdown_table(block)


def _markdown_table(table: Table) -> str:
    head = list(table.head)
    if table.groups:
        over = [title for title, span in table.groups for _ in range(span)]
        head = [f"{title}: {name}" if title else name for title, name in zip(over, head, strict=True)]
    right = ":--" if table.words else "--:"
    rule = ["---", *([right] * (len(head) - 1))]
    lines = [[escaped(cell) for cell in row] for row in (head, *table.rows)]
    lines.insert(1, rule)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    title = f"### {escaped(table.title)}\n\n" if table.title else ""
    return f"{title}{text}" + (f"\n\n{escaped(table.note)}" if table.note else "")


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it stands, in one line."""
    text = re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))
    # What would begin a list or a heading, or become a link by itself.
    text = re.sub(r"^([-+=]|\d+[.)])(?=\s|$)", r"\\\1", text) if not text[:1].isdigit() else text
    return text.replace("://", ":\\//")


def with_own_files(sections: Sequence[Section]) -> list[Section]:
    """The sections with a file name of its own for every picture."""
    taken: set[str] = set()

    def renamed(block: Block) -> Block:
        if not isinstance(block, Picture):
            return block
        stem, number, file = block.file.removesuffix(".png"), 1, block.file
        while file in taken:
            number += 1
            file = f"{stem}-{number}.png"
        taken.add(file)
        return replace(block, file=file)

    return [replace(section, blocks=[renamed(block) for block in section.blocks]) for section in sections]
