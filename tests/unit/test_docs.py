"""What the documentation names exists."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import typer
import yaml
from doc_blocks import blocks

import benchmarks.__main__
import gradwire
from benchmarks.catalogue import ENTRIES
from benchmarks.page import collectives_table, schedules_table, whole_page
from gradwire.bench.table import COLUMNS
from gradwire.cli import app
from gradwire.core.specs import innermost, registered_specs

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PAGE = ROOT / "docs" / "scripts.md"
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
NAMED = re.findall(r"(test_\w+\.py)::(\w+)(?:\[(.*?)\])?", PAGE.read_text())


@cache
def source(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text())


def defined(file: str) -> set[str]:
    """Names of the module's functions and classes."""
    return {node.name for node in source(file).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def words(file: str) -> set[str]:
    """All names and texts of a module: what the ids of its cases are made of."""
    nodes = list(ast.walk(source(file)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize(("file", "test", "case"), NAMED, ids=[f"{test}[{case}]" for _, test, case in NAMED])
def test_every_test_that_the_page_names_exists(file: str, test: str, case: str) -> None:
    assert file in FILES
    assert test in defined(file)
    if case:
        assert case.rpartition("-")[2] in words(file) | defined(file)


def test_every_row_of_the_page_names_a_test() -> None:
    # the last section names the files of its tests in words
    rows = [
        line
        for line in PAGE.read_text().split("## The same scripts in other frameworks")[0].splitlines()
        if line.startswith("| ")
    ]
    without = [row for row in rows if "::" not in row and not row.startswith("| case |") and "see below" not in row]
    assert len(rows) > 80
    assert without == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page may end with."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


OUTSIDE = re.compile(
    r"\b[Nn]otes (?:D[0-9]|[0-9]+\.[0-9])|\bD[0-9]{1,2}\b|\b(?:notes|architecture|field|style)\.md\b"
    r"|\b[Tt]he (?:design|review|brief|blueprint|notes')(?!\w)|\bdesign,? section\b"
)
"""References to texts that are not in the repository."""


def written() -> list[Path]:
    """All code and prose of the repository."""
    folders = ("src", "csrc", "tests", "docs", "benchmarks", "examples")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    found = [path for path in found if path.suffix in {".py", ".cpp", ".hpp", ".md"}]
    return found + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]


def test_no_text_refers_to_what_is_not_in_the_repository() -> None:
    wrong = []
    for path in written():
        name = path.relative_to(ROOT).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        wrong += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if OUTSIDE.search(line)]
    assert wrong == []


def test_the_rule_sees_what_it_is_for() -> None:
    bad = [
        "notes " + "D" + "12",
        "(section 3; D" + "21)",
        "as notes " + "2.2 say",
        "see architecture" + ".md",
        "the " + "review",
    ]
    assert [text for text in bad if not OUTSIDE.search(text)] == []
    good = ["decision 12", "each notes begin and end", "0xD3", "notes: list[str]", "Cupcake, section 4.1", "| D | 2 |"]
    assert [text for text in good if OUTSIDE.search(text)] == []


DIARY = re.compile(
    r"\b(?:this|last|next|previous|earlier|present)[\s#/*]+session\b|\bsession[\s#/*]+before\b"
    r"|\b[Ii]ssues?[\s#/*]+#?\d{1,3}\b|\b(?:last|next|previous)[\s#/*]+stop\b|\bthe[\s#/*]+stop[\s#/*]+before\b"
    r"|\bLOG\.md\b"
)
"""How a diary of the development speaks. Issues of other projects have longer numbers, or a # without the word."""


def test_no_text_speaks_of_how_it_was_developed() -> None:
    wrong = []
    for path in written():
        text = path.read_text(encoding="utf-8")
        for match in DIARY.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            wrong.append(f"{path.relative_to(ROOT).as_posix()}:{number}: {match[0]!r}")
    assert wrong == []


def test_the_rule_about_diaries_sees_what_it_is_for() -> None:
    bad = [
        "in this " + "session",
        "the next\n# " + "session starts",
        "iss" + "ue 25",
        "Iss" + "ues 25, 28",
        "iss" + "ue #7",
    ]
    bad += ["the session " + "before", "since the last " + "stop", "the stop " + "before", "see LOG" + ".md"]
    assert [text for text in bad if not DIARY.search(text)] == []
    good = ["pytorch #74157", "pytorch issue 74157", "class Session:", "the session of a model", "a session holds both"]
    good += ["attach the file to an issue", "the lanes stop before the links", "issue templates", "a last stop_at"]
    assert [text for text in good if DIARY.search(text)] == []


def test_every_page_that_is_named_in_a_comment_exists() -> None:
    for path in written():
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))


