"""Every path that reaches the storage library is whole, and names the folder the system names."""

import pytest

from jax_longctx.errors import InputError
from jax_longctx.paths import whole_path

PATHS = {
    "../there": "there",
    "./../here/./x//y/": "here/x/y",
    "a b/ü 漢#?%&=:*": "here/a b/ü 漢#?%&=:*",
    "~/x": "home/x",
    "~nobody-here/~": "here/~nobody-here/~",
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


@pytest.mark.parametrize(("given", "found"), PATHS.items(), ids=str)
def test_a_path_is_whole(here, given, found):
    assert str(whole_path(given)) == str(here / found)
    # With the two slashes at its start that pathlib keeps.
    assert str(whole_path(f"/{here / found}")) == str(here / found)


@pytest.mark.parametrize("name", ["back\\slash", "x.__lock/y", "\udcff", "a\0b"])
def test_what_the_library_cannot_name_is_refused(here, name):
    with pytest.raises(InputError, match=r"cannot be used: .*; (rename|choose)") as caught:
        whole_path(f"../{name}")
    assert str(caught.value).isprintable()
