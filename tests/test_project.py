"""The files of the project say what is true of it."""

import re
import tomllib
from pathlib import Path

import pytest

import vitrail

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads(text("pyproject.toml"))["project"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)", text(page)):
        assert link.startswith("https://") or (ROOT / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:vitrail|tests|docs|examples|bench)/[\w./-]+)`( \(new\))?", text(page))
    assert [name for name, new in named if (ROOT / name).exists() == bool(new)] == []


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("vitrail/workflows/network.py", ("SHAPE = ", "TRAINING = ")),
        ("vitrail/models/pos_embed.py", ("ADDED = ",)),
        ("vitrail/weights/formats/__init__.py", ("FORMATS = ",)),
        (
            "vitrail/weights/formats/base.py",
            ("def vitrail_only_features", "def with_position_table", "def convert_tensors"),
        ),
        ("vitrail/data/sources/read.py", ("LAYOUTS: ", "UNPACKED = ")),
        ("vitrail/data/augment/policy.py", ("class Op", "class Layer")),
        ("vitrail/data/augment/distort.py", ("_KERNELS: ",)),
        ("vitrail/training/optimizer.py", ("def build_optimizer",)),
        ("vitrail/tasks/table.py", ("TASKS: ", "def task_name")),
        ("vitrail/commands/recipes.py", ("FAMILIES: ",)),
        ("vitrail/metrics/accuracy.py", ("class ClassificationScores", "def score")),
    ],
)
def test_what_the_guide_tells_to_extend_is_there(file, names):
    for name in names:
        assert name in text(file) and name.strip(" :=").split()[-1] in text("CONTRIBUTING.md"), name


def test_the_workflow_runs_every_supported_python(project):
    jobs = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]
    run = {str(version) for version in jobs["linux"]["strategy"]["matrix"]["python"]}
    classifiers = [name.removeprefix("Programming Language :: Python :: ") for name in project["classifiers"]]
    assert run == {name for name in classifiers if re.fullmatch(r"3\.\d+", name)}
    assert project["requires-python"] == f">={min(run, key=lambda version: int(version.split('.')[1]))}"
    assert jobs["experimental"]["continue-on-error"] is True
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "make " in step.get("run", "")]
    assert any(command.startswith("make test") for command in commands)
    assert any(command.startswith("make quick") for command in commands)


def test_hooks_need_no_download():
    for repository in yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]:
        assert repository["repo"] == "local"
        assert {hook["language"] for hook in repository["hooks"]} <= {"system", "pygrep"}


def test_the_citation_is_of_this_version(project):
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == vitrail.__version__
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    assert any("16x16 Words" in reference["title"] for reference in citation["references"])


def test_addresses_are_placeholders(project):
    assert all(url.startswith("https://example.org/") for url in project["urls"].values())
