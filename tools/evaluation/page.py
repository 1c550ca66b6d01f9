"""The page of an evaluation's report: one file, no script, nothing loaded from elsewhere, and well-formed as XML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

# What neither HTML nor XML can hold, whatever a model says.
_NOT_A_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --back: #ffffff; --soft: #f3f4f6; --line: #d5d8dc; --dim: #5c636b;
  --mark: #ffe08a; --s0: #0b6bcb; --s1: #c2410c; --s2: #6b7280; --good: #12793a; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ea; --back: #16181b; --soft: #212428; --line: #3b4046;
  --dim: #a3aab2; --mark: #6b5410; --s0: #62aef7; --s1: #f59053; --s2: #9ca3af; --good: #5fd38d; --bad: #ff8a7a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; } p { margin: .3rem 0; } .dim { color: var(--dim); }
.verdict { font-weight: 600; padding: .5rem .8rem; background: var(--soft); border-left: 4px solid var(--dim); }
.good { border-color: var(--good); } .bad { border-color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; } .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.chosen td { background: var(--soft); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { color: var(--dim); font-size: .9rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: var(--text); }
.grid { stroke: var(--line); stroke-width: .6; } .axis { stroke: var(--dim); fill: none; }
.limit { stroke: var(--dim); stroke-dasharray: 5 4; } .band { fill: var(--soft); }
.series-0 { stroke: var(--s0); fill: var(--s0); } .series-1 { stroke: var(--s1); fill: var(--s1); }
.series-2 { stroke: var(--s2); fill: var(--s2); } svg polyline { fill: none; stroke-width: 1.6; }
svg text { stroke: none; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .5rem .7rem; margin: 0;
  font: inherit; } mark { background: var(--mark); color: inherit; }
details { margin: .4rem 0; } summary { cursor: pointer; color: var(--dim); }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr; } }
"""

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{{ page.title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ page.title }}</h1>
{% for line in page.facts %}<p class="dim">{{ line }}</p>
{% endfor %}{% if page.verdict %}<p class="verdict {{ page.verdict_class }}">{{ page.verdict }}</p>{% endif %}
<h2>Scores</h2>
{{ table(page.scores) }}
{% for line in page.notes %}<p class="dim">{{ line }}</p>
{% endfor %}<div class="plots">
{% for figure in page.figures %}<figure>
{{ figure.svg | safe }}
<figcaption>{{ figure.caption }}</figcaption>
</figure>
{% endfor %}</div>
{% if page.cases %}<h2>{{ page.cases_title }}</h2>
<p class="dim">Greedy answers. What one says and the other does not is marked.</p>
{% for case in page.cases %}<h3>{{ case.title }}</h3>
<p class="dim">{{ case.numbers }}</p>
<details><summary>Prompt</summary><div class="said">{{ case.prompt }}</div></details>
<div class="pair">
<div><p>Full model</p><div class="said">{{ marked(case.full) }}</div></div>
<div><p>POP</p><div class="said">{{ marked(case.pop) }}</div></div>
</div>
{% if case.reference %}<details><summary>Answer that was scored</summary><div class="said">{{ case.reference }}</div>
</details>{% endif %}
{% endfor %}{% endif %}
{% if page.documents %}<h2>{{ page.documents_title }}</h2>
<details><summary>{{ page.documents.rows | length }} documents</summary>
{{ table(page.documents) }}
</details>{% endif %}
</body>
</html>
"""

_MACROS = """{% macro table(content) %}<div class="wide"><table>
<thead><tr>{% for title in content.header -%}
<th{% if not loop.first %} class="number"{% endif %}>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in content.rows %}<tr{% if loop.index0 == content.chosen %} class="chosen"{% endif %}>
{%- for cell in row %}<td{% if not loop.first %} class="number"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>{% endmacro %}
{% macro marked(pieces) %}{% for piece in pieces %}
{%- if piece.is_marked %}<mark>{{ piece.text }}</mark>{% else %}{{ piece.text }}{% endif %}
{%- endfor %}{% endmacro %}"""


@dataclass(frozen=True)
class Table:
    """Rows of text; all columns but the first align as numbers. `chosen` is the index of a row to stand out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: int | None = None


@dataclass(frozen=True)
class Figure:
    """A plot as SVG, and a line below it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer that both or only one has."""

    text: str
    is_marked: bool


@dataclass(frozen=True)
class Case:
    """Two answers side by side. `reference` is empty where the scored answer is the full model's own."""

    title: str
    numbers: str
    prompt: str
    full: Sequence[Piece]
    pop: Sequence[Piece]
    reference: str


@dataclass(frozen=True)
class Page:
    """All that the page shows. Texts are plain: the template escapes them, all but the plots."""

    title: str
    facts: Sequence[str]
    verdict: str
    verdict_class: str
    scores: Table
    notes: Sequence[str]
    figures: Sequence[Figure]
    cases_title: str
    cases: Sequence[Case]
    documents_title: str
    documents: Table


def render(page: Page) -> str:
    """The page as HTML text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    macros = environment.from_string(_MACROS).module
    html = environment.from_string(_TEMPLATE).render(
        page=page, style=_STYLE, table=vars(macros)["table"], marked=vars(macros)["marked"]
    )
    return _NOT_A_CHARACTER.sub("\ufffd", html)
