"""The place in an author's code that an error names."""

import sys
import traceback
from importlib import import_module

import pytest

from telescope_core.base.code_places import own_frame, told_at


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A framework that wraps what an author's module raises within a library that it calls."""
    sources = {
        "some_library": "def read():\n    raise OSError('no such file')\n",
        "some_author": "import some_library\n\n\ndef load():\n    some_library.read()\n",
        "some_framework": "def make(load):\n    try:\n        load()\n"
        "    except OSError as error:\n        raise RuntimeError('failed') from error\n",
        "some_broken": "1 / 0\n",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in sources:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("module", "place"),
    [("some_author", ("some_author.py", 5)), ("unheard_of", ("some_framework.py", 5))],
)
def test_files_of_the_authors_module_come_before_those_of_its_framework(modules, module, place):
    framework, author = import_module("some_framework"), import_module("some_author")
    with pytest.raises(RuntimeError) as caught:
        framework.make(author.load)
    frame = own_frame(caught.value, module)
    assert (frame.filename.rpartition("/")[2], frame.lineno) == place
    text = "".join(traceback.format_exception(caught.value))
    told = told_at(text, module)
    assert told.endswith(f"{place[0]}:{place[1]})") if module == "some_author" else not told


def test_a_module_that_could_not_be_imported_has_its_place_too(modules):
    with pytest.raises(ZeroDivisionError) as caught:
        import_module("some_broken")
    assert own_frame(caught.value, "some_broken").filename.endswith("some_broken.py")