@cache
def words_of_the_code() -> set[str]:
    return {word for path in written() if path.suffix == ".py" for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
def test_what_the_page_of_a_paper_names_exists(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"`((?:src|csrc|tests|docs|benchmarks|examples)/[^`]*)`", text)
    assert page.stem == "index" or ("## Where in the code" in text and len(files) > 3)
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [name for name in re.findall(r"`(\w+_\w+)`", text) if name not in words_of_the_code()] == []


def test_the_glossary_is_in_alphabetical_order() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    entries = [line for line in lines if line.startswith("- ")]
    names = [re.match(r"- \*\*([^*]+)\*\*: \S", line) for line in entries]
    assert [entry for entry, name in zip(entries, names, strict=True) if name is None] == []
    found = [name[1].lower() for name in names if name is not None]
    assert len(set(found)) == len(found) > 40
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("glossary.md", r"The default is (\d+) in `QSGD`"),
        ("policies.md", r"`gw\.QSGD\(bits=4\)` .* one scale for every (\d+) elements"),
        ("integrations/c10d.md", r"4 bits an element, in blocks of (\d+)"),
        ("integrations/fsdp2.md", r"`gw\.QSGD\(bits=8\)` .* of its block of (\d+)"),
    ],
)
def test_pages_name_the_default_block_of_qsgd(page: str, words: str) -> None:
    named = re.findall(words, (ROOT / "docs" / page).read_text())
    assert named == [str(gradwire.QSGD().block)], f"docs/{page} has to name the default of gw.QSGD.block"


@pytest.mark.parametrize(
    ("page", "made", "fewest"),
    [
        ("auto.md", gradwire.AdaptiveBits(), 5),
        ("local_steps.md", gradwire.LocalSteps(), 6),
        ("schedules.md", gradwire.Delayed(), 8),
        ("schedules.md", gradwire.Tuned(gradwire.Policy(default=gradwire.QSGD())), 5),
    ],
    ids=["AdaptiveBits", "LocalSteps", "Delayed", "Tuned"],
)
def test_rows_of_arguments_name_the_defaults(page: str, made: object, fewest: int) -> None:
    cells = re.findall(r"^\| (`\w+=.+?`) \|", (DOCS / page).read_text(), re.MULTILINE)
    shown = [argument.partition("=")[::2] for cell in cells for argument in re.findall(r"`(.+?)`", cell)]
    known = {name: value for name, value in shown if name != "rules" and hasattr(made, name)}  # whose row has an example
    wrong = [f"{name}={value}" for name, value in known.items() if eval(value, {"gw": gradwire}) != getattr(made, name)]
    assert len(known) >= fewest
    assert not wrong, f"docs/{page} names other defaults than {made!r}: {wrong}"


def test_the_readme_can_be_read_in_two_minutes() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90
    lossy = next(index for index, line in enumerate(lines) if "default is lossy" in line)
    assert lossy < 15


def toctree(page: Path) -> list[Path]:
    """The pages that the toctrees of a page name."""
    found: list[Path] = []
    for body in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in body.splitlines():
            if line and not line.startswith(":"):
                assert "*" in line or (page.parent / f"{line}.md").exists(), f"{page} names {line}"
                found += sorted(page.parent.glob(f"{line}.md"))
    return found


def test_every_page_is_in_the_contents_once() -> None:
    listed, waiting = [DOCS / "index.md"], [DOCS / "index.md"]
    while waiting:
        found = toctree(waiting.pop())
        listed += found
        waiting += found
    assert sorted(listed) == sorted(DOCS.rglob("*.md"))


def test_the_reference_has_every_public_name_once() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: gradwire\.(\w+)$", text, re.MULTILINE)
    missing = set(gradwire.__all__) - {"__version__", *named}
    assert not missing, f"add `.. autoclass:: gradwire.NAME`, or autofunction, to docs/reference/api.md for {sorted(missing)}"
    assert sorted(named) == sorted(set(gradwire.__all__) - {"__version__"})


