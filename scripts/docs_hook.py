"""What the site of the documentation has besides the pages in docs/: notebooks, linked files, inlined drawings.

Called by MkDocs, which names it in mkdocs.yml. Pages link to what lies outside docs/ as readers of the repository need
it (`../notebooks/1_compress.ipynb`); here these links are turned to where the site has the same thing.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINKED = ("examples/*.py", "experiments/*.png", "notebooks/*.ipynb")
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
DRAWING = re.compile(r'<img alt="([^"]*)" src="[^"]*?drawings/([a-z_]+\.svg)"\s*/?>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks as pages, and what pages link to as it is."""
    for pattern in LINKED:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            files.append(File.generated(config, name, abs_src_path=str(path)))
            if path.suffix == ".ipynb":
                page = notebook_page(json.loads(path.read_text(encoding="utf-8")), path.name)
                files.append(File.generated(config, name.replace(".ipynb", ".md"), content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave docs/ to their place on the site."""
    return OUTSIDE.sub(_inside, markdown) if page.file.generated_by is None else markdown


def _inside(link: re.Match[str]) -> str:
    target = link[1]
    folder, _, file = target.partition("/")
    if file.endswith(".md"):
        stem = file.removesuffix(".md")
        name = stem if folder == "experiments" else f"{folder}-{stem}"
        pages = (path for path in (ROOT / "docs").glob("results_*.md") if f'<a id="{name}">' in path.read_text("utf-8"))
        return f"]({next(path.name for path in pages)}#{name}"
    return f"]({target.replace('.ipynb', '.md')}"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page itself, where they take its colours."""
    return DRAWING.sub(_inlined, html)


def _inlined(image: re.Match[str]) -> str:
    drawing = (ROOT / "docs/drawings" / image[2]).read_text(encoding="utf-8")
    return f'<span class="drawing">{drawing.replace("<svg", f"""<svg aria-label="{image[1]}" """, 1)}</span>'


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """A notebook as Markdown: its text, its code, and below each cell what it put out when it was last run."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)").replace("](../docs/", "](../"))
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    title, *rest = parts
    download = f"[Download this notebook]({name}){{ .md-button download='{name}' }}"
    return "\n\n".join([title, download, *rest]) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        content = "".join(data["image/png"]).replace("\n", "")
        return f"![What the cell above drew](data:image/png;base64,{content})"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"``` {{ .text .output }}\n{text}\n```"
