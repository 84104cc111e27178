"""Every path that reaches the storage library is whole, and names the folder the system names."""

import os

import pytest

from jax_longctx.errors import InputError
from jax_longctx.paths import expanded, whole_path

PATHS = {
    "../there": "there",
    "./../here/./x": "here/x",
    "x//y/": "here/x/y",
    "a b/ü 漢#?%&=:*": "here/a b/ü 漢#?%&=:*",
    "n" * 255: f"here/{'n' * 255}",
    "~/x": "home/x",
    "link": "far/in",
    # As the system has it: not `here`.
    "link/../x": "far/x",
    "dangling/x": "far/none/x",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory `here`, beside `home` and `far`, with links to the latter."""
    for name in ("here", "home", "far/in"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "in")
    (tmp_path / "here" / "dangling").symlink_to("../far/none")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(("given", "found"), PATHS.items(), ids=[name[:20] for name in PATHS])
def test_a_path_is_whole(here, given, found):
    assert whole_path(given) == here / found
    # With two slashes at its start, which pathlib keeps, and once more.
    twice = f"/{os.path.abspath(given)}" if ".." not in given and "~" not in given else given
    assert str(whole_path(whole_path(twice))) == str(here / found)


def test_what_has_no_home_or_only_contains_a_tilde_stays(here):
    assert str(expanded("~nobody-here/x")) == "~nobody-here/x" and str(expanded("a/~")) == "a/~"


@pytest.mark.parametrize("name", ["back\\slash", "x.__lock", "x.__lock/y", "\udcff", "a\0b"])
def test_what_the_library_cannot_name_is_refused(here, name):
    with pytest.raises(InputError, match=r"cannot be used: .*; (rename|choose)") as caught:
        whole_path(f"../{name}")
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()


def test_without_a_working_directory_a_whole_path_still_serves(here):
    (here / "here" / "gone").mkdir()
    os.chdir(here / "here" / "gone")
    (here / "here" / "gone").rmdir()
    assert whole_path(here / "far") == here / "far"
    with pytest.raises(InputError, match=r"'x': no working directory: No such .*; change to"):
        whole_path("x")