def test_every_compressor_of_gradwire_is_in_the_catalogue() -> None:
    own = {cls for cls in registered_specs().values() if cls.__module__.startswith("gradwire.")}
    shown = {type(spec) for entry in ENTRIES for spec in (entry.spec, innermost(entry.spec))}
    missing = sorted(cls.__name__ for cls in own - shown - {gradwire.Truncate})  # which trains no model
    assert not missing, f"add a row to ENTRIES of benchmarks/catalogue.py for {', '.join(missing)}"


@pytest.mark.parametrize("name", ["compressors.md", "options.md", "schedules.md"])
def test_tables_have_a_row_of_each_compressor_collective_and_schedule(name: str) -> None:
    made = {
        "compressors.md": [row for row in whole_page().splitlines() if row.startswith("| `")][: len(ENTRIES)],
        "options.md": [row for row in collectives_table().splitlines() if row.endswith("| gradwire |")],
        "schedules.md": [row for row in schedules_table().splitlines() if row.endswith("| gradwire |")],
    }[name]
    text = (DOCS / name).read_text()
    missing = [row for row in made if row not in text]
    assert len(made) > 3
    assert not missing, f"docs/{name} is old: `python -m benchmarks page` writes it anew"


def test_modules_of_the_reference_exist() -> None:
    text = (DOCS / "reference" / "modules.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
    assert len(named) > 20
    for name in named:
        module, _, attribute = name.rpartition(".")
        path = ROOT / "src" / Path(*name.split("."))
        if not path.with_suffix(".py").exists():
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_the_page_can_be_read(page: Path) -> None:
    """Python parses, shell parses, JSON and YAML load."""
    for block in blocks(page):
        if block.language == "python" and ">>>" not in block.text:
            ast.parse(block.text)
        elif block.language == "sh":
            done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert all(isinstance(document, dict) for document in yaml.safe_load_all(block.text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_kill_leaves_no_half_of_a_checkpoint_on_the_page(page: Path) -> None:
    """`torch.save` makes the file first and fills it later: under its name only once it is whole."""
    for block in blocks(page):
        if block.language == "python" and re.search(r"\btorch\.save\(", block.text):
            assert "os.replace(" in block.text or "TemporaryDirectory(" in block.text, block.text


def test_the_pictures_are_what_their_script_draws() -> None:
    path = DOCS / "pictures" / "draw.py"
    draw = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("draw", path))
    spec.loader.exec_module(draw)
    assert len(draw.PICTURES) > 1
    for name, made in draw.PICTURES.items():
        assert path.with_name(name).read_text() == made()


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    read = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    module, _, name = read.rpartition(".")
    assert getattr(importlib.import_module(module), name) == gradwire.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "version" not in cited, "a second place"
    assert cited["license"] == project["project"]["license"]
    made = (DOCS / "conf.py").read_text()
    assert "release = version = __version__" in made
    texts = ("README.md", "pyproject.toml", "setup.py", "CITATION.cff", "docs/conf.py", "docs/install.md")
    assert [text for text in texts if gradwire.__version__ in (ROOT / text).read_text()] == []


def test_the_changelog_is_ready_for_a_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[0] == "[Unreleased]" or titles[0].startswith(f"[{gradwire.__version__}] - ")
    released = [title for title in titles if title != "[Unreleased]"]
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", title) for title in released)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


OF_THE_TESTBED = {"GRADWIRE_TESTBED_OWNER", "GRADWIRE_IN_USER_NAMESPACE"}
"""Variables by which an emulated cluster knows its own processes. Nobody sets them."""


def test_the_page_of_environment_variables_has_all_of_them() -> None:
    page = set(re.findall(r"`(GRADWIRE_\w+)`", (DOCS / "reference" / "environment.md").read_text()))
    texts = {
        node.value
        for path in [ROOT / "setup.py", *sorted((ROOT / "src").rglob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    read = {text for text in texts if re.fullmatch(r"GRADWIRE_[A-Z_]+", text)} - OF_THE_TESTBED
    assert len(read) > 5
    assert sorted(read - page) == []
    assert sorted(name for name in page if name not in words_of_the_code() and name not in read) == []


def test_every_benchmark_is_on_its_page() -> None:
    text = (DOCS / "reference" / "benchmarks.md").read_text()
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(benchmarks.__main__.PARTS)


def test_every_column_of_the_bench_is_explained() -> None:
    text = (DOCS / "bench.md").read_text()
    named = [name.strip() for cell in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) for name in cell.split(",")]
    assert [name for name in COLUMNS if name not in ("link", "method", *named)] == []


WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_and_templates_can_be_read(path: Path) -> None:
    read = yaml.safe_load(path.read_text())
    for job in read.get("jobs", {}).values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "@v" in step.get("uses", "@v"), "a version is named"
            script = re.sub(r"\$\{\{[^}]*\}\}", "VALUE", step.get("run", ""))
            assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
            for target in re.findall(r"^make (\S+)", script, re.MULTILINE):
                assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            for name in re.findall(r"\btests/[\w/]+\.py", script):
                assert (ROOT / name).exists()


def test_hooks_before_a_commit_run_the_tools_of_the_project() -> None:
    hooks = [hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]]
    assert [hook["language"] for hook in hooks] == ["system"] * len(hooks)
    assert [re.findall(r"ruff (check|format)\b", hook["entry"]) for hook in hooks] == [["check"], ["format"]]


OF_TODAY = [page for page in PAGES if page.parent.name not in ("decisions", "papers")]
"""Pages that say what is, not what was when something was decided."""
GROUPS = {"gradwire.specs", "gradwire.schedules", "gradwire.compressors", "gradwire.collectives"}
"""Groups of entry points, which other packages name."""


def resolves(name: str) -> bool:
    """Whether a name with dots is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return all(hasattr(found, part) and ((found := getattr(found, part)) or True) for part in parts[length:])
    return False


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_gradwire_on_the_page_exist(page: Path) -> None:
    text = page.read_text()
    assert sorted(set(re.findall(r"\bgw\.(\w+)", text)) - set(gradwire.__all__)) == []
    dotted = set(re.findall(r"(?<![\w/.-])gradwire(?:\.[a-zA-Z_]\w*)+", text)) - GROUPS
    assert [name for name in sorted(dotted) if not resolves(name)] == []
    handle = set(re.findall(r"\bhandle\.(\w+)", text))
    assert [name for name in sorted(handle) if not hasattr(gradwire.Handle, name)] == []
    stats = set(re.findall(r"handle\.stats\(\)\.(\w+)", text))
    assert sorted(stats - {field.name for field in dataclasses.fields(gradwire.Stats)}) == []


def calls_of_gradwire(text: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("gw."):
            yield node


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_calls_on_the_page_have_arguments_that_exist(page: Path) -> None:
    code = [block.text for block in blocks(page) if block.language == "python" and ">>>" not in block.text]
    code += [text for text in re.findall(r"`(gw\.[^`]*\))`", page.read_text()) if "..." not in text]
    for text in code:
        for call in calls_of_gradwire(text):
            called = attrgetter(ast.unparse(call.func).removeprefix("gw."))(gradwire)
            known = inspect.signature(called).parameters
            given = {keyword.arg for keyword in call.keywords} - {None}
            assert given <= set(known), (ast.unparse(call), sorted(known))


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_the_page_exist_with_their_options(page: Path) -> None:
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="gradwire")
    text = page.read_text()
    code = "\n".join(block.text for block in blocks(page) if block.language in ("", "sh")).replace("\\\n", " ")
    called = re.findall(r"^(?:.*[ /])?gradwire ([a-z][a-z-]*)(.*)$", code, re.MULTILINE)
    called += re.findall(r"`(?:\.venv/bin/)?gradwire ([a-z][a-z-]*)( [^`]*)?`", text)
    for name, rest in called:
        command = group.get_command(context, name)
        assert command is not None, name
        known = {"--help"} | {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        options = re.findall(r"(?<!\S)(--?[a-z][\w-]*)", rest.partition(" -- ")[0].partition("#")[0])
        assert [option for option in options if option not in known] == [], (name, rest)


MOST_WORDS = 25
GUIDES = [
    ROOT / "README.md",
    *sorted(page for part in ("tutorials", "how-to", "integrations") for page in (ROOT / "docs" / part).glob("*.md")),
]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's paragraphs and list items, without code, tables and headings."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:\||#|!).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>]|\d+\.)\s)", text):
        plain = " ".join(paragraph.split()).replace("*", "")
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z])", plain)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_sentences_of_guides_are_short(page: Path) -> None:
    long = [
        sentence for sentence in sentences(page.read_text()) if len(re.findall(r"[\w'%./-]*\w[\w'%./-]*", sentence)) > MOST_WORDS
    ]
    assert not long


def test_long_sentences_are_seen() -> None:
    page = "# " + "a " * 30 + "\n\n- Short. " + "Word " * 30 + "\n\n| " + "cell " * 30 + "|\n"
    assert [len(sentence.split()) > MOST_WORDS for sentence in sentences(page)].count(True) == 1
